"""The models: at least two a family, small and odd on purpose. Heads are a multiple of 8 wide, as all published ones.

Configs are written by hand the way a hub repository holds them: some as transformers 4 writes them (`rope_theta`,
`rope_scaling`, `torch_dtype`), some as 5 does (`rope_parameters`, `layer_types`, `dtype`). Windows and original context
lengths lie well below the 64-token prompt, and the norms' epsilon is large, so that none of them can be ignored
unnoticed.
"""

FOUR, FIVE = {"torch_dtype": "float32"}, {"dtype": "float32"}


def base(model_type, architecture, hidden, inter, layers, heads, kv_heads, head_dim, vocab, tied, **more):
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "rms_norm_eps": 5e-3,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if head_dim:
        config["head_dim"] = head_dim
    return config | more


def llama(*shape, **more):
    return base("llama", "LlamaForCausalLM", *shape, hidden_act="silu", **more)


def factors(count, first, step):
    return [round(first + step * i, 3) for i in range(count)]


VARIANTS = {
    # Llama 2 and 3, and every rope scaling.
    "llama-mha": llama(48, 104, 3, 4, 4, 8, 211, False, rope_theta=500.0, **FOUR),
    "llama-mqa-tied-biases": llama(
        56, 96, 3, 4, 1, 24, 257, True, attention_bias=True, mlp_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0}, **FIVE),
    "llama-linear": llama(
        60, 88, 2, 6, 2, 16, 229, False, rope_theta=200.0, rope_scaling={"type": "linear", "factor": 3.0}, **FOUR),
    "llama-linear-5": llama(
        50, 100, 2, 5, 5, 16, 233, True,
        rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 400.0}, **FIVE),
    "llama-dynamic": llama(
        72, 96, 2, 6, 2, 8, 241, False, max_position_embeddings=32, rope_theta=150.0,
        rope_scaling={"type": "dynamic", "factor": 4.0}, **FOUR),
    "llama-dynamic-5": llama(
        50, 72, 3, 5, 1, 16, 239, True, max_position_embeddings=24,
        rope_parameters={"rope_type": "dynamic", "factor": 6.0, "rope_theta": 90.0}, **FIVE),
    "llama-yarn": llama(
        70, 90, 2, 10, 2, 16, 251, False, max_position_embeddings=128, rope_theta=300.0,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, **FOUR),
    "llama-yarn-5": llama(
        54, 80, 3, 6, 3, 40, 263, True,
        rope_parameters={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16,
                         "beta_fast": 2.0, "beta_slow": 0.25, "mscale": 2.0, "mscale_all_dim": 0.5,
                         "truncate": False, "rope_theta": 700.0}, **FIVE),
    # Longer than the configuration says: what Qwen's documentation asks for, with the length before scaling left to it.
    "llama-yarn-longer-5": llama(
        60, 88, 2, 6, 2, 16, 269, False, max_position_embeddings=32,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 300.0}, **FIVE),
    "llama-llama3": llama(
        72, 112, 3, 9, 3, 16, 269, True, rope_theta=600.0,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 32}, **FOUR),
    "llama-llama3-5": llama(
        60, 84, 2, 10, 2, 24, 271, False,
        rope_parameters={"rope_type": "llama3", "factor": 5.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0,
                         "original_max_position_embeddings": 24, "rope_theta": 900.0}, **FIVE),
    "llama-longrope-5": llama(
        48, 76, 2, 6, 2, 16, 277, False,
        rope_parameters={"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 32,
                         "short_factor": factors(8, 1.0, 0.1), "long_factor": factors(8, 1.2, 0.9),
                         "rope_theta": 250.0}, **FIVE),
    # Mistral and Mixtral.
    "mistral-window": base(
        "mistral", "MistralForCausalLM", 54, 92, 3, 6, 2, 16, 281, False, hidden_act="silu", sliding_window=9,
        rope_theta=500.0, **FOUR),
    "mistral-window-5": base(
        "mistral", "MistralForCausalLM", 70, 84, 2, 5, 1, 24, 283, True, hidden_act="silu", sliding_window=20,
        rope_parameters={"rope_type": "default", "rope_theta": 250.0}, **FIVE),
    "mixtral-experts": base(
        "mixtral", "MixtralForCausalLM", 48, 40, 2, 6, 2, 16, 293, False, hidden_act="silu", sliding_window=None,
        num_local_experts=5, num_experts_per_tok=2, rope_theta=500.0, **FOUR),
    "mixtral-fused": base(
        "mixtral", "MixtralForCausalLM", 54, 36, 2, 3, 3, 16, 307, True, hidden_act="silu", sliding_window=13,
        num_local_experts=7, num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 350.0}, **FIVE),
    # Qwen.
    "qwen2-tied": base(
        "qwen2", "Qwen2ForCausalLM", 96, 72, 3, 6, 2, None, 311, True, hidden_act="silu", use_sliding_window=False,
        sliding_window=12, max_window_layers=1, rope_theta=400.0, **FOUR),
    "qwen2-window-5": base(
        "qwen2", "Qwen2ForCausalLM", 70, 96, 3, 5, 5, 16, 313, False, hidden_act="silu", use_sliding_window=True,
        sliding_window=11, max_window_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                         "rope_theta": 300.0}, **FIVE),
    "qwen3-tied": base(
        "qwen3", "Qwen3ForCausalLM", 48, 80, 3, 6, 2, 24, 317, True, hidden_act="silu", attention_bias=False,
        rope_theta=500.0, use_sliding_window=False, sliding_window=None, **FOUR),
    "qwen3-biases-5": base(
        "qwen3", "Qwen3ForCausalLM", 60, 72, 3, 5, 1, 16, 331, False, hidden_act="silu", attention_bias=True,
        use_sliding_window=True, sliding_window=10, max_window_layers=2,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 300.0}, **FIVE),
    "qwen3_moe-experts": base(
        "qwen3_moe", "Qwen3MoeForCausalLM", 48, 68, 3, 6, 2, 16, 337, False, hidden_act="silu", num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=28, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], use_sliding_window=False, rope_theta=400.0, **FOUR),
    "qwen3_moe-fused": base(
        "qwen3_moe", "Qwen3MoeForCausalLM", 60, 64, 4, 5, 1, 8, 347, True, hidden_act="silu", num_experts=9,
        num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=False, decoder_sparse_step=2,
        mlp_only_layers=[], use_sliding_window=False, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0}, **FIVE),
    # Gemma.
    "gemma2-tied": base(
        "gemma2", "Gemma2ForCausalLM", 60, 88, 4, 6, 2, 16, 349, True, hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=16, sliding_window=12, attn_logit_softcapping=4.0, final_logit_softcapping=6.0,
        rope_theta=400.0, **FOUR),
    "gemma2-5": base(
        "gemma2", "Gemma2ForCausalLM", 60, 64, 3, 5, 5, 8, 353, True, hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=20, sliding_window=18, attn_logit_softcapping=7.0, final_logit_softcapping=9.0,
        layer_types=["full_attention", "sliding_attention", "full_attention"], attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 250.0}, **FIVE),
    "gemma3_text-tied": base(
        "gemma3_text", "Gemma3ForCausalLM", 48, 56, 7, 6, 2, 16, 359, True, hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=16, sliding_window=10, sliding_window_pattern=6, rope_theta=800.0,
        rope_local_base_freq=100.0, rope_scaling={"rope_type": "linear", "factor": 2.0}, **FOUR),
    "gemma3_text-5": base(
        "gemma3_text", "Gemma3ForCausalLM", 60, 72, 3, 5, 1, 24, 367, True, hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=40, sliding_window=15, final_logit_softcapping=8.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 900.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 60.0}}, **FIVE),
    # Phi-3 and Phi-4-mini: fused projections, partial rotation, two sets of frequencies.
    "phi3-window": base(
        "phi3", "Phi3ForCausalLM", 72, 80, 3, 9, 3, None, 373, False, hidden_act="silu", sliding_window=14,
        original_max_position_embeddings=256, rope_theta=300.0, rope_scaling=None, **FOUR),
    "phi3-longrope": base(
        "phi3", "Phi3ForCausalLM", 80, 88, 2, 5, 5, None, 379, False, hidden_act="silu", sliding_window=None,
        original_max_position_embeddings=32, rope_theta=400.0,
        rope_scaling={"type": "longrope", "short_factor": factors(8, 1.0, 0.05), "long_factor": factors(8, 1.1, 0.8)},
        **FOUR),
    "phi3-partial-longrope-5": base(
        "phi3", "Phi3ForCausalLM", 80, 84, 3, 5, 1, None, 383, True, hidden_act="silu", sliding_window=None,
        original_max_position_embeddings=24,
        rope_parameters={"rope_type": "longrope", "rope_theta": 200.0, "partial_rotary_factor": 0.75,
                         "original_max_position_embeddings": 24,
                         "short_factor": factors(6, 1.0, 0.0), "long_factor": factors(6, 1.3, 0.6)}, **FIVE),
    "phi3-partial-shortrope": base(
        "phi3", "Phi3ForCausalLM", 64, 72, 2, 4, 2, None, 409, False, hidden_act="silu", sliding_window=None,
        original_max_position_embeddings=128, rope_theta=300.0, partial_rotary_factor=0.75,
        rope_scaling={"type": "longrope", "short_factor": factors(6, 1.2, 0.5), "long_factor": factors(6, 2.0, 1.5)},
        **FOUR),
    # OLMo 2, Granite, SmolLM3.
    "olmo2-gqa": base(
        "olmo2", "Olmo2ForCausalLM", 72, 84, 3, 9, 3, None, 389, False, hidden_act="silu", rope_theta=400.0, **FOUR),
    "olmo2-tied-5": base(
        "olmo2", "Olmo2ForCausalLM", 50, 76, 3, 5, 5, 16, 397, True, hidden_act="silu", attention_bias=True,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}, **FIVE),
    "granite-tied": base(
        "granite", "GraniteForCausalLM", 60, 80, 3, 6, 2, 16, 401, True, hidden_act="silu", embedding_multiplier=3.0,
        logits_scaling=2.5, residual_multiplier=0.55, attention_multiplier=0.35, rope_theta=400.0, **FOUR),
    "granite-biases-5": base(
        "granite", "GraniteForCausalLM", 55, 72, 2, 5, 1, 16, 223, False, hidden_act="silu", attention_bias=True,
        mlp_bias=True, embedding_multiplier=0.7, logits_scaling=0.6, residual_multiplier=1.3,
        attention_multiplier=0.2, rope_parameters={"rope_type": "default", "rope_theta": 250.0}, **FIVE),
    "smollm3-tied": base(
        "smollm3", "SmolLM3ForCausalLM", 54, 64, 5, 6, 2, 16, 227, True, hidden_act="silu",
        no_rope_layer_interval=4, use_sliding_window=False, rope_theta=400.0, **FOUR),
    "smollm3-window-5": base(
        "smollm3", "SmolLM3ForCausalLM", 60, 72, 3, 5, 1, 16, 229, False, hidden_act="silu", attention_bias=True,
        mlp_bias=True, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=16,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 300.0}, **FIVE),
    # gpt-oss: in floats, and in the packing of its published checkpoints.
    "gpt_oss-floats": base(
        "gpt_oss", "GptOssForCausalLM", 48, 40, 3, 6, 2, 16, 241, False, hidden_act="silu", attention_bias=True,
        num_local_experts=5, num_experts_per_tok=2, sliding_window=11, swiglu_limit=1.5, rope_theta=500.0,
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False,
                      "original_max_position_embeddings": 32}, **FOUR),
    "gpt_oss-mxfp4": base(
        "gpt_oss", "GptOssForCausalLM", 64, 32, 2, 5, 1, 24, 251, False, hidden_act="silu", attention_bias=True,
        num_local_experts=6, num_experts_per_tok=3, sliding_window=18,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 64, "rope_theta": 300.0},
        quantization_config={"quant_method": "mxfp4",
                             "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                        "model.embed_tokens", "lm_head"]}, **FIVE),
}

# Loaded for another context than the config states: here the one for which the short factors were made, and the one that
# the scaling reaches.
MAX_CONTEXT = {"phi3-partial-shortrope": 128, "llama-yarn-longer-5": 128}

# Experts stacked in one tensor, as `save_pretrained(save_original_format=False)` leaves them.
FUSED = {"mixtral-fused", "qwen3_moe-fused"}
