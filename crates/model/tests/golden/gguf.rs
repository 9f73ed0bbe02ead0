//! The same golden files through GGUF: metadata and tensors as llama.cpp's converters write them.

use folio_device::reference::Reference;
use folio_formats::{
    Format,
    gguf::{Gguf, Writer},
};
use folio_model::OpenModel;
use serde_json::Value;

use crate::{
    families::for_all,
    file::{self, Golden},
    gguf_names, run,
};

/// Golden files that GGUF can express. It cannot express windows of Mistral and Qwen2, scalings and
/// limits without a key, and layer patterns other than an architecture's own.
const EXPRESSIBLE: &[&str] = &[
    "llama-mha",
    "llama-mqa-tied-biases",
    "llama-linear",
    "llama-yarn",
    "llama-llama3",
    "llama-llama3-5",
    "mixtral-experts",
    "qwen2-tied",
    "qwen3-tied",
    "qwen3_moe-experts",
    "gemma2-tied",
    "gemma3_text-tied",
    "phi3-window",
    "phi3-longrope",
    "phi3-partial-longrope-5",
    "phi3-partial-shortrope",
    "olmo2-gqa",
    "granite-tied",
    "smollm3-tied",
    "gpt_oss-mxfp4",
];

/// Field of config.json, key after the architecture.
const SIZES: &[(&str, &str)] = &[
    ("max_position_embeddings", "context_length"),
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("intermediate_size", "feed_forward_length"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("head_dim", "attention.value_length"),
    ("num_local_experts", "expert_count"),
    ("num_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
];

const NUMBERS: &[(&str, &str)] = &[
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("attention_multiplier", "attention.scale"),
    ("embedding_multiplier", "embedding_scale"),
    ("residual_multiplier", "residual_scale"),
    ("logits_scaling", "logit_scale"),
    ("rope_local_base_freq", "rope.freq_base_swa"),
];

/// Sets keys under one architecture.
struct Keys<'a> {
    writer: Writer<'a>,
    architecture: &'static str,
}

impl Keys<'_> {
    fn size(&mut self, key: &str, value: &Value) {
        if let Some(value) = value.as_u64() {
            self.writer.set(&format!("{}.{key}", self.architecture), value as u32);
        }
    }

    fn number(&mut self, key: &str, value: &Value) {
        if let Some(value) = value.as_f64() {
            self.writer.set(&format!("{}.{key}", self.architecture), value as f32);
        }
    }

    fn text(&mut self, key: &str, value: &str) {
        self.writer.set(&format!("{}.{key}", self.architecture), value);
    }
}

fn architecture(family: &str) -> &'static str {
    match family {
        "llama" | "mixtral" => "llama",
        "qwen2" => "qwen2",
        "qwen3" => "qwen3",
        "qwen3_moe" => "qwen3moe",
        "gemma2" => "gemma2",
        "gemma3_text" => "gemma3",
        "phi3" => "phi3",
        "olmo2" => "olmo2",
        "granite" => "granite",
        "smollm3" => "smollm3",
        "gpt_oss" => "gpt-oss",
        other => panic!("no GGUF architecture for {other}"),
    }
}

fn to_gguf(golden: &Golden) -> Vec<u8> {
    let (config, family) = (&golden.config, golden.family());
    let mut keys = Keys { writer: Writer::new(), architecture: architecture(family) };
    keys.writer.set("general.architecture", keys.architecture);
    SIZES.iter().for_each(|(field, key)| keys.size(key, &config[*field]));
    NUMBERS.iter().for_each(|(field, key)| keys.number(key, &config[*field]));
    let head_dim = config["head_dim"].as_u64().unwrap_or_else(|| {
        config["hidden_size"].as_u64().expect("a size") / config["num_attention_heads"].as_u64().expect("a size")
    });
    if ["llama", "mixtral", "granite", "smollm3"].contains(&family) {
        keys.size("vocab_size", &config["vocab_size"]);
        keys.size("rope.dimension_count", &head_dim.into());
    }
    if ["gemma2", "gemma3_text", "gpt_oss"].contains(&family) {
        keys.size("attention.sliding_window", &config["sliding_window"]);
    }
    if family == "gpt_oss" {
        keys.size("expert_feed_forward_length", &config["intermediate_size"]);
    }
    set_positions(&mut keys, golden, head_dim);
    let tensors = gguf_names::convert(golden);
    for (name, tensor) in &tensors {
        keys.writer.tensor(name, tensor.format, &tensor.shape, tensor.bytes.as_slice());
    }
    keys.writer.to_vec()
}

