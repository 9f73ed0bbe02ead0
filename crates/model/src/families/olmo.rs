//! OLMo 2 and 3: norms after the sub-layers only, queries and keys normalized over the whole row;
//! OLMo 3 has windows in three layers of four and scales positions in the fourth.

use super::common::{Base, Defaults, ROW_NORM, apply_windows, sliding_layers, window};
use crate::{AttentionSpec, Config, ModelSpec, NormPlacement, Result, rope};

const OLMO2: Defaults = Defaults { eps: 1e-5, ..Defaults::LLAMA };
const OLMO3: Defaults = Defaults { theta: 500_000.0, ..OLMO2 };

pub(super) fn olmo2(config: &Config) -> Result<ModelSpec> {
    let base = Base::read("olmo2", config, &OLMO2)?;
    let rope = rope::shared(config, OLMO2.theta, base.rope_shape)?;
    let mut spec = base.spec(vec![rope], attention(config, &base)?);
    spec.layers.iter_mut().for_each(|layer| layer.norms = NormPlacement::POST);
    Ok(spec)
}

pub(super) fn olmo3(config: &Config) -> Result<ModelSpec> {
    let base = Base::read("olmo3", config, &OLMO3)?;
    let of_type = |layer_type, scaled| {
        rope::per_layer_type(config, layer_type, "rope_theta", OLMO3.theta, scaled, base.rope_shape)
    };
    let ropes = vec![of_type("full_attention", true)?, of_type("sliding_attention", false)?];
    let mut spec = base.spec(ropes, attention(config, &base)?);
    let sliding = sliding_layers(config, base.layers, |layer| (layer + 1) % 4 != 0)?;
    apply_windows(config, &mut spec, &sliding, window(config, Some(4096))?)?;
    for (layer, slides) in spec.layers.iter_mut().zip(sliding) {
        layer.norms = NormPlacement::POST;
        layer.attention.rope = Some(if slides { 1 } else { 0 });
    }
    Ok(spec)
}

fn attention(config: &Config, base: &Base) -> Result<AttentionSpec> {
    let mut attention = base.attention();
    attention.qk_norm = ROW_NORM;
    attention.qkv_bias = config.bool_or("attention_bias", false)?;
    attention.output_bias = attention.qkv_bias;
    Ok(attention)
}
