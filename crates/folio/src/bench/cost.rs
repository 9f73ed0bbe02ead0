//! What a token costs at the least: bytes to read and operations to do. The floor that rates are compared with.

use folio_model::{FfnSpec, LayerSpec, ModelSpec};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Weight bytes that one token's decode step reads.
    pub decode_weight_bytes: f64,
    /// Multiply-adds of the layers' matrices, for one token.
    layer_macs: f64,
    head_macs: f64,
    /// Multiply-adds of attention for one token, for each position it looks at.
    attention_macs: f64,
}

impl Cost {
    pub fn of(spec: &ModelSpec, weight_bytes: u64) -> Self {
        let layer_macs: f64 = spec.layers.iter().map(|layer| active_parameters(spec.hidden, layer)).sum();
        let all: f64 = spec.layers.iter().map(|layer| stored_parameters(spec.hidden, layer)).sum();
        let table = (spec.vocab_size * spec.hidden) as f64;
        let stored = all + if spec.tied_head { table } else { 2.0 * table };
        let attention = spec.layers.iter().map(|layer| 2 * layer.attention.heads * layer.attention.head_dim).sum::<usize>();
        Self {
            decode_weight_bytes: weight_bytes as f64 * (layer_macs + table) / stored,
            layer_macs,
            head_macs: table,
            attention_macs: attention as f64,
        }
    }

    /// Operations (two a multiply-add) of a prompt: the head runs on its last token only.
    pub fn prefill_flops(&self, tokens: usize) -> f64 {
        let (tokens, positions) = (tokens as f64, (tokens * (tokens + 1) / 2) as f64);
        2.0 * (self.layer_macs * tokens + self.head_macs + self.attention_macs * positions)
    }

    /// Operations of one decoded token behind `context` others.
    pub fn decode_flops(&self, context: usize) -> f64 {
        2.0 * (self.layer_macs + self.head_macs + self.attention_macs * context as f64)
    }
}

fn attention_parameters(hidden: usize, layer: &LayerSpec) -> f64 {
    let a = &layer.attention;
    (hidden * a.head_dim * (2 * a.heads + 2 * a.kv_heads)) as f64
}

fn active_parameters(hidden: usize, layer: &LayerSpec) -> f64 {
    attention_parameters(hidden, layer) + ffn_parameters(hidden, layer, |experts| experts.top_k)
}

fn stored_parameters(hidden: usize, layer: &LayerSpec) -> f64 {
    attention_parameters(hidden, layer) + ffn_parameters(hidden, layer, |experts| experts.experts)
}

fn ffn_parameters(hidden: usize, layer: &LayerSpec, counted: impl Fn(&folio_model::ExpertsSpec) -> usize) -> f64 {
    match &layer.ffn {
        FfnSpec::Dense { inter, .. } => (3 * hidden * inter) as f64,
        FfnSpec::Experts(experts) => {
            let shared = experts.shared.as_ref().map_or(0, |shared| shared.inter);
            (3 * hidden * (counted(experts) * experts.inter + shared) + hidden * experts.experts) as f64
        }
    }
}
