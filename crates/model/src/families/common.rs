//! Shared parts of nearly every family's configuration, read and checked in one place.

use folio_device::{Activation, NormSpan};

use crate::config::short;
use crate::rope::{Reach, RopeShape};
use crate::{AttentionSpec, Config, FfnSpec, LayerSpec, ModelSpec, NormPlacement, Result, RopeSpec};

const MAX_LAYERS: usize = 1024;
const MAX_HEADS: usize = 4096;
const MAX_HEAD_DIM: usize = 512;
/// The rotary embedding rotates values in pairs.
const HEAD_DIM_STEP: usize = 2;
const MAX_WIDTH: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 24;
const MAX_CONTEXT: usize = 1 << 30;
pub(super) const MAX_EXPERTS: usize = 1 << 14;

/// Defaults of a family's configuration class.
pub(super) struct Defaults {
    /// Number of KV heads by default; none: as many as heads.
    pub kv_heads: Option<usize>,
    /// Width of a head by default; none: hidden divided by heads.
    pub head_dim: Option<usize>,
    pub positions: usize,
    /// `max_position_embeddings` is the length after any scaling.
    pub positions_scaled: bool,
    pub eps: f64,
    pub theta: f64,
    pub tied: bool,
    pub activation_field: &'static str,
    pub activation: &'static str,
}

impl Defaults {
    pub const LLAMA: Self = Self {
        kv_heads: None,
        head_dim: None,
        positions: 2048,
        positions_scaled: false,
        eps: 1e-6,
        theta: 10_000.0,
        tied: false,
        activation_field: "hidden_act",
        activation: "silu",
    };
}

/// Sizes and numbers shared by all layers.
pub(super) struct Base {
    pub family: &'static str,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub inter: usize,
    pub vocab: usize,
    pub eps: f32,
    pub tied: bool,
    pub activation: Activation,
    pub rope_shape: RopeShape,
}

impl Base {
    pub fn read(family: &'static str, config: &Config, defaults: &Defaults) -> Result<Self> {
        refuse_foreign(config)?;
        let hidden = config.size("hidden_size", MAX_WIDTH)?;
        let heads = config.size("num_attention_heads", MAX_HEADS)?;
        let kv_default = match config.mentions("num_key_value_heads") {
            true => heads,
            false => defaults.kv_heads.unwrap_or(heads),
        };
        let kv_heads = config.size_or("num_key_value_heads", kv_default, MAX_HEADS)?;
        if heads % kv_heads != 0 {
            let problem = format!("is {kv_heads}, which does not divide the {heads} heads");
            return Err(config.refuse("num_key_value_heads", problem));
        }
        let head_dim = head_dim(config, defaults, hidden, heads)?;
        let eps = config.f64_or("rms_norm_eps", defaults.eps)?;
        if !(0.0..1.0).contains(&eps) {
            return Err(config.refuse("rms_norm_eps", format!("is {eps}, but must lie between 0 and 1")));
        }
        let positions = config.size_or("max_position_embeddings", defaults.positions, MAX_CONTEXT)?;
        let reach = match defaults.positions_scaled {
            true => Reach::stated(positions),
            false => Reach::of(config, positions, MAX_CONTEXT)?,
        };
        let max_context = config.max_context_asked().unwrap_or(reach.own).clamp(1, MAX_CONTEXT);
        Ok(Self {
            family,
            hidden,
            layers: config.size("num_hidden_layers", MAX_LAYERS)?,
            heads,
            kv_heads,
            head_dim,
            inter: config.size("intermediate_size", MAX_WIDTH)?,
            vocab: config.size("vocab_size", MAX_VOCAB)?,
            eps: eps as f32,
            tied: config.bool_or("tie_word_embeddings", defaults.tied)?,
            activation: activation(config, defaults.activation_field, defaults.activation)?,
            rope_shape: RopeShape { head_dim, positions, longest: reach.longest, max_context },
        })
    }

    /// Plain attention with the shared rotary embedding, without a window.
    pub fn attention(&self) -> AttentionSpec {
        AttentionSpec {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: (self.head_dim as f32).powf(-0.5),
            rope: Some(0),
            window: None,
            soft_cap: None,
            sinks: false,
            qk_norm: None,
            qkv_bias: false,
            output_bias: false,
        }
    }

