//! GGUF metadata under the names that config.json has for the same settings, so that one family
//! file serves both.
//!
//! Facts that GGUF builds into its tensors are handled here too: norm offsets already added,
//! factors of the position encoding, reordered query and key rows.

use std::collections::HashMap;

use folio_formats::WeightSource;
use folio_formats::gguf::{Array, Gguf, Value};
use serde_json::{Map, Value as Json, json};

use crate::families::{FAMILIES, Family};
use crate::{Config, Error, ModelSpec, Names, Result, Wanted};

/// Field of config.json, and its key in GGUF (after `<architecture>.`).
const FIELDS: &[(&str, &str)] = &[
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("intermediate_size", "feed_forward_length"),
    ("max_position_embeddings", "context_length"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("rope_theta", "rope.freq_base"),
    ("rope_local_base_freq", "rope.freq_base_swa"),
    ("sliding_window", "attention.sliding_window"),
    ("num_local_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("embedding_multiplier", "embedding_scale"),
    ("residual_multiplier", "residual_scale"),
    ("attention_multiplier", "attention.scale"),
    ("logits_scaling", "logit_scale"),
];

/// Fields of the scaling object, and their keys in GGUF (after `<architecture>.rope.scaling.`).
const SCALING_FIELDS: &[(&str, &str)] = &[
    ("rope_type", "type"),
    ("factor", "factor"),
    ("original_max_position_embeddings", "original_context_length"),
    ("attention_factor", "attn_factor"),
    ("attention_factor", "yarn_attn_factor"),
    ("beta_fast", "yarn_beta_fast"),
    ("beta_slow", "yarn_beta_slow"),
];

/// Lists of the scaling object that GGUF stores as tensors.
const FACTOR_TENSORS: &[(&str, &str)] =
    &[("long_factor", "rope_factors_long.weight"), ("short_factor", "rope_factors_short.weight")];

/// No head has more rotated pairs.
const MAX_FACTORS: usize = 1024;

/// The spec of a GGUF file and the names of its tensors.
pub(crate) fn describe(gguf: &Gguf, wanted: &Wanted) -> Result<(ModelSpec, Names)> {
    let reader = Reader::new(gguf)?;
    let family = reader.family()?;
    let config = reader.config(family)?.with_max_context(wanted.max_context).overridden(&wanted.overrides);
    let mut spec = family.spec(&config)?;
    // The file's norm weights are the final factors, even if the checkpoint stored them with an
    // offset.
    spec.norm_offset = 0.0;
    reader.turn_by_factors(&config, &mut spec)?;
    let output_bias = reader.has_tensor("blk.0.attn_output.bias");
    spec.layers.iter_mut().for_each(|layer| layer.attention.output_bias = output_bias);
    Ok((spec, Names::Gguf { permuted: family.gguf_permuted }))
}

struct Reader<'a> {
    gguf: &'a Gguf,
    file: String,
    architecture: &'a str,
}

impl<'a> Reader<'a> {
    fn new(gguf: &'a Gguf) -> Result<Self> {
        let architecture = gguf.metadata().str("general.architecture")?;
        Ok(Self { gguf, file: gguf.path().display().to_string(), architecture })
    }

    fn has_tensor(&self, name: &str) -> bool {
        self.gguf.contains(name)
    }

    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.architecture)
    }

    fn value(&self, suffix: &str) -> Option<&'a Value> {
        self.gguf.metadata().value(&self.key(suffix))
    }

    fn refuse(&self, suffix: &str, problem: impl Into<String>) -> Error {
        Error::Field { file: self.file.clone(), field: self.key(suffix), problem: problem.into() }
    }

    fn integer(&self, suffix: &str) -> Option<i128> {
        self.value(suffix).and_then(Value::as_integer)
    }

    /// The architecture names the family, except for families that share one.
    fn family(&self) -> Result<&'static Family> {
        let windowed = self.integer("attention.sliding_window").is_some_and(|window| window > 0);
        let routed = self.integer("expert_count").is_some_and(|experts| experts > 0);
        let shared = match self.architecture {
            "llama" if routed => Some("mixtral"),
            "llama" if windowed => Some("mistral"),
            "olmo2" if windowed => Some("olmo3"),
            _ => None,
        };
        let found = match shared {
            Some(model_type) => Family::by_model_type(model_type),
            None => Family::by_gguf(self.architecture),
        };
        found.ok_or_else(|| Error::Family {
            file: self.file.clone(),
            field: "general.architecture".to_owned(),
            found: format!("{:?}", self.architecture),
            supported: FAMILIES.iter().filter_map(|family| family.gguf).collect::<Vec<_>>().join(", "),
        })
    }

    fn config(&self, family: &Family) -> Result<Config> {
        let mut fields = Map::new();
        let mut aliases = HashMap::new();
        for (field, suffix) in FIELDS {
            aliases.insert((*field).to_owned(), self.key(suffix));
            if let Some(value) = self.value(suffix) {
                fields.insert((*field).to_owned(), self.scalar(suffix, value)?);
            }
        }
        for (field, suffix) in SCALING_FIELDS {
            aliases.entry((*field).to_owned()).or_insert_with(|| self.key(&format!("rope.scaling.{suffix}")));
        }
        aliases.insert("partial_rotary_factor".to_owned(), self.key("rope.dimension_count"));
        aliases.insert("vocab_size".to_owned(), "token_embd.weight".to_owned());
        if self.has_tensor("token_embd.weight") {
            let embedding = self.gguf.require("token_embd.weight")?;
            fields.insert("vocab_size".to_owned(), json!(embedding.shape.first()));
        }
        fields.insert("tie_word_embeddings".to_owned(), json!(!self.has_tensor("output.weight")));
        fields.insert("attention_bias".to_owned(), json!(self.has_tensor("blk.0.attn_q.bias")));
        fields.insert("mlp_bias".to_owned(), json!(self.has_tensor("blk.0.ffn_down.bias")));
        self.scaling(&mut fields)?;
        self.windows(&mut fields);
        self.family_fields(family, &mut fields)?;
        Ok(Config::from_fields(&self.file, fields, aliases).with_stated_context())
    }

    /// A number; a list of equal numbers, one per layer, counts as that number.
    fn scalar(&self, suffix: &str, value: &Value) -> Result<Json> {
        let Value::Array(array) = value else {
            return match to_json(value) {
                Json::Null => Err(self.refuse(suffix, "is not finite or does not fit 64 bits")),
                usable => Ok(usable),
            };
        };
        let values = array.integers().unwrap_or_default();
        match values.first() {
            Some(first) if values.iter().all(|value| value == first) => Ok(to_json(&Value::I64(*first as i64))),
            _ => Err(self.refuse(suffix, "differs from layer to layer, which is not supported")),
        }
    }

    /// Position encoding: the scaling object, and the rotated share of each head.
    fn scaling(&self, fields: &mut Map<String, Json>) -> Result<()> {
        let mut scaling = Map::new();
        for (field, suffix) in SCALING_FIELDS {
            let suffix = format!("rope.scaling.{suffix}");
            if let Some(value) = self.value(&suffix) {
                scaling.insert((*field).to_owned(), self.scalar(&suffix, value)?);
            }
        }
        if self.value("rope.scaling.finetuned") == Some(&Value::Bool(false)) && self.architecture == "granite" {
            return Err(self.refuse("rope.scaling.finetuned", "is false: positions switched off are not supported"));
        }
        for (field, tensor) in FACTOR_TENSORS {
            if let Some(factors) = self.factors(tensor)? {
                scaling.insert((*field).to_owned(), json!(factors));
            }
        }
        // The type may be left out if the rest implies it.
        let implied = match scaling.get("rope_type").and_then(Json::as_str) {
            Some(_) => None,
            None if scaling.contains_key("long_factor") => Some("longrope"),
            None if scaling.contains_key("factor") => Some("linear"),
            None => Some("none"),
        };
        if let Some(implied) = implied {
            scaling.insert("rope_type".to_owned(), json!(implied));
        }
        if scaling["rope_type"] == "none" {
            scaling.clear();
        }
        if let Some(dims) = self.integer("rope.dimension_count") {
            let number = |suffix| self.integer(suffix).filter(|value| *value > 0);
            let even_split = || Some(number("embedding_length")? / number("attention.head_count")?);
            let head_dim = number("attention.key_length").or_else(even_split);
            if let Some(head_dim) = head_dim.filter(|head_dim| *head_dim > 0 && *head_dim != dims) {
                // The family rounds down when it multiplies the share: a little more keeps 30 of 44
                // from becoming 29.
                let share = (dims as f64 + 0.25) / head_dim as f64;
                fields.insert("partial_rotary_factor".to_owned(), json!(share));
            }
        }
        if !scaling.is_empty() {
            fields.insert("rope_scaling".to_owned(), Json::Object(scaling));
        }
        let (key, value) = (self.integer("attention.key_length"), self.integer("attention.value_length"));
        match (key, value) {
            (Some(key), Some(value)) if key != value => {
                Err(self.refuse("attention.value_length", format!("is {value}, but keys have {key} values a head")))
            }
            _ => Ok(()),
        }
    }

    /// A tensor with one factor per rotated pair. A tensor of another size is never decoded.
    fn factors(&self, tensor: &str) -> Result<Option<Vec<f32>>> {
        if !self.has_tensor(tensor) {
            return Ok(None);
        }
        let view = self.gguf.require(tensor)?;
        if view.shape.iter().product::<usize>() > MAX_FACTORS {
            let problem = format!("has shape {:?}, but must have at most {MAX_FACTORS} values", view.shape);
            return Err(Error::Field { file: self.file.clone(), field: tensor.to_owned(), problem });
        }
        Ok(Some(view.to_f32()?))
    }

    /// Windows: 0 means none; the pattern is one flag per layer, or the number n if every n-th
    /// layer has no window.
    fn windows(&self, fields: &mut Map<String, Json>) {
        if self.integer("attention.sliding_window") == Some(0) {
            fields.insert("sliding_window".to_owned(), Json::Null);
        }
        match self.value("attention.sliding_window_pattern") {
            Some(Value::Array(flags)) => {
                let slides: Vec<bool> = match flags {
                    Array::Bool(flags) => flags.clone(),
                    other => other.integers().unwrap_or_default().iter().map(|flag| *flag != 0).collect(),
                };
                let kind = |slides: &bool| if *slides { "sliding_attention" } else { "full_attention" };
                fields.insert("layer_types".to_owned(), slides.iter().map(kind).collect());
            }
            Some(period) => {
                fields.insert("sliding_window_pattern".to_owned(), to_json(period));
            }
            None => {}
        }
    }

    /// Settings that GGUF implies by the architecture and does not write down.
    fn family_fields(&self, family: &Family, fields: &mut Map<String, Json>) -> Result<()> {
        let mut set = |field: &str, value: Json| fields.insert(field.to_owned(), value);
        match family.model_type {
            "gemma2" | "gemma3_text" => {
                let number = |suffix: &str| self.integer(suffix).filter(|value| *value > 0);
                let layers = number("block_count");
                let per_head = number("embedding_length").zip(number("attention.head_count")).map(|(e, h)| e / h);
                // The largest model of each generation scales scores by hidden / heads instead of
                // the head's width.
                let largest = layers == Some(if family.model_type == "gemma2" { 46 } else { 62 });
                let scalar = if largest { per_head } else { number("attention.key_length").or(per_head) };
                if let Some(scalar) = scalar {
                    set("query_pre_attn_scalar", json!(scalar as f64));
                }
                if self.value("attention.sliding_window").is_none() && family.model_type == "gemma3_text" {
                    let layers = layers.unwrap_or(0).clamp(0, 1024) as usize;
                    set("layer_types", json!(vec!["full_attention"; layers]));
                }
            }
            "qwen3_moe" => {
                set("norm_topk_prob", json!(true));
            }
            "gpt_oss" => {
                if let Some(inter) = self.value("expert_feed_forward_length") {
                    set("intermediate_size", self.scalar("expert_feed_forward_length", inter)?);
                }
                if let Some(Json::Object(scaling)) = fields.get_mut("rope_scaling") {
                    scaling.insert("truncate".to_owned(), json!(false));
                }
            }
            "phi3" => {
                // Stored beside the scaling object, as in the family's configuration.
                if let Some(original) = self.value("rope.scaling.original_context_length") {
                    set("original_max_position_embeddings", to_json(original));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Divides the frequencies by `rope_freqs.weight`: GGUF's form of Llama 3's scaling.
    fn turn_by_factors(&self, config: &Config, spec: &mut ModelSpec) -> Result<()> {
        let Some(factors) = self.factors("rope_freqs.weight")? else { return Ok(()) };
        let Some(rope) = spec.ropes.first_mut() else { return Ok(()) };
        if factors.len() != rope.inv_freq.len() || factors.iter().any(|factor| !factor.is_finite() || *factor <= 0.0) {
            let problem = format!("has {} entries, but must have {} above 0", factors.len(), rope.inv_freq.len());
            return Err(config.refuse("rope_freqs.weight", problem));
        }
        rope.inv_freq.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
        Ok(())
    }
}

fn to_json(value: &Value) -> Json {
    match value {
        // Converted through its shortest decimal, so that 0.1 stays 0.1.
        Value::F32(number) => json!(number.to_string().parse::<f64>().ok()),
        Value::F64(number) => json!(number),
        Value::Bool(flag) => json!(flag),
        Value::String(text) => json!(text),
        other => match other.as_integer() {
            Some(number) => i64::try_from(number).map_or(Json::Null, |number| json!(number)),
            None => Json::Null,
        },
    }
}

#[cfg(test)]
mod tests;
