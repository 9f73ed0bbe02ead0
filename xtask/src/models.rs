//! `cargo xtask models FOLDER`: makes `models/` anew from the trained models in FOLDER.
//!
//! Reads Hugging Face folders of the Llama architecture and writes GGUF files that llama.cpp's
//! tools read as well: its tensor names, its order of query and key rows, norms in F32. The
//! tokenizer stays beside them, one copy for all.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use folio_formats::gguf::Writer;
use folio_formats::quant::{encode, encode_fitted};
use folio_formats::{Format, Mapped, Matrix, Safetensors, WeightSource};
use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};
use serde_json::Value;

/// Each model with its shipped format, chosen by the tables in models/README.md. The first rule
/// whose word is in a tensor's name applies.
const MODELS: [(&str, &str); 2] = [("folio-rust-42m", "=Q5_0"), ("folio-rust-7m", "=IQ4_NL")];

const USAGE: &str =
    "usage: cargo xtask models FOLDER [--out DIR] [--plan WORD=FORMAT,...] [--importance DIR | --even | --nearest]";

pub fn run(args: &[String]) -> Result<()> {
    let options = Options::parse(args)?;
    std::fs::create_dir_all(&options.out)?;
    for (name, shipped) in MODELS {
        let source = options.folder.join(name);
        let plan = options.plan.clone().map_or_else(|| plan(shipped), Ok)?;
        let bytes = convert(&source, name, &plan, &options).with_context(|| source.display().to_string())?;
        let path = options.out.join(format!("{name}.gguf"));
        std::fs::write(&path, &bytes)?;
        println!("{}: {} bytes", path.display(), bytes.len());
    }
    let first = MODELS[0].0;
    let tokenizer = options.folder.join(first).join("tokenizer.json");
    let copy = std::fs::read(&tokenizer).with_context(|| tokenizer.display().to_string())?;
    for (name, _) in MODELS {
        let own = std::fs::read(options.folder.join(name).join("tokenizer.json"))?;
        ensure!(own == copy, "{name} has another tokenizer than {first}");
    }
    std::fs::write(options.out.join("tokenizer.json.lzma"), compressed(compact(&copy)?.as_bytes())?)?;
    Ok(())
}

fn compressed(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut writer = LzmaWriter::new_use_header(Vec::new(), &LzmaOptions::with_preset(9), Some(bytes.len() as u64))?;
    writer.write_all(bytes)?;
    Ok(writer.finish()?)
}

fn unpacked(path: &Path) -> Result<Safetensors> {
    let (file, name, mut bytes) = (File::open(path), path.display().to_string(), Vec::new());
    LzmaReader::new_mem_limit(file.with_context(|| name.clone())?, u32::MAX, None)?.read_to_end(&mut bytes)?;
    Ok(Safetensors::from_map(Mapped::from_vec(&name, bytes))?)
}

/// The same tokenizer in a third of the bytes: without white space, and each merge as one string.
fn compact(json: &[u8]) -> Result<String> {
    let mut tokenizer: Value = serde_json::from_slice(json)?;
    let merges = tokenizer["model"]["merges"].as_array_mut().context("model.merges is missing")?;
    for merge in merges {
        if let Value::Array(parts) = merge {
            let parts: Option<Vec<&str>> = parts.iter().map(Value::as_str).collect();
            *merge = parts.context("model.merges: expected pairs of texts")?.join(" ").into();
        }
    }
    Ok(tokenizer.to_string())
}

/// The way in which scales are chosen.
#[derive(Clone, Debug, PartialEq)]
enum Fit {
    Nearest,
    /// The least squared error, with every value counting alike.
    Even,
    /// The least squared error, weighted by the measurements of `models/calibrate.py`:
    /// `NAME.importance.safetensors.lzma` in this folder.
    Weighed(PathBuf),
}

struct Options {
    folder: PathBuf,
    out: PathBuf,
    /// Replaces each model's own plan.
    plan: Option<Plan>,
    fit: Fit,
}

type Plan = Vec<(String, Format)>;

impl Options {
    fn parse(args: &[String]) -> Result<Self> {
        let mut rest = args.iter();
        let folder = PathBuf::from(rest.next().context(USAGE)?);
        let fit = Fit::Weighed(PathBuf::from("models"));
        let mut options = Self { folder, out: PathBuf::from("models"), plan: None, fit };
        while let Some(flag) = rest.next() {
            match flag.as_str() {
                "--out" => options.out = PathBuf::from(rest.next().context(USAGE)?),
                "--plan" => options.plan = Some(plan(rest.next().context(USAGE)?)?),
                "--even" => options.fit = Fit::Even,
                "--nearest" => options.fit = Fit::Nearest,
                "--importance" => options.fit = Fit::Weighed(PathBuf::from(rest.next().context(USAGE)?)),
                _ => bail!("{flag}: {USAGE}"),
            }
        }
        Ok(options)
    }
}