    /// A pre-norm model of equal layers with this attention and the dense ffn; families change the
    /// parts that differ.
    pub fn spec(&self, ropes: Vec<RopeSpec>, attention: AttentionSpec) -> ModelSpec {
        let layer = LayerSpec {
            attention,
            ffn: FfnSpec::Dense { inter: self.inter, activation: self.activation, bias: false },
            norms: NormPlacement::PRE,
            residual_scale: 1.0,
        };
        ModelSpec {
            family: self.family,
            vocab_size: self.vocab,
            hidden: self.hidden,
            max_context: self.rope_shape.max_context,
            layers: vec![layer; self.layers],
            ropes,
            embed_scale: 1.0,
            norm_eps: self.eps,
            norm_offset: 0.0,
            tied_head: self.tied,
            logit_scale: 1.0,
            logit_soft_cap: None,
        }
    }
}

/// Settings that would change the computation and that no family here supports.
pub(super) fn refuse_foreign(config: &Config) -> Result<()> {
    for field in ["is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention", "clip_qkv"] {
        config.must_be_off(field)?;
    }
    Ok(())
}

fn head_dim(config: &Config, defaults: &Defaults, hidden: usize, heads: usize) -> Result<usize> {
    let given = config.usize("head_dim")?;
    let given = given.or(if config.mentions("head_dim") { None } else { defaults.head_dim });
    if given.is_none() && !hidden.is_multiple_of(heads) {
        let problem = format!("is {hidden}, which the {heads} heads do not divide, and head_dim is missing");
        return Err(config.refuse("hidden_size", problem));
    }
    let head_dim = given.unwrap_or(hidden / heads);
    if head_dim == 0 || head_dim > MAX_HEAD_DIM || head_dim % HEAD_DIM_STEP != 0 {
        let problem = format!("is {head_dim}, but must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}");
        return Err(config.refuse("head_dim", problem));
    }
    Ok(head_dim)
}

pub(super) fn activation(config: &Config, field: &str, default: &str) -> Result<Activation> {
    match config.str(field)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        other => {
            let known = "silu, gelu, gelu_new and gelu_pytorch_tanh";
            Err(config.refuse(field, format!("is {other:?}, but only {known} are supported")))
        }
    }
}

/// `sliding_window`; the family's default if the file does not mention it.
pub(super) fn window(config: &Config, default: Option<usize>) -> Result<Option<usize>> {
    if !config.mentions("sliding_window") {
        return Ok(default);
    }
    match config.usize("sliding_window")? {
        Some(0) => Err(config.refuse("sliding_window", "is 0, but must be at least 1")),
        given => Ok(given.map(|window| window.min(MAX_CONTEXT))),
    }
}

/// Whether each layer has a window: from `layer_types`, else by the family's own rule.
pub(super) fn sliding_layers(config: &Config, layers: usize, rule: impl Fn(usize) -> bool) -> Result<Vec<bool>> {
    let Some(types) = config.list("layer_types")? else { return Ok((0..layers).map(rule).collect()) };
    if types.len() < layers {
        return Err(config.refuse("layer_types", format!("has {} entries, but must have {layers}", types.len())));
    }
    let kind = |value: &serde_json::Value| match value.as_str() {
        Some("sliding_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => {
            let problem = format!("has {}, but only sliding_attention and full_attention are supported", short(value));
            Err(config.refuse("layer_types", problem))
        }
    };
    types.iter().take(layers).map(kind).collect()
}

/// Sets the window of sliding layers. Sliding layers without a window are a contradiction in the
/// file.
pub(super) fn apply_windows(
    config: &Config,
    spec: &mut ModelSpec,
    sliding: &[bool],
    window: Option<usize>,
) -> Result<()> {
    if window.is_none() && sliding.contains(&true) {
        return Err(config.refuse("sliding_window", "is missing, but some layers slide"));
    }
    for (layer, slides) in spec.layers.iter_mut().zip(sliding) {
        layer.attention.window = window.filter(|_| *slides);
    }
    Ok(())
}

/// A soft cap; absent means none.
pub(super) fn soft_cap(config: &Config, field: &str) -> Result<Option<f32>> {
    match config.f64(field)? {
        None => Ok(None),
        Some(cap) if cap > 0.0 => Ok(Some(cap as f32)),
        Some(cap) => Err(config.refuse(field, format!("is {cap}, but must be above 0"))),
    }
}

/// A multiplier: any finite number but 0.
pub(super) fn multiplier(config: &Config, field: &str, default: f64) -> Result<f32> {
    match config.f64_or(field, default)? as f32 {
        value if value != 0.0 && value.is_finite() => Ok(value),
        value => Err(config.refuse(field, format!("is {value}, but must be a finite number other than 0"))),
    }
}

pub(super) const HEAD_NORM: Option<NormSpan> = Some(NormSpan::Head);
pub(super) const ROW_NORM: Option<NormSpan> = Some(NormSpan::Row);
