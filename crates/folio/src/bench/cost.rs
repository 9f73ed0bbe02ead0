//! What a token costs at the least: bytes to read and operations to do. The floor that rates are compared with.

use folio_model::{ModelSpec, parameters};

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
        let parameters = parameters(spec);
        let table = (spec.vocab_size * spec.hidden) as f64;
        let outside = if spec.tied_head { table } else { 2.0 * table };
        let layer_macs = parameters.active as f64 - outside;
        let attention = spec.layers.iter().map(|layer| 2 * layer.attention.heads * layer.attention.head_dim);
        Self {
            // A lookup reads one row of the embedding table; the head reads all of its matrix.
            decode_weight_bytes: weight_bytes as f64 * (layer_macs + table) / parameters.total as f64,
            layer_macs,
            head_macs: table,
            attention_macs: attention.sum::<usize>() as f64,
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
