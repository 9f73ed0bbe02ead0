//! SmolLM3: Llama without positions in every fourth layer.

use super::common::{Defaults, apply_windows, sliding_layers, window};
use super::llama;
use crate::{Config, ModelSpec, Result};

const SMOLLM3: Defaults =
    Defaults { kv_heads: Some(4), positions: 32_768, theta: 2_000_000.0, tied: true, ..Defaults::LLAMA };

pub(super) fn spec(config: &Config) -> Result<ModelSpec> {
    let mut spec = llama::dense(config, "smollm3", &SMOLLM3)?;
    let turned = turned_layers(config, spec.layers.len())?;
    for (layer, turned) in spec.layers.iter_mut().zip(&turned) {
        layer.attention.rope = turned.then_some(0);
    }
    let window = if config.bool_or("use_sliding_window", false)? { window(config, None)? } else { None };
    let mut sliding = sliding_layers(config, turned.len(), |layer| window.is_some() && !turned[layer])?;
    if window.is_none() {
        sliding.fill(false);
    }
    apply_windows(config, &mut spec, &sliding, window)?;
    Ok(spec)
}

/// `no_rope_layers` holds 1 for a layer *with* positions.
fn turned_layers(config: &Config, layers: usize) -> Result<Vec<bool>> {
    if let Some(flags) = config.numbers("no_rope_layers")? {
        if flags.len() < layers {
            let problem = format!("has {} entries, but must have {layers}", flags.len());
            return Err(config.refuse("no_rope_layers", problem));
        }
        return Ok(flags.into_iter().take(layers).map(|flag| flag != 0.0).collect());
    }
    let interval = config.size_or("no_rope_layer_interval", 4, 1024)?;
    Ok((0..layers).map(|layer| (layer + 1) % interval != 0).collect())
}