/// The plan's format for a tensor.
fn format_of(plan: &Plan, tensor: &str) -> Result<Format> {
    let rule = plan.iter().find(|(word, _)| tensor.contains(word.as_str()));
    Ok(rule.with_context(|| format!("no rule of the plan fits {tensor}"))?.1)
}

/// `attn=Q5_0,=Q4_0`: a word of tensor names and the format of those that contain it; the empty
/// word matches all.
fn plan(text: &str) -> Result<Plan> {
    let rule = |rule: &str| {
        let (word, format) = rule.split_once('=').with_context(|| format!("{rule}: expected WORD=FORMAT"))?;
        let format = Format::from_name(format).with_context(|| format!("{format}: no such format"))?;
        Ok((word.to_owned(), format))
    };
    text.split(',').map(rule).collect()
}

/// The fields of config.json that the file needs.
struct Config(Value);

impl Config {
    fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Ok(Self(serde_json::from_str(&text).with_context(|| path.display().to_string())?))
    }

    fn count(&self, field: &str) -> Result<u32> {
        let value = self.0[field].as_u64().and_then(|value| u32::try_from(value).ok());
        value.with_context(|| format!("config.json: {field}: expected a count, found {}", self.0[field]))
    }

    fn number(&self, field: &str) -> Result<f32> {
        let value = self.0[field].as_f64().map(|value| value as f32);
        value.with_context(|| format!("config.json: {field}: expected a number, found {}", self.0[field]))
    }
}

fn convert(folder: &Path, name: &str, plan: &Plan, options: &Options) -> Result<Vec<u8>> {
    let config = Config::read(&folder.join("config.json"))?;
    ensure!(config.0["model_type"] == "llama", "config.json: model_type: expected llama");
    ensure!(config.0["tie_word_embeddings"] == true, "config.json: tie_word_embeddings: expected true");
    let weights = Safetensors::open(folder)?;
    let mut writer = Writer::new();
    describe(&mut writer, name, &config)?;
    describe_text(&mut writer, folder)?;
    let importance = match &options.fit {
        Fit::Weighed(folder) => Some(unpacked(&folder.join(format!("{name}.importance.safetensors.lzma")))?),
        Fit::Nearest | Fit::Even => None,
    };
    let heads = (config.count("num_attention_heads")? as usize, config.count("num_key_value_heads")? as usize);
    for (there, here) in tensor_names(config.count("num_hidden_layers")?) {
        let view = weights.require(&there)?;
        let mut matrix = view.matrix()?;
        if here.ends_with("attn_q.weight") {
            matrix = interleave(&matrix, heads.0);
        } else if here.ends_with("attn_k.weight") {
            matrix = interleave(&matrix, heads.1);
        }
        let format = if view.shape.len() == 1 { Format::F32 } else { format_of(plan, &here)? };
        let weights = match (&importance, &options.fit) {
            _ if !format.is_quantized() => None,
            (Some(file), _) => Some(file.require(&driven_like(&here))?.to_f32()?),
            (None, Fit::Nearest) => None,
            (None, _) => Some(vec![1.0; matrix.cols()]),
        };
        let bytes = encode_rows(&matrix, format, weights.as_deref())?;
        writer.tensor(&here, format, &view.shape, bytes);
    }
    let used = writer.num_tensors();
    ensure!(used == weights.names().len(), "{} tensors, of which only {used} are known", weights.names().len());
    Ok(writer.to_vec())
}

/// The matrix that represents all of the same input in a file of importance.
fn driven_like(tensor: &str) -> String {
    tensor.replace("attn_k", "attn_q").replace("attn_v", "attn_q").replace("ffn_up", "ffn_gate")
}

fn describe(writer: &mut Writer, name: &str, config: &Config) -> Result<()> {
    let heads = config.count("num_attention_heads")?;
    let head_dim =
        config.count("head_dim").or_else(|_| Ok::<_, anyhow::Error>(config.count("hidden_size")? / heads))?;
    writer
        .set("general.architecture", "llama")
        .set("general.type", "model")
        .set("general.name", name)
        .set("general.license", "MIT OR Apache-2.0")
        .set("general.quantization_version", 2u32)
        .set("llama.vocab_size", config.count("vocab_size")?)
        .set("llama.context_length", config.count("max_position_embeddings")?)
        .set("llama.embedding_length", config.count("hidden_size")?)
        .set("llama.block_count", config.count("num_hidden_layers")?)
        .set("llama.feed_forward_length", config.count("intermediate_size")?)
        .set("llama.attention.head_count", heads)
        .set("llama.attention.head_count_kv", config.count("num_key_value_heads")?)
        .set("llama.attention.key_length", head_dim)
        .set("llama.attention.value_length", head_dim)
        .set("llama.attention.layer_norm_rms_epsilon", config.number("rms_norm_eps")?)
        .set("llama.rope.dimension_count", head_dim)
        .set("llama.rope.freq_base", config.number("rope_theta")?);
    Ok(())
}

