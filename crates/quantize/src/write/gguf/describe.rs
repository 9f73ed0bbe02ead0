//! GGUF's description of a model, from config.json: sizes, norms, positions.

use std::path::Path;

use folio_formats::gguf::Value;
use folio_model::ModelSpec;
use serde_json::Value as Json;

use super::names::Rules;
use super::{Mix, Pairs};
use crate::{Error, Result};

/// A family that llama.cpp reads, and its treatment in llama.cpp's converters.
struct Family {
    model_type: &'static str,
    architecture: &'static str,
    permuted: bool,
    norm_after_attention: bool,
}

const fn family(model_type: &'static str, architecture: &'static str, permuted: bool) -> Family {
    Family { model_type, architecture, permuted, norm_after_attention: false }
}

const FAMILIES: [Family; 8] = [
    family("llama", "llama", true),
    family("mistral", "llama", true),
    family("mixtral", "llama", true),
    family("granite", "granite", true),
    family("qwen2", "qwen2", false),
    family("qwen3", "qwen3", false),
    family("qwen3_moe", "qwen3moe", false),
    Family { norm_after_attention: true, ..family("olmo2", "olmo2", false) },
];

/// Field of config.json, and its key after the architecture.
const COUNTS: [(&str, &str); 10] = [
    ("vocab_size", "vocab_size"),
    ("max_position_embeddings", "context_length"),
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("intermediate_size", "feed_forward_length"),
    ("num_attention_heads", "attention.head_count"),
    ("num_experts", "expert_count"),
    ("num_local_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
];

const NUMBERS: [(&str, &str); 5] = [
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("embedding_multiplier", "embedding_scale"),
    ("residual_multiplier", "residual_scale"),
    ("attention_multiplier", "attention.scale"),
    ("logits_scaling", "logit_scale"),
];

pub struct Described {
    pub pairs: Pairs,
    pub rules: Rules,
    /// `rope_freqs.weight`: the divisors of each frequency in Llama 3's scaling.
    pub rope_factors: Option<Vec<f32>>,
}

pub fn describe(folder: &Path, config: &Json, spec: &ModelSpec, mix: Mix) -> Result<Described> {
    let wrong = |problem: String| Error::File { path: folder.join("config.json"), problem };
    let model_type = config["model_type"].as_str().unwrap_or_default();
    let Some(family) = FAMILIES.iter().find(|family| family.model_type == model_type) else {
        let known: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).collect();
        return Err(wrong(format!(
            "{model_type} is not among those that can be written to GGUF: {}",
            known.join(", ")
        )));
    };
    if spec.layers.iter().any(|layer| layer.attention.window.is_some_and(|window| window < spec.max_context)) {
        return Err(wrong(format!("sliding_window: GGUF cannot say it of {model_type}")));
    }
    let Some(attention) = spec.layers.first().map(|layer| &layer.attention) else {
        return Err(wrong("num_hidden_layers: the model has none".to_owned()));
    };
    let mut keys = Keys { pairs: Vec::new(), architecture: family.architecture };
    let name = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let name = name.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    keys.pairs.extend([
        ("general.architecture".to_owned(), Value::from(family.architecture)),
        ("general.type".to_owned(), "model".into()),
        ("general.name".to_owned(), name.into()),
        ("general.file_type".to_owned(), mix.file_type().into()),
        ("general.quantization_version".to_owned(), 2u32.into()),
    ]);
    for (field, key) in COUNTS {
        if let Some(count) = config[field].as_u64().and_then(|count| u32::try_from(count).ok()) {
            keys.set(key, count);
        }
    }
    for (field, key) in NUMBERS {
        if let Some(number) = config[field].as_f64() {
            keys.set(key, number as f32);
        }
    }
    keys.set("attention.head_count_kv", attention.kv_heads as u32);
    for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
        keys.set(key, attention.head_dim as u32);
    }
    let rope_factors = positions(config, spec, &mut keys).map_err(wrong)?;
    let rules = Rules {
        permuted: family.permuted,
        heads: attention.heads,
        kv_heads: attention.kv_heads,
        norm_after_attention: family.norm_after_attention,
    };
    Ok(Described { pairs: keys.pairs, rules, rope_factors })
}

struct Keys {
    pairs: Pairs,
    architecture: &'static str,
}

impl Keys {
    /// Sets a key unless it is set already.
    fn set(&mut self, key: &str, value: impl Into<Value>) {
        let key = format!("{}.{key}", self.architecture);
        if self.pairs.iter().all(|(known, _)| *known != key) {
            self.pairs.push((key, value.into()));
        }
    }
}

/// Base and scaling of positions; returns the factors of Llama 3's scaling, which GGUF stores as a
/// tensor.
fn positions(config: &Json, spec: &ModelSpec, keys: &mut Keys) -> std::result::Result<Option<Vec<f32>>, String> {
    let scaling = ["rope_scaling", "rope_parameters"].map(|field| &config[field]).into_iter().find(|it| it.is_object());
    let field = |name: &str| scaling.map(|scaling| &scaling[name]).filter(|value| !value.is_null());
    let number = |name: &str| field(name).and_then(Json::as_f64);
    let base = number("rope_theta").or(config["rope_theta"].as_f64()).unwrap_or(10_000.0);
    keys.set("rope.freq_base", base as f32);
    match field("rope_type").or(field("type")).and_then(Json::as_str) {
        None | Some("default") => {}
        Some("linear") => {
            keys.set("rope.scaling.type", "linear");
            keys.set("rope.scaling.factor", number("factor").ok_or("rope_scaling.factor is missing")? as f32);
        }
        Some("yarn") => {
            keys.set("rope.scaling.type", "yarn");
            keys.set("rope.scaling.factor", number("factor").ok_or("rope_scaling.factor is missing")? as f32);
            let original = number("original_max_position_embeddings").map(|value| value as u32);
            if let Some(original) = original.or(config["max_position_embeddings"].as_u64().map(|it| it as u32)) {
                keys.set("rope.scaling.original_context_length", original);
            }
            for (name, key) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                if let Some(value) = number(name) {
                    keys.set(&format!("rope.scaling.{key}"), value as f32);
                }
            }
        }
        Some("llama3") => {
            let rope = spec.ropes.first().ok_or("rope_scaling: the model has no positions to scale")?;
            let pairs = rope.inv_freq.len() as f64;
            let plain = |pair: usize| base.powf(-(pair as f64) / pairs);
            let factors =
                rope.inv_freq.iter().enumerate().map(|(pair, scaled)| (plain(pair) / f64::from(*scaled)) as f32);
            return Ok(Some(factors.collect()));
        }
        Some(other) => return Err(format!("rope_scaling: {other} cannot be written to GGUF")),
    }
    Ok(None)
}
