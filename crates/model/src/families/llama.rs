//! Llama 2, 3 and 3.x, and the many models with the same configuration.

use super::common::{Base, Defaults};
use crate::{Config, FfnSpec, ModelSpec, Result, rope};

pub(super) fn spec(config: &Config) -> Result<ModelSpec> {
    dense(config, "llama", &Defaults::LLAMA)
}

/// Llama's shape with its two optional biases; Granite and SmolLM3 start from it as well.
pub(super) fn dense(config: &Config, family: &'static str, defaults: &Defaults) -> Result<ModelSpec> {
    let base = Base::read(family, config, defaults)?;
    let mut attention = base.attention();
    attention.qkv_bias = config.bool_or("attention_bias", false)?;
    attention.output_bias = attention.qkv_bias;
    let rope = rope::shared(config, defaults.theta, base.rope_shape)?;
    let mut spec = base.spec(vec![rope], attention);
    let mlp_bias = config.bool_or("mlp_bias", false)?;
    for layer in &mut spec.layers {
        if let FfnSpec::Dense { bias, .. } = &mut layer.ffn {
            *bias = mlp_bias;
        }
    }
    Ok(spec)
}