/// Base, scaling, and the tensors that hold some scalings.
fn set_positions(keys: &mut Keys<'_>, golden: &Golden, head_dim: u64) {
    let config = &golden.config;
    let rope = config.get("rope_scaling").filter(|rope| !rope.is_null()).or(config.get("rope_parameters"));
    let rope = rope.cloned().unwrap_or(Value::Null);
    let base = rope["rope_theta"].as_f64().or(config["rope_theta"].as_f64()).expect("a base");
    keys.number("rope.freq_base", &base.into());
    if golden.family() == "phi3" {
        return set_phi3_positions(keys, config, &rope, head_dim);
    }
    match rope["rope_type"].as_str().or(rope["type"].as_str()) {
        None | Some("default") => {}
        Some("linear") => {
            keys.text("rope.scaling.type", "linear");
            keys.number("rope.scaling.factor", &rope["factor"]);
        }
        Some("yarn") => {
            keys.text("rope.scaling.type", "yarn");
            keys.number("rope.scaling.factor", &rope["factor"]);
            keys.size("rope.scaling.original_context_length", &rope["original_max_position_embeddings"]);
            keys.number("rope.scaling.yarn_beta_fast", &rope["beta_fast"]);
            keys.number("rope.scaling.yarn_beta_slow", &rope["beta_slow"]);
        }
        Some("llama3") => set_factors(keys, "rope_freqs.weight", &llama3_factors(&rope, base, head_dim)),
        Some(other) => panic!("GGUF cannot express {other}"),
    }
}

/// Phi-3 names no scaling type: the two tensors imply it, and the magnitude is written out.
fn set_phi3_positions(keys: &mut Keys<'_>, config: &Value, rope: &Value, head_dim: u64) {
    let partial = rope["partial_rotary_factor"].as_f64().or(config["partial_rotary_factor"].as_f64()).unwrap_or(1.0);
    keys.size("rope.dimension_count", &((head_dim as f64 * partial) as u64).into());
    keys.size("rope.scaling.original_context_length", &config["original_max_position_embeddings"]);
    keys.size("attention.sliding_window", &config["sliding_window"].as_u64().unwrap_or(0).into());
    if rope["long_factor"].is_null() {
        return;
    }
    let number = |field: &str| config[field].as_f64().expect("a number");
    let original = number("original_max_position_embeddings");
    let stretch = number("max_position_embeddings") / original;
    keys.number("rope.scaling.attn_factor", &(1.0 + stretch.ln() / original.ln()).sqrt().into());
    for (field, tensor) in [("long_factor", "rope_factors_long.weight"), ("short_factor", "rope_factors_short.weight")]
    {
        let factors =
            rope[field].as_array().expect("a list").iter().map(|factor| factor.as_f64().expect("a number") as f32);
        set_factors(keys, tensor, &factors.collect::<Vec<_>>());
    }
}

fn set_factors(keys: &mut Keys<'_>, name: &str, factors: &[f32]) {
    let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
    keys.writer.tensor(name, Format::F32, &[factors.len()], bytes);
}

/// The divisor of each frequency.
fn llama3_factors(rope: &Value, base: f64, head_dim: u64) -> Vec<f32> {
    let number = |field: &str| rope[field].as_f64().expect("a number");
    let (factor, low, high) = (number("factor"), number("low_freq_factor"), number("high_freq_factor"));
    let original = number("original_max_position_embeddings");
    let one = |pair: u64| {
        let wavelength = 2.0 * std::f64::consts::PI * base.powf((2 * pair) as f64 / head_dim as f64);
        if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(|pair| one(pair) as f32).collect()
}

#[test]
fn gguf_agrees_with_transformers() {
    let goldens: Vec<Golden> = EXPRESSIBLE.iter().map(|name| file::read(name)).collect();
    for_all(&goldens, |golden| {
        let name = format!("{}.gguf", golden.name);
        let gguf = Gguf::from_static(&name, to_gguf(golden).leak()).map_err(|e| e.to_string())?;
        let model = OpenModel::from_gguf_with(gguf, &Some(golden.max_context).into()).map_err(|e| e.to_string())?;
        run::check(golden, &model, Reference::new)
    });
}
