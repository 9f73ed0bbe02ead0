//! The least cost of a token: bytes to read and operations to do. Rates are compared with it.

use folio_model::{FfnSpec, LayerSpec, ModelSpec, parameters};
use folio_session::WeightBytes;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Weight bytes that a decode step reads whatever its tokens are.
    always_bytes: f64,
    /// Those of all routed experts, and the share of them that one token takes.
    expert_bytes: f64,
    expert_share: f64,
    /// Multiply-adds of the layers' matrices, for one token.
    layer_macs: f64,
    head_macs: f64,
    /// Multiply-adds of attention for one token, for each position it looks at.
    attention_macs: f64,
}

impl Cost {
    pub fn of(spec: &ModelSpec, weights: &WeightBytes) -> Self {
        let parameters = parameters(spec);
        let table = (spec.vocab_size * spec.hidden) as f64;
        let outside = if spec.tied_head { table } else { 2.0 * table };
        let layer_macs = parameters.active as f64 - outside;
        let attention = spec.layers.iter().map(|layer| 2 * layer.attention.heads * layer.attention.head_dim);
        let each = |layer: &LayerSpec| match &layer.ffn {
            FfnSpec::Dense { .. } => [0.0; 2],
            FfnSpec::Experts(e) => [e.experts, e.top_k].map(|count| (3 * count * e.inter * spec.hidden) as f64),
        };
        let [all, taken] =
            spec.layers.iter().map(each).fold([0.0; 2], |sum, each| [sum[0] + each[0], sum[1] + each[1]]);
        // A lookup reads one row of the embedding table; the head reads all of its matrix. Formats
        // may differ from matrix to matrix, so bytes are those of the matrices themselves.
        let looked_up = if spec.tied_head { 0 } else { weights.table };
        Self {
            always_bytes: (weights.matrices - weights.experts - looked_up) as f64,
            expert_bytes: weights.experts as f64,
            expert_share: if all > 0.0 { taken / all } else { 0.0 },
            layer_macs,
            head_macs: table,
            attention_macs: attention.sum::<usize>() as f64,
        }
    }

    /// Weight bytes that a decode step of `streams` streams reads: of the experts, as many as
    /// random choices hit.
    pub fn decode_bytes(&self, streams: usize) -> f64 {
        let missed = (1.0 - self.expert_share).powf(streams as f64);
        self.always_bytes + self.expert_bytes * (1.0 - missed)
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
