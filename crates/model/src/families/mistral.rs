//! Mistral and Mixtral: Llama with a window over all layers; Mixtral routes each token to two
//! experts.

use folio_device::RouterScore;

use super::common::{Base, Defaults, MAX_EXPERTS, window};
use crate::{Config, ExpertsSpec, FfnSpec, ModelSpec, Result, rope};

const MISTRAL: Defaults = Defaults { kv_heads: Some(8), positions: 131_072, ..Defaults::LLAMA };
const MIXTRAL: Defaults = Defaults { eps: 1e-5, theta: 1_000_000.0, ..MISTRAL };

pub(super) fn mistral(config: &Config) -> Result<ModelSpec> {
    windowed(config, "mistral", &MISTRAL, Some(4096)).map(|(_, spec)| spec)
}

pub(super) fn mixtral(config: &Config) -> Result<ModelSpec> {
    let (base, mut spec) = windowed(config, "mixtral", &MIXTRAL, None)?;
    let experts = config.size_or("num_local_experts", 8, MAX_EXPERTS)?;
    let ffn = FfnSpec::Experts(ExpertsSpec {
        experts,
        top_k: config.size_or("num_experts_per_tok", 2, experts)?,
        inter: base.inter,
        activation: base.activation,
        score: RouterScore::Softmax,
        normalize: true,
        scale: 1.0,
        groups: 1,
        groups_kept: 1,
        router_bias: false,
        choice_bias: false,
        expert_bias: false,
        shared: None,
    });
    spec.layers.iter_mut().for_each(|layer| layer.ffn = ffn.clone());
    Ok(spec)
}

fn windowed(
    config: &Config,
    family: &'static str,
    defaults: &Defaults,
    default_window: Option<usize>,
) -> Result<(Base, ModelSpec)> {
    let base = Base::read(family, config, defaults)?;
    let mut attention = base.attention();
    attention.window = window(config, default_window)?;
    let rope = rope::shared(config, defaults.theta, base.rope_shape)?;
    let spec = base.spec(vec![rope], attention);
    Ok((base, spec))
}
