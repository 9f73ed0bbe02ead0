//! Qwen2 and 2.5 (query, key and value biases), Qwen3 (normalized queries and keys) and Qwen3-MoE
//! (routed experts).

use folio_device::RouterScore;

use super::common::{Base, Defaults, HEAD_NORM, MAX_EXPERTS, apply_windows, sliding_layers, window};
use crate::{Config, ExpertsSpec, FfnSpec, ModelSpec, Result, rope};

const QWEN2: Defaults = Defaults { kv_heads: Some(32), positions: 32_768, ..Defaults::LLAMA };
const QWEN3: Defaults = Defaults { head_dim: Some(128), ..QWEN2 };
const QWEN3_MOE: Defaults = Defaults { kv_heads: Some(4), ..QWEN2 };

pub(super) fn qwen2(config: &Config) -> Result<ModelSpec> {
    let base = Base::read("qwen2", config, &QWEN2)?;
    let mut attention = base.attention();
    attention.qkv_bias = true;
    let rope = rope::shared(config, QWEN2.theta, base.rope_shape)?;
    let mut spec = base.spec(vec![rope], attention);
    upper_windows(config, &mut spec)?;
    Ok(spec)
}

pub(super) fn qwen3(config: &Config) -> Result<ModelSpec> {
    let (_, mut spec) = normed(config, "qwen3", &QWEN3)?;
    upper_windows(config, &mut spec)?;
    Ok(spec)
}

pub(super) fn qwen3_moe(config: &Config) -> Result<ModelSpec> {
    let (base, mut spec) = normed(config, "qwen3_moe", &QWEN3_MOE)?;
    let all_slide = switched_window(config)?;
    let expert_field = if config.has("num_experts") { "num_experts" } else { "num_local_experts" };
    let experts = config.size_or(expert_field, 128, MAX_EXPERTS)?;
    let routed = ExpertsSpec {
        experts,
        top_k: config.size_or("num_experts_per_tok", 8, experts)?,
        inter: config.size_or("moe_intermediate_size", 768, 1 << 20)?,
        activation: base.activation,
        score: RouterScore::Softmax,
        normalize: config.bool_or("norm_topk_prob", false)?,
        scale: 1.0,
        groups: 1,
        groups_kept: 1,
        router_bias: false,
        choice_bias: false,
        expert_bias: false,
        shared: None,
    };
    let step = config.size_or("decoder_sparse_step", 1, 1024)?;
    let dense_only = config.numbers("mlp_only_layers")?.unwrap_or_default();
    for (number, layer) in spec.layers.iter_mut().enumerate() {
        layer.attention.window = all_slide;
        if !dense_only.contains(&(number as f64)) && (number + 1) % step == 0 {
            layer.ffn = FfnSpec::Experts(routed.clone());
        }
    }
    Ok(spec)
}

fn normed(config: &Config, family: &'static str, defaults: &Defaults) -> Result<(Base, ModelSpec)> {
    let base = Base::read(family, config, defaults)?;
    let mut attention = base.attention();
    attention.qk_norm = HEAD_NORM;
    attention.qkv_bias = config.bool_or("attention_bias", false)?;
    attention.output_bias = attention.qkv_bias;
    let rope = rope::shared(config, defaults.theta, base.rope_shape)?;
    let spec = base.spec(vec![rope], attention);
    Ok((base, spec))
}

/// With `use_sliding_window`, the layers from `max_window_layers` on have a window, unless
/// `layer_types` says otherwise.
fn upper_windows(config: &Config, spec: &mut ModelSpec) -> Result<()> {
    let window = switched_window(config)?;
    let first = config.usize("max_window_layers")?.unwrap_or(28);
    let mut sliding = sliding_layers(config, spec.layers.len(), |layer| window.is_some() && layer >= first)?;
    // transformers 5 saves layer types even if windows are switched off; then no layer has one.
    if window.is_none() {
        sliding.fill(false);
    }
    apply_windows(config, spec, &sliding, window)
}

/// The window, which counts only if `use_sliding_window` is on.
fn switched_window(config: &Config) -> Result<Option<usize>> {
    if config.bool_or("use_sliding_window", false)? { window(config, Some(4096)) } else { Ok(None) }
}
