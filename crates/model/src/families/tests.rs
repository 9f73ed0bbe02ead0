//! Configurations as transformers 4 and 5 write them, with the features that must follow from each;
//! and broken ones, which must be refused by file and field and never panic.

use folio_device::{Activation, NormSpan};
use serde_json::{Value, json};

use super::*;
use crate::{FfnSpec, LayerSpec, NormPlacement};

fn base(model_type: &str) -> Value {
    json!({"model_type": model_type, "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512})
}

fn with(model_type: &str, extra: Value) -> Value {
    let mut config = base(model_type);
    for (field, value) in extra.as_object().unwrap() {
        config[field] = value.clone();
    }
    config
}

fn spec_of(config: &Value) -> Result<ModelSpec> {
    let config = Config::from_json("config.json", &config.to_string())?;
    Family::of(&config)?.spec(&config)
}

fn check(model_type: &str, extra: Value, holds: impl Fn(&ModelSpec) -> bool) {
    let config = with(model_type, extra);
    let spec = spec_of(&config).unwrap_or_else(|error| panic!("{config}: {error}"));
    assert!(holds(&spec), "{config}\n{spec:#?}");
}

fn all(spec: &ModelSpec, holds: impl Fn(&LayerSpec) -> bool) -> bool {
    spec.layers.iter().all(holds)
}

fn windows(spec: &ModelSpec) -> Vec<usize> {
    spec.layers.iter().map(|layer| layer.attention.window.unwrap_or(0)).collect()
}

fn ropes(spec: &ModelSpec) -> Vec<Option<usize>> {
    spec.layers.iter().map(|layer| layer.attention.rope).collect()
}

/// The base of the position encoding, from its second frequency.
fn theta(spec: &ModelSpec, rope: usize) -> f64 {
    let frequencies = &spec.ropes[rope].inv_freq;
    f64::from(frequencies[1]).powf(-(frequencies.len() as f64)).round()
}

#[test]
fn every_family_has_a_spec() {
    for family in FAMILIES {
        let spec = spec_of(&base(family.model_type)).unwrap_or_else(|error| panic!("{}: {error}", family.model_type));
        assert_eq!(spec.layers.len(), 6, "{}", family.model_type);
        assert_eq!(spec.layers[0].attention.head_dim, 16, "{}", family.model_type);
    }
}

#[test]
fn llama_and_mistral() {
    check("llama", json!({}), |s| s.max_context == 512 && !s.tied_head && theta(s, 0) == 10_000.0);
    check("llama", json!({"rope_theta": 500000.0}), |s| theta(s, 0) == 500_000.0);
    check("llama", json!({"rope_parameters": {"rope_theta": 500000.0}}), |s| theta(s, 0) == 500_000.0);
    check("llama", json!({"num_key_value_heads": null}), |s| all(s, |l| l.attention.kv_heads == 4));
    check("llama", json!({"head_dim": null}), |s| all(s, |l| l.attention.head_dim == 16));
    check("llama", json!({"attention_bias": true, "mlp_bias": true}), |s| {
        all(s, |l| {
            l.attention.qkv_bias && l.attention.output_bias && matches!(l.ffn, FfnSpec::Dense { bias: true, .. })
        })
    });
    check("llama", json!({"hidden_act": "gelu"}), |s| {
        all(s, |l| matches!(l.ffn, FfnSpec::Dense { activation: Activation::Gelu, .. }))
    });
    check("mistral", json!({}), |s| windows(s) == [4096; 6]);
    check("mistral", json!({"sliding_window": null}), |s| windows(s) == [0; 6]);
    check("mixtral", json!({"sliding_window": 32, "num_local_experts": 3}), |s| {
        windows(s) == [32; 6] && all(s, |l| matches!(&l.ffn, FfnSpec::Experts(e) if e.experts == 3 && e.normalize))
    });
}

#[test]
fn qwen() {
    check("qwen2", json!({}), |s| all(s, |l| l.attention.qkv_bias && !l.attention.output_bias));
    check("qwen2", json!({"sliding_window": 32}), |s| windows(s) == [0; 6]);
    check("qwen2", json!({"use_sliding_window": true, "sliding_window": 32, "max_window_layers": 4}), |s| {
        windows(s) == [0, 0, 0, 0, 32, 32]
    });
    let types =
        ["full_attention", "sliding_attention", "full_attention", "full_attention", "full_attention", "full_attention"];
    check("qwen3", json!({"use_sliding_window": true, "sliding_window": 32, "layer_types": types}), |s| {
        windows(s) == [0, 32, 0, 0, 0, 0] && all(s, |l| l.attention.qk_norm == Some(NormSpan::Head))
    });
    check("qwen3_moe", json!({"use_sliding_window": true}), |s| windows(s) == [4096; 6]);
    check("qwen3_moe", json!({"use_sliding_window": true, "sliding_window": null}), |s| windows(s) == [0; 6]);
    let routed = |s: &ModelSpec| s.layers.iter().map(|l| matches!(l.ffn, FfnSpec::Experts(_))).collect::<Vec<_>>();
    let moe = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2,
        "mlp_only_layers": [3]});
    check("qwen3_moe", moe, |s| routed(s) == [false, true, false, false, false, true]);
    check("qwen3_moe", json!({}), |s| routed(s) == [true; 6]);
}

