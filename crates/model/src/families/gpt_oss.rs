//! gpt-oss: sinks in every head, alternating windows, and experts with biases and a clamped gate.

use folio_device::{Activation, RouterScore};
use serde_json::json;

use super::common::{Base, Defaults, MAX_EXPERTS, apply_windows, multiplier, sliding_layers, window};
use crate::{Config, ExpertsSpec, FfnSpec, ModelSpec, Result, rope};

const GPT_OSS: Defaults = Defaults {
    kv_heads: Some(8),
    head_dim: Some(64),
    positions: 131_072,
    eps: 1e-5,
    theta: 150_000.0,
    ..Defaults::LLAMA
};

pub(super) fn spec(config: &Config) -> Result<ModelSpec> {
    let mut config = config.clone();
    if !config.has("rope_scaling") && !config.has("rope_parameters") {
        let yarn = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": false, "original_max_position_embeddings": 4096});
        config.set("rope_parameters", yarn);
    }
    let base = Base::read("gpt_oss", &config, &GPT_OSS)?;
    let mut attention = base.attention();
    attention.sinks = true;
    attention.qkv_bias = config.bool_or("attention_bias", true)?;
    attention.output_bias = attention.qkv_bias;
    let rope = rope::shared(&config, GPT_OSS.theta, base.rope_shape)?;
    let mut spec = base.spec(vec![rope], attention);
    let ffn = FfnSpec::Experts(experts(&config, &base)?);
    spec.layers.iter_mut().for_each(|layer| layer.ffn = ffn.clone());
    let sliding = sliding_layers(&config, base.layers, |layer| (layer + 1) % 2 != 0)?;
    apply_windows(&config, &mut spec, &sliding, window(&config, Some(128))?)?;
    Ok(spec)
}

fn experts(config: &Config, base: &Base) -> Result<ExpertsSpec> {
    let field = if config.has("num_local_experts") { "num_local_experts" } else { "num_experts" };
    let experts = config.size_or(field, 128, MAX_EXPERTS)?;
    let alpha = multiplier(config, "swiglu_alpha", 1.702)?;
    let limit = multiplier(config, "swiglu_limit", 7.0)?;
    Ok(ExpertsSpec {
        experts,
        top_k: config.size_or("num_experts_per_tok", 4, experts)?,
        inter: base.inter,
        activation: Activation::SwigluClamped { alpha, limit },
        score: RouterScore::SoftmaxOfBest,
        normalize: false,
        scale: 1.0,
        groups: 1,
        groups_kept: 1,
        router_bias: true,
        choice_bias: false,
        expert_bias: true,
        shared: None,
    })
}
