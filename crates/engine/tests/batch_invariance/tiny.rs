//! Small models with random weights: one with layers that alternate between two block tables, one
//! with routed experts.

use folio_formats::{Format, TensorView, WeightSource};
use folio_model::OpenModel;

pub struct RandomWeights(Vec<(String, Vec<usize>, Vec<u8>)>);

impl RandomWeights {
    fn new(shapes: Vec<(String, Vec<usize>)>) -> Self {
        let mut state = 0x1234_5678_9abc_def1_u64;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let mut bytes = |shape: &[usize]| -> Vec<u8> {
            // Wide enough for attention to be sharp, so that a wrong key shows.
            let scale = if shape.len() == 1 { 0.2 } else { 3.0 / (shape[1] as f32).sqrt() };
            let offset = if shape.len() == 1 { 1.0 } else { 0.0 };
            let bf16 = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
            (0..shape.iter().product()).flat_map(|_| bf16(offset + scale * uniform())).collect()
        };
        Self(shapes.into_iter().map(|(name, shape)| (name, shape.clone(), bytes(&shape))).collect())
    }

    /// Makes a row of a matrix NaN.
    fn poison(&mut self, name: &str, row: usize) {
        let (_, shape, bytes) = self.0.iter_mut().find(|(n, _, _)| n == name).expect("a tensor of the model");
        bytes[row * shape[1] * 2..][..shape[1] * 2].fill(0xff);
    }
}

impl WeightSource for RandomWeights {
    fn names(&self) -> Vec<&str> {
        self.0.iter().map(|(name, _, _)| name.as_str()).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, shape, bytes) = self.0.iter().find(|(n, _, _)| n == name)?;
        Some(TensorView { name, format: Format::BF16, shape: shape.clone(), bytes })
    }

    fn release(&self, _: &str) {}
}

/// Dimensions of a model.
pub struct Size {
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Intermediate size of an expert.
    pub inter: usize,
    pub experts: usize,
    /// A token with an embedding that is not a number. Logits then come from a matrix of their own.
    pub hole: Option<u32>,
}

const HIDDEN: usize = 48;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const INTER: usize = 80;
const VOCAB: usize = 211;
pub const SMALL: Size =
    Size { hidden: HIDDEN, heads: HEADS, kv_heads: KV_HEADS, head_dim: HEAD_DIM, inter: 32, experts: 9, hole: None };

fn shapes(size: &Size, layers: usize, layer: impl Fn(&mut dyn FnMut(&str, &[usize]))) -> Vec<(String, Vec<usize>)> {
    let &Size { hidden, heads, kv_heads, head_dim, .. } = size;
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for index in 0..layers {
        let mut push = |name: &str, shape: &[usize]| {
            shapes.push((format!("model.layers.{index}.{name}.weight"), shape.to_vec()));
        };
        push("self_attn.q_proj", &[heads * head_dim, hidden]);
        push("self_attn.k_proj", &[kv_heads * head_dim, hidden]);
        push("self_attn.v_proj", &[kv_heads * head_dim, hidden]);
        push("self_attn.o_proj", &[hidden, heads * head_dim]);
        push("input_layernorm", &[hidden]);
        push("post_attention_layernorm", &[hidden]);
        layer(&mut push);
    }
    shapes
}

/// Gemma 2: soft caps, four norms, and a window in every other layer.
pub fn alternating() -> OpenModel {
    let config = format!(
        r#"{{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": {VOCAB},
        "hidden_size": {HIDDEN}, "num_hidden_layers": 4, "num_attention_heads": {HEADS},
        "num_key_value_heads": {KV_HEADS}, "head_dim": {HEAD_DIM}, "intermediate_size": {INTER},
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 24,
        "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true, "torch_dtype": "bfloat16"}}"#
    );
    let weights = RandomWeights::new(shapes(&SMALL, 4, |push| {
        push("pre_feedforward_layernorm", &[HIDDEN]);
        push("post_feedforward_layernorm", &[HIDDEN]);
        push("mlp.gate_proj", &[INTER, HIDDEN]);
        push("mlp.up_proj", &[INTER, HIDDEN]);
        push("mlp.down_proj", &[HIDDEN, INTER]);
    }));
    OpenModel::from_config(&config, Box::new(weights)).expect("the tiny model opens")
}

/// Qwen3-MoE: norms of q and k, and four of nine experts for each token.
pub fn experts() -> OpenModel {
    experts_of(&SMALL)
}

/// The same in any size.
pub fn experts_of(size: &Size) -> OpenModel {
    let &Size { hidden, heads, kv_heads, head_dim, inter, experts, hole } = size;
    let tied = hole.is_none();
    let config = format!(
        r#"{{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": {VOCAB},
        "hidden_size": {hidden}, "num_hidden_layers": 3, "num_attention_heads": {heads},
        "num_key_value_heads": {kv_heads}, "head_dim": {head_dim}, "intermediate_size": {INTER},
        "moe_intermediate_size": {inter}, "num_experts": {experts}, "num_experts_per_tok": 4, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": {tied}, "torch_dtype": "bfloat16"}}"#
    );
    let mut shapes = shapes(size, 3, |push| {
        push("self_attn.q_norm", &[head_dim]);
        push("self_attn.k_norm", &[head_dim]);
        push("mlp.gate", &[experts, hidden]);
        for expert in 0..experts {
            push(&format!("mlp.experts.{expert}.gate_proj"), &[inter, hidden]);
            push(&format!("mlp.experts.{expert}.up_proj"), &[inter, hidden]);
            push(&format!("mlp.experts.{expert}.down_proj"), &[hidden, inter]);
        }
    });
    if !tied {
        shapes.push(("lm_head.weight".to_owned(), vec![VOCAB, hidden]));
    }
    let mut weights = RandomWeights::new(shapes);
    if let Some(token) = hole {
        weights.poison("model.embed_tokens.weight", token as usize);
    }
    OpenModel::from_config(&config, Box::new(weights)).expect("the tiny model opens")
}
