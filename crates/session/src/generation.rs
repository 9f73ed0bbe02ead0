//! A model's defaults for answers: the tokens that end them, and sampling where a request does not
//! say.
//!
//! For a folder the sources are config.json, generation_config.json and the tokenizer's own end;
//! for a GGUF file its metadata. Unsupported fields that would change answers are stored by name,
//! to be reported when the model is loaded.

use std::path::Path;

use anyhow::{Context, Result, bail};
use folio_engine::SamplingDefaults;
use folio_formats::gguf::{Gguf, Metadata};
use serde_json::{Map, Value};

use crate::files::read_optional;
use crate::options::{GenerationOptions, GenerationSource};

pub const FILE: &str = "generation_config.json";

/// The fields that are read besides `eos_token_id`, under the names that vLLM reads as well.
const READ: [&str; 6] = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"];

/// Fields that do not affect the choice of tokens.
const HARMLESS: [&str; 28] = [
    "_from_model_config",
    "_name_or_path",
    "assistant_token_id",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "chat_format",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "do_sample",
    "early_stopping",
    "eos_token_id",
    "low_memory",
    "max_window_size",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "return_legacy_cache",
    "torch_dtype",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
    "user_token_id",
];

/// Values with which these fields have no effect.
const NEUTRAL: [(&str, f64); 16] = [
    ("diversity_penalty", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("guidance_scale", 1.0),
    ("length_penalty", 1.0),
    ("max_length", 20.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("no_repeat_ngram_size", 0.0),
    ("num_beam_groups", 1.0),
    ("num_beams", 1.0),
    ("num_return_sequences", 1.0),
    ("penalty_alpha", 0.0),
    ("typical_p", 1.0),
];

/// llama.cpp's names for the fields that are read.
const GGUF_READ: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];
/// Settings of methods that other fields switch on.
const GGUF_SETTINGS: [&str; 3] = ["xtc_threshold", "mirostat_tau", "mirostat_eta"];

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    pub ends: Vec<u32>,
    pub sampling: SamplingDefaults,
    /// Settings that would change answers and are not supported, as `name value`.
    pub ignored: Vec<String>,
}

impl Generation {
    /// A generation_config.json.
    pub fn parse(json: &str) -> Result<Self> {
        let fields: Map<String, Value> = serde_json::from_str(json)?;
        let sampling = sampling(&fields)?;
        let asks = |(name, value): &(&String, &Value)| {
            let is_read = READ.contains(&name.as_str()) || HARMLESS.contains(&name.as_str());
            let is_neutral = NEUTRAL.iter().any(|(other, neutral)| name == other && value.as_f64() == Some(*neutral));
            !is_read && !is_neutral && !is_nothing(value)
        };
        let mut ignored: Vec<String> =
            fields.iter().filter(asks).map(|(name, value)| format!("{name} {}", shown(value))).collect();
        if fields.get("do_sample") == Some(&Value::Bool(false)) && sampling.temperature != Some(0.0) {
            ignored.insert(0, "do_sample false".into());
        }
        Ok(Self { ends: ends(&fields)?, sampling, ignored })
    }

    /// Settings in a folder's config.json and generation_config.json; sampling is taken from the
    /// former only if there is no latter.
    pub fn of_folder(folder: &Path) -> Result<Self> {
        let read = |file: &str| read_optional(&folder.join(file));
        let named = |file: &str| folder.join(file).display().to_string();
        let own = read(FILE)?.map(|text| Self::parse(&text).with_context(|| named(FILE))).transpose()?;
        let has_none = own.is_none();
        let mut generation = own.unwrap_or_default();
        if let Some(text) = read("config.json")? {
            let config = Self::of_config(&text, has_none).with_context(|| named("config.json"))?;
            generation.ends.extend(config.ends);
            generation.sampling = generation.sampling.over(config.sampling);
        }
        Ok(generation)
    }

    /// Settings in a config.json; a model of several parts has them in the one for text.
    fn of_config(json: &str, with_sampling: bool) -> Result<Self> {
        let fields: Map<String, Value> = serde_json::from_str(json)?;
        let mut generation = Self { ends: ends(&fields)?, ..Self::default() };
        if let Some(Value::Object(text)) = fields.get("text_config") {
            generation.ends.extend(ends(text)?);
        }
        if with_sampling {
            generation.sampling = sampling(&fields)?;
        }
        Ok(generation)
    }

    /// Sampling settings in a GGUF file's metadata: its own keys, which override the
    /// generation_config.json that Folio puts into files it writes.
    pub fn of_gguf(gguf: &Gguf) -> Result<Self> {
        let kept = gguf.str("folio.generation_config").ok();
        let kept = kept.map(|json| Self::parse(json).context("folio.generation_config")).transpose()?;
        let (kept, own) = (kept.unwrap_or_default(), Self::of_metadata(gguf.metadata())?);
        Ok(Self {
            ends: kept.ends,
            sampling: own.sampling.over(kept.sampling),
            ignored: [kept.ignored, own.ignored].concat(),
        })
    }