#[test]
fn gemma() {
    let alternating = [16, 0, 16, 0, 16, 0];
    check("gemma2", json!({"sliding_window": 16, "query_pre_attn_scalar": 64}), |s| {
        windows(s) == alternating
            && all(s, |l| l.norms == NormPlacement::FOUR && l.attention.scale == 0.125)
            && all(s, |l| l.attention.soft_cap == Some(50.0))
            && (s.embed_scale, s.norm_offset, s.logit_soft_cap, s.tied_head) == (8.0, 1.0, Some(30.0), true)
    });
    check("gemma2", json!({"attn_logit_softcapping": null, "final_logit_softcapping": null}), |s| {
        s.logit_soft_cap.is_none() && all(s, |l| l.attention.soft_cap.is_none())
    });
    let two_bases = |s: &ModelSpec| theta(s, 0) == 1_000_000.0 && theta(s, 1) == 10_000.0;
    check("gemma3_text", json!({"sliding_window": 16}), |s| {
        windows(s) == [16, 16, 16, 16, 16, 0] && ropes(s)[4..] == [Some(1), Some(0)] && two_bases(s)
    });
    check("gemma3_text", json!({"sliding_window": 16, "sliding_window_pattern": 2}), |s| windows(s) == alternating);
    // transformers 4: the scaling is for the full layers only.
    let scaled =
        json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    check("gemma3_text", scaled, |s| s.ropes[0].inv_freq[0] == 0.125 && s.ropes[1].inv_freq[0] == 1.0);
    let nested = json!({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
    check("gemma3_text", nested, |s| s.ropes[0].inv_freq[0] == 0.125 && s.ropes[1].inv_freq[0] == 1.0);
    // A multimodal folder: only the language half counts, and leaves many fields to its class.
    let multimodal = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
        "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}});
    let spec = spec_of(&multimodal).unwrap();
    assert_eq!((spec.hidden, spec.layers.len(), spec.layers[0].attention.head_dim), (2560, 34, 256));
    assert!(spec.tied_head);
    let changed = |field: &str, value: Value| {
        let mut config = multimodal.clone();
        config[field] = value;
        spec_of(&config)
    };
    assert!(!changed("tie_word_embeddings", json!(false)).unwrap().tied_head);
}

#[test]
fn phi_olmo_granite_smollm_gpt_oss() {
    let factors = [1.0; 6];
    let su = json!({"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "su", "short_factor": factors, "long_factor": factors}});
    check("phi3", su, |s| s.ropes[0].inv_freq.len() == 6 && s.ropes[0].magnitude > 1.0);
    check("olmo2", json!({}), |s| {
        all(s, |l| l.norms == NormPlacement::POST && l.attention.qk_norm == Some(NormSpan::Row))
    });
    check("olmo3", json!({"sliding_window": 16}), |s| windows(s) == [16, 16, 16, 0, 16, 16]);
    let granite = json!({"embedding_multiplier": 12.0, "logits_scaling": 8.0, "attention_multiplier": 0.5,
        "residual_multiplier": 0.25});
    check("granite", granite, |s| {
        (s.embed_scale, s.logit_scale) == (12.0, 0.125)
            && all(s, |l| (l.attention.scale, l.residual_scale) == (0.5, 0.25))
    });
    check("smollm3", json!({}), |s| ropes(s) == [Some(0), Some(0), Some(0), None, Some(0), Some(0)] && s.tied_head);
    check("smollm3", json!({"no_rope_layers": [0, 1, 1, 1, 1, 0]}), |s| ropes(s)[0].is_none() && ropes(s)[5].is_none());
    check("gpt_oss", json!({}), |s| {
        windows(s) == [128, 0, 128, 0, 128, 0]
            && s.ropes[0].magnitude > 1.3
            && all(s, |l| l.attention.sinks && l.attention.qkv_bias)
            && all(s, |l| matches!(&l.ffn, FfnSpec::Experts(e) if e.expert_bias && e.router_bias && e.top_k == 4))
    });
}

#[test]
fn what_is_not_honoured_is_refused_by_name() {
    let rows = [
        ("llama", json!({"hidden_act": "relu"}), "hidden_act"),
        ("llama", json!({"is_encoder_decoder": true}), "is_encoder_decoder"),
        ("llama", json!({"architectures": ["LlamaForSequenceClassification"]}), "architectures"),
        ("llama", json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        ("llama", json!({"head_dim": 15}), "head_dim"),
        ("llama", json!({"num_hidden_layers": 100000}), "num_hidden_layers"),
        ("gemma3_text", json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping"),
        ("gemma3_text", json!({"use_bidirectional_attention": true}), "use_bidirectional_attention"),
        ("gemma2", json!({"layer_types": ["sliding_attention"]}), "layer_types"),
        ("gemma2", json!({"layer_types": ["chunked_attention", "x", "x", "x", "x", "x"]}), "layer_types"),
        ("gpt_oss", json!({"num_experts_per_tok": 1000}), "num_experts_per_tok"),
        ("bloom", json!({}), "model_type"),
    ];
    for (model_type, extra, field) in rows {
        let error = spec_of(&with(model_type, extra)).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains(field), "{model_type} {field}: {error}");
    }
    let error = spec_of(&json!({"vocab_size": 3})).unwrap_err().to_string();
    assert_eq!(error, "config.json: field model_type is missing");
}

/// The largest accepted sizes overflow 64 bits in products; counting them must not panic.
#[test]
fn absurd_sizes_are_counted_without_overflow() {
    let config = with(
        "mixtral",
        json!({"hidden_size": 1 << 20, "intermediate_size": 1 << 20,
        "num_hidden_layers": 1024, "num_local_experts": 1 << 14, "sliding_window": u64::MAX}),
    );
    let spec = spec_of(&config).unwrap();
    assert_eq!(crate::parameters(&spec).total, u64::MAX);
    assert!(windows(&spec).iter().all(|window| *window <= 1 << 30));
}

/// Every field of every family, replaced by every kind of nonsense or removed: an error that names
/// file and field, or a model of bounded size.
#[test]
fn mutated_configurations_never_panic() {
    let rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let extra = json!({"rope_scaling": rope, "sliding_window": 32, "use_sliding_window": true, "layer_types":
        vec!["full_attention"; 6], "rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0,
        "no_rope_layers": [1, 1, 1, 0, 1, 1], "partial_rotary_factor": 1.0, "hidden_act": "silu",
        "tie_word_embeddings": true, "attention_bias": false, "embedding_multiplier": 1.0, "logits_scaling": 2.0,
        "mlp_only_layers": [1], "decoder_sparse_step": 1, "max_window_layers": 2, "swiglu_limit": 7.0});
    let nonsense = [
        json!(null),
        json!(0),
        json!(-1),
        json!(1),
        json!(3),
        json!(1.5),
        json!(1e300),
        json!(u64::MAX),
        json!("x"),
        json!(true),
        json!([]),
        json!([1]),
        json!(["x"]),
        json!({}),
        json!({"rope_type": "x"}),
        json!({"type": "longrope", "long_factor": [0]}),
        json!({"rope_type": "dynamic", "factor": 1e300}),
        json!({"rope_type": "yarn", "factor": 1e-300}),
        json!({"full_attention": 3}),
    ];
    let (mut refused, mut accepted) = (0, 0);
    for family in FAMILIES {
        let whole = with(family.model_type, extra.clone());
        for field in whole.as_object().unwrap().keys() {
            for value in nonsense.iter().map(Some).chain([None]) {
                let mut config = whole.clone();
                match value {
                    Some(value) => config[field] = value.clone(),
                    None => drop(config.as_object_mut().unwrap().remove(field)),
                }
                match spec_of(&config) {
                    Ok(spec) => {
                        assert!(crate::parameters(&spec).total > 0);
                        assert!(spec.layers.len() <= 1024 && spec.ropes.iter().all(|rope| rope.inv_freq.len() <= 256));
                        accepted += 1;
                    }
                    Err(error) => {
                        let text = error.to_string();
                        assert!(text.starts_with("config.json: field "), "{field} = {value:?}: {text}");
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(refused > 1000 && accepted > 1000, "{refused} refused, {accepted} accepted");
}
