//! Gemma 2 and 3 text: four norms that store `w - 1`, scaled embeddings, alternating windows; Gemma
//! 2 caps scores and logits, Gemma 3 normalizes queries and keys and has another rotary base in its
//! sliding layers.

use super::common::{
    Base, Defaults, HEAD_NORM, apply_windows, multiplier, refuse_foreign, sliding_layers, soft_cap, window,
};
use crate::{Config, ModelSpec, NormPlacement, Result, rope};

const GEMMA2: Defaults = Defaults {
    kv_heads: Some(4),
    head_dim: Some(256),
    positions: 8192,
    tied: true,
    activation_field: "hidden_activation",
    activation: "gelu_pytorch_tanh",
    ..Defaults::LLAMA
};
const GEMMA3: Defaults = Defaults { positions: 131_072, positions_scaled: true, theta: 1_000_000.0, ..GEMMA2 };
const GEMMA3_LOCAL_THETA: f64 = 10_000.0;

pub(super) fn gemma2(config: &Config) -> Result<ModelSpec> {
    let mut config = config.clone();
    config.set_default("attn_logit_softcapping", 50.0.into());
    config.set_default("final_logit_softcapping", 30.0.into());
    let base = Base::read("gemma2", &config, &GEMMA2)?;
    let rope = rope::shared(&config, GEMMA2.theta, base.rope_shape)?;
    let mut spec = common(&config, &base, vec![rope])?;
    let cap = soft_cap(&config, "attn_logit_softcapping")?;
    spec.layers.iter_mut().for_each(|layer| layer.attention.soft_cap = cap);
    let sliding = sliding_layers(&config, base.layers, |layer| (layer + 1) % 2 != 0)?;
    apply_windows(&config, &mut spec, &sliding, window(&config, Some(4096))?)?;
    Ok(spec)
}

pub(super) fn gemma3(config: &Config) -> Result<ModelSpec> {
    let mut config = text_config(config)?;
    for (field, value) in [
        ("vocab_size", 262_208),
        ("hidden_size", 2304),
        ("intermediate_size", 9216),
        ("num_hidden_layers", 26),
        ("num_attention_heads", 8),
    ] {
        config.set_default(field, value.into());
    }
    config.must_be_off("attn_logit_softcapping")?;
    let base = Base::read("gemma3", &config, &GEMMA3)?;
    let ropes = vec![
        rope::per_layer_type(&config, "full_attention", "rope_theta", GEMMA3.theta, true, base.rope_shape)?,
        rope::per_layer_type(
            &config,
            "sliding_attention",
            "rope_local_base_freq",
            GEMMA3_LOCAL_THETA,
            false,
            base.rope_shape,
        )?,
    ];
    let mut spec = common(&config, &base, ropes)?;
    let pattern = config.size_or("sliding_window_pattern", 6, 1024)?;
    let sliding = sliding_layers(&config, base.layers, |layer| (layer + 1) % pattern != 0)?;
    apply_windows(&config, &mut spec, &sliding, window(&config, Some(4096))?)?;
    for (layer, slides) in spec.layers.iter_mut().zip(sliding) {
        layer.attention.qk_norm = HEAD_NORM;
        layer.attention.rope = Some(if slides { 1 } else { 0 });
    }
    Ok(spec)
}

/// The language half of a multimodal configuration, or the whole of a plain one. Settings of
/// quantization and tied embeddings come from the whole.
fn text_config(config: &Config) -> Result<Config> {
    let Some(mut text) = config.object("text_config")? else { return Ok(config.clone()) };
    refuse_foreign(config)?;
    if let Some(tied) = config.value("tie_word_embeddings") {
        text.set("tie_word_embeddings", tied.clone());
    }
    Ok(text)
}

fn common(config: &Config, base: &Base, ropes: Vec<crate::RopeSpec>) -> Result<ModelSpec> {
    let mut attention = base.attention();
    let scalar = multiplier(config, "query_pre_attn_scalar", 256.0)?;
    if scalar < 0.0 {
        return Err(config.refuse("query_pre_attn_scalar", format!("is {scalar}, but must be above 0")));
    }
    attention.scale = scalar.powf(-0.5);
    attention.qkv_bias = config.bool_or("attention_bias", false)?;
    attention.output_bias = attention.qkv_bias;
    let mut spec = base.spec(ropes, attention);
    spec.layers.iter_mut().for_each(|layer| layer.norms = NormPlacement::FOUR);
    spec.embed_scale = (base.hidden as f32).sqrt();
    spec.norm_offset = 1.0;
    spec.logit_soft_cap = soft_cap(config, "final_logit_softcapping")?;
    Ok(spec)
}
