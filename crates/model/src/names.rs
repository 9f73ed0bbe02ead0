//! Names of a checkpoint's tensors, in Hugging Face's or GGUF's scheme, as one table.

use folio_formats::WeightSource;

use crate::NormPlacement;

/// A tensor by its role in the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Embedding,
    FinalNorm,
    Head,
    NormBeforeAttention,
    NormAfterAttention,
    NormBeforeFfn,
    NormAfterFfn,
    Query,
    Key,
    Value,
    /// Query, key and value rows in one matrix.
    Qkv,
    Output,
    QueryNorm,
    KeyNorm,
    Sinks,
    Gate,
    Up,
    /// Gate rows above up rows in one matrix.
    GateUp,
    Down,
    Router,
    /// Affects the choice of experts only.
    RouterChoice,
    SharedGate,
    SharedUp,
    SharedDown,
    /// The one-row matrix whose sigmoid scales the shared expert.
    SharedSwitch,
}

impl Part {
    /// Whether it is one of the matrices that make up most of a layer; the small ones matter too
    /// much for their size.
    pub fn is_encoded_at_load(self) -> bool {
        use Part::{Down, Gate, GateUp, Key, Output, Qkv, Query, SharedDown, SharedGate, SharedUp, Up, Value};
        matches!(
            self,
            Query | Key | Value | Qkv | Output | Gate | Up | GateUp | Down | SharedGate | SharedUp | SharedDown
        )
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Names {
    /// `model.layers.3.self_attn.q_proj.weight`; the prefix is all before `layers.`.
    HuggingFace {
        prefix: String,
        /// Whether fused experts are transposed, with alternating gate and up columns (gpt-oss).
        interleaved_experts: bool,
    },
    /// `blk.3.attn_q.weight`.
    Gguf {
        /// Whether query and key rows of each head were reordered for rotation in adjacent pairs.
        permuted: bool,
    },
}

impl Names {
    /// The Hugging Face scheme with the prefix that this source uses.
    pub(crate) fn hugging_face(source: &dyn WeightSource, interleaved_experts: bool) -> Self {
        let prefixes = ["model.", "language_model.model.", "model.language_model.", ""];
        let used = prefixes.iter().find(|prefix| source.contains(&format!("{prefix}embed_tokens.weight")));
        Names::HuggingFace { prefix: used.unwrap_or(&prefixes[0]).to_string(), interleaved_experts }
    }

    /// Names the part may have, without `.weight` or `.bias`; the first is the usual one.
    pub(crate) fn candidates(&self, part: Part, layer: usize, norms: NormPlacement) -> Vec<String> {
        match self {
            Names::HuggingFace { prefix, .. } => hugging_face(prefix, part, layer, norms),
            Names::Gguf { .. } => gguf(part, layer, norms),
        }
    }

    /// Everything in front of a layer's own names.
    pub fn layer_prefix(&self, layer: usize) -> String {
        match self {
            Names::HuggingFace { prefix, .. } => format!("{prefix}layers.{layer}."),
            Names::Gguf { .. } => format!("blk.{layer}."),
        }
    }
}

fn hugging_face(prefix: &str, part: Part, layer: usize, norms: NormPlacement) -> Vec<String> {
    let suffixes: &[&str] = match part {
        Part::Embedding => return vec![format!("{prefix}embed_tokens")],
        Part::FinalNorm => return vec![format!("{prefix}norm")],
        Part::Head => {
            let outer = prefix.strip_suffix("model.").unwrap_or(prefix);
            return vec!["lm_head".to_owned(), format!("{outer}lm_head")];
        }
        Part::NormBeforeAttention => &["input_layernorm"],
        Part::NormAfterAttention => &["post_attention_layernorm"],
        // Without a norm after attention, the norm before the ffn has the older name.
        Part::NormBeforeFfn if norms.after_attention => &["pre_feedforward_layernorm"],
        Part::NormBeforeFfn => &["post_attention_layernorm"],
        Part::NormAfterFfn => &["post_feedforward_layernorm"],
        Part::Query => &["self_attn.q_proj"],
        Part::Key => &["self_attn.k_proj"],
        Part::Value => &["self_attn.v_proj"],
        Part::Qkv => &["self_attn.qkv_proj"],
        Part::Output => &["self_attn.o_proj"],
        Part::QueryNorm => &["self_attn.q_norm"],
        Part::KeyNorm => &["self_attn.k_norm"],
        Part::Sinks => &["self_attn.sinks"],
        Part::Gate => &["mlp.gate_proj"],
        Part::Up => &["mlp.up_proj"],
        Part::GateUp => &["mlp.gate_up_proj"],
        Part::Down => &["mlp.down_proj"],
        Part::Router => &["mlp.gate", "mlp.router", "block_sparse_moe.gate"],
        Part::RouterChoice => &["mlp.gate.e_score_correction_bias"],
        Part::SharedGate => &["mlp.shared_expert.gate_proj", "mlp.shared_experts.gate_proj"],
        Part::SharedUp => &["mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj"],
        Part::SharedDown => &["mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"],
        Part::SharedSwitch => &["mlp.shared_expert_gate"],
    };
    suffixes.iter().map(|suffix| format!("{prefix}layers.{layer}.{suffix}")).collect()
}

fn gguf(part: Part, layer: usize, norms: NormPlacement) -> Vec<String> {
    let suffixes: &[&str] = match part {
        Part::Embedding => return vec!["token_embd".to_owned()],
        Part::FinalNorm => return vec!["output_norm".to_owned()],
        Part::Head => return vec!["output".to_owned()],
        Part::NormBeforeAttention => &["attn_norm"],
        Part::NormAfterAttention => &["post_attention_norm"],
        Part::NormBeforeFfn if norms.after_attention => &["ffn_norm"],
        Part::NormBeforeFfn => &["ffn_norm", "post_attention_norm"],
        Part::NormAfterFfn => &["post_ffw_norm"],
        Part::Query => &["attn_q"],
        Part::Key => &["attn_k"],
        Part::Value => &["attn_v"],
        Part::Qkv => &["attn_qkv"],
        Part::Output => &["attn_output"],
        Part::QueryNorm => &["attn_q_norm"],
        Part::KeyNorm => &["attn_k_norm"],
        Part::Sinks => &["attn_sinks"],
        Part::Gate => &["ffn_gate"],
        Part::Up => &["ffn_up"],
        // An up matrix twice as high, with no gate beside it, holds both.
        Part::GateUp => &["ffn_up"],
        Part::Down => &["ffn_down"],
        Part::Router => &["ffn_gate_inp"],
        Part::RouterChoice => &["exp_probs_b"],
        Part::SharedGate => &["ffn_gate_shexp"],
        Part::SharedUp => &["ffn_up_shexp"],
        Part::SharedDown => &["ffn_down_shexp"],
        Part::SharedSwitch => &["ffn_gate_inp_shexp"],
    };
    suffixes.iter().map(|suffix| format!("blk.{layer}.{suffix}")).collect()
}