/// Facts outside the tokenizer file: the chat template, special ids, and sampling defaults.
fn describe_text(writer: &mut Writer, folder: &Path) -> Result<()> {
    let tokenizer = Config::read(&folder.join("tokenizer_config.json"))?;
    let template = tokenizer.0["chat_template"].as_str().context("tokenizer_config.json: chat_template is missing")?;
    let generation = Config::read(&folder.join("generation_config.json"))?;
    let eos = match &generation.0["eos_token_id"] {
        Value::Array(ids) => ids.first().and_then(Value::as_u64),
        id => id.as_u64(),
    };
    let eos = eos.context("generation_config.json: eos_token_id is missing")?;
    writer
        .set("tokenizer.ggml.bos_token_id", generation.count("bos_token_id")?)
        .set("tokenizer.ggml.eos_token_id", u32::try_from(eos)?)
        .set("tokenizer.ggml.padding_token_id", generation.count("pad_token_id")?)
        .set("tokenizer.ggml.add_bos_token", tokenizer.0["add_bos_token"] == true)
        .set("tokenizer.chat_template", template)
        .set("folio.generation_config", generation.0.to_string());
    Ok(())
}

/// Every tensor under its name in the checkpoint and in GGUF.
fn tensor_names(layers: u32) -> Vec<(String, String)> {
    const IN_LAYER: [(&str, &str); 9] = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let pair = |there: &str, here: &str| (format!("model.{there}.weight"), format!("{here}.weight"));
    let mut names = vec![pair("embed_tokens", "token_embd")];
    for layer in 0..layers {
        let in_layer =
            |(there, here): (&str, &str)| pair(&format!("layers.{layer}.{there}"), &format!("blk.{layer}.{here}"));
        names.extend(IN_LAYER.map(in_layer));
    }
    names.push(pair("norm", "output_norm"));
    names
}

/// llama.cpp's row order for this architecture: the two halves of each head, which rotate together,
/// row by row.
fn interleave<'a>(matrix: &Matrix<'a>, heads: usize) -> Matrix<'a> {
    let head_dim = matrix.num_rows() / heads;
    let half = head_dim / 2;
    matrix.pick_rows((0..matrix.num_rows()).map(|row| {
        let (head, within) = (row / head_dim, row % head_dim);
        head * head_dim + within % 2 * half + within / 2
    }))
}

/// `importance` has one number per column; without it values are rounded to nearest.
fn encode_rows(matrix: &Matrix, format: Format, importance: Option<&[f32]>) -> Result<Vec<u8>> {
    let mut values = vec![0.0; matrix.cols()];
    let mut bytes = Vec::new();
    for row in 0..matrix.num_rows() {
        matrix.read_row(row, &mut values);
        bytes.extend(match importance {
            Some(importance) => encode_fitted(format, &values, importance)?,
            None => encode(format, &values)?,
        });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;

    #[test]
    fn halves_of_a_head_are_interleaved() {
        let rows = (0..8u8).map(|row| Cow::Owned(vec![row])).collect();
        let matrix = Matrix::from_rows(Format::U8, 1, rows).unwrap();
        let turned = interleave(&matrix, 2);
        let order: Vec<u8> = (0..8).map(|row| turned.parts()[0].row(row)[0]).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn the_first_rule_that_fits_holds() {
        let args = ["x", "--plan", "attn=Q5_1,=Q4_0", "--nearest"].map(str::to_owned);
        let options = Options::parse(&args).unwrap();
        let given = options.plan.unwrap();
        assert_eq!(format_of(&given, "blk.0.attn_q.weight").unwrap(), Format::Q5_1);
        assert_eq!(format_of(&given, "token_embd.weight").unwrap(), Format::Q4_0);
        assert_eq!(options.fit, Fit::Nearest);
        assert!(plan("attn").is_err() && plan("attn=Q9").is_err() && Options::parse(&[]).is_err());
        MODELS.iter().for_each(|(_, shipped)| assert!(plan(shipped).is_ok()));
    }

    #[test]
    fn a_tokenizer_is_written_small() {
        let json = br#"{ "model": { "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": [["a", "b"], "ab a"] } }"#;
        assert_eq!(compact(json).unwrap(), r#"{"model":{"vocab":{"a":0,"b":1,"ab":2},"merges":["a b","ab a"]}}"#);
        assert!(compact(b"{}").is_err());
    }
}
