//! Phi-3 and Phi-4: fused projections (found by name at load), partially rotated heads, short and
//! long factors.

use super::common::{Base, Defaults, window};
use crate::{Config, ModelSpec, Result, rope};

const PHI3: Defaults = Defaults { positions: 4096, eps: 1e-5, ..Defaults::LLAMA };

pub(super) fn spec(config: &Config) -> Result<ModelSpec> {
    let mut config = config.clone();
    config.set_default("original_max_position_embeddings", 4096.into());
    // Early checkpoints have other names for the same scaling.
    for field in ["rope_scaling", "rope_parameters"] {
        let Some(mut params) = config.value(field).cloned() else { continue };
        for key in ["type", "rope_type"] {
            if matches!(params.get(key).and_then(|kind| kind.as_str()), Some("su" | "yarn")) {
                params[key] = "longrope".into();
            }
        }
        config.set(field, params);
    }
    let base = Base::read("phi3", &config, &PHI3)?;
    let mut attention = base.attention();
    attention.window = window(&config, None)?;
    let rope = rope::shared(&config, PHI3.theta, base.rope_shape)?;
    Ok(base.spec(vec![rope], attention))
}
