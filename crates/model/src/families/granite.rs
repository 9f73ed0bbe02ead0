//! Granite: Llama with four multipliers, on embeddings, scores, branches and logits.

use super::common::{Defaults, multiplier};
use super::llama;
use crate::{Config, ModelSpec, Result};

pub(super) fn spec(config: &Config) -> Result<ModelSpec> {
    let mut spec = llama::dense(config, "granite", &Defaults::LLAMA)?;
    spec.embed_scale = multiplier(config, "embedding_multiplier", 1.0)?;
    spec.logit_scale = 1.0 / multiplier(config, "logits_scaling", 1.0)?;
    let attention_scale = multiplier(config, "attention_multiplier", 1.0)?;
    let residual_scale = multiplier(config, "residual_multiplier", 1.0)?;
    for layer in &mut spec.layers {
        layer.attention.scale = attention_scale;
        layer.residual_scale = residual_scale;
    }
    Ok(spec)
}