    fn of_metadata(metadata: &Metadata) -> Result<Self> {
        let mut fields = Map::new();
        let mut ignored = Vec::new();
        for (key, _) in metadata.pairs() {
            let Some(name) = key.strip_prefix("general.sampling.") else { continue };
            if name == "sequence" {
                ignored.push(key.clone());
                continue;
            }
            let number = match metadata.find::<i64>(key) {
                Ok(number) => number.map(Value::from),
                Err(_) => metadata.find::<f64>(key)?.map(Value::from),
            };
            let Some(number) = number else { continue };
            // -1 applies a penalty to all tokens.
            let neutral = if name == "penalty_last_n" { -1.0 } else { 0.0 };
            match GGUF_READ.iter().find(|(other, _)| *other == name) {
                Some((_, known)) => drop(fields.insert((*known).into(), number)),
                None if GGUF_SETTINGS.contains(&name) || number.as_f64() == Some(neutral) => {}
                None => ignored.push(format!("{key} {number}")),
            }
        }
        Ok(Self { ends: Vec::new(), sampling: sampling(&fields).context("general.sampling")?, ignored })
    }

    /// One line about unsupported settings, for a model of this context; none if all are supported.
    pub fn note(&self, max_context: usize) -> Option<String> {
        let limit = |field: &&String| {
            let length = field.strip_prefix("max_length ").and_then(|length| length.parse::<usize>().ok());
            length.is_none_or(|length| length < max_context)
        };
        let ignored: Vec<&str> = self.ignored.iter().filter(limit).map(String::as_str).collect();
        let fields = ignored.join(", ");
        (!ignored.is_empty()).then(|| format!("the model's generation settings say more than is done here: {fields}"))
    }
}

/// Sampling defaults from the source that the flags choose; `own` are the model's.
pub fn choose(own: &Generation, options: &GenerationOptions) -> Result<Generation> {
    let mut chosen = match &options.source {
        GenerationSource::Auto => own.clone(),
        GenerationSource::Vllm => Generation { ends: own.ends.clone(), ..Generation::default() },
        GenerationSource::Folder(folder) => {
            let path = folder.join(FILE);
            let flag = || format!("--generation-config {}", folder.display());
            let text = std::fs::read_to_string(&path).with_context(|| format!("no {FILE}")).with_context(flag)?;
            let mut other = Generation::parse(&text).with_context(flag)?;
            other.ends.extend(&own.ends);
            other.sampling.most_tokens = other.sampling.max_tokens;
            other
        }
    };
    if let Some(above) = options.overrides {
        chosen.sampling = above.over(chosen.sampling);
        chosen.sampling.most_tokens = match options.source {
            GenerationSource::Folder(_) => chosen.sampling.max_tokens,
            GenerationSource::Auto | GenerationSource::Vllm => above.max_tokens,
        };
    }
    let mut params = chosen.sampling.params();
    params.max_tokens = chosen.sampling.max_tokens.unwrap_or(params.max_tokens);
    if let Err(error) = params.validate(usize::MAX) {
        bail!("sampling defaults: {error}; see --generation-config and --override-generation-config");
    }
    Ok(chosen)
}

/// The value of --override-generation-config.
pub fn overrides(json: &str) -> Result<SamplingDefaults> {
    let fields: Map<String, Value> = serde_json::from_str(json).context("expected a JSON object")?;
    if let Some(name) = fields.keys().find(|name| !READ.contains(&name.as_str())) {
        bail!("{name}: not one of {}", READ.join(", "));
    }
    sampling(&fields)
}

fn sampling(fields: &Map<String, Value>) -> Result<SamplingDefaults> {
    let number = |name: &str| match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_f64().map(Some).with_context(|| format!("{name}: expected a number, found {value}")),
    };
    let whole = |name: &str| match number(name)? {
        Some(number) if number.fract() != 0.0 => bail!("{name}: expected a whole number, found {number}"),
        number => Ok(number),
    };
    let small = |number: Option<f64>| number.map(|number| number as f32);
    Ok(SamplingDefaults {
        temperature: small(number("temperature")?),
        top_p: small(number("top_p")?),
        // -1 and 0 switch it off.
        top_k: whole("top_k")?.filter(|&k| k > 0.0).map(|k| k as u32),
        min_p: small(number("min_p")?),
        repetition_penalty: small(number("repetition_penalty")?),
        max_tokens: whole("max_new_tokens")?.map(|tokens| tokens as usize),
        most_tokens: None,
    })
}

/// One id, several, or none; a negative one is none.
fn ends(fields: &Map<String, Value>) -> Result<Vec<u32>> {
    let ids: &[Value] = match fields.get("eos_token_id") {
        None | Some(Value::Null) => &[],
        Some(Value::Array(ids)) => ids.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    let id = |value: &Value| match value.as_i64() {
        Some(id) => Ok(u32::try_from(id).ok()),
        None => bail!("eos_token_id: expected token ids, found {value}"),
    };
    ids.iter().filter_map(|value| id(value).transpose()).collect()
}

/// Whether a value has no effect.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Number(_) | Value::String(_) => false,
    }
}

/// A value, if it is short enough for a line.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.len() <= 40 { text } else { "...".into() }
}

#[cfg(test)]
mod tests;
