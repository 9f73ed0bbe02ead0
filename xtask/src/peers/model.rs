//! The models that all engines run, as GGUF files: two trained ones, and random ones of known
//! shapes.
//!
//! The bf16 file is Folio's conversion of a folder. llama.cpp's own tool makes the quantized ones
//! from it, so that they are mixed like published files (the tied table of Q4_0 is Q6_K, and Q4_K_M
//! has Q6_K layers).

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use folio_formats::gguf::Gguf;
use lzma_rust2::LzmaReader;
use serde_json::Value;

use super::cost::Cost;
use crate::process;

pub const NAMES: [&str; 4] = ["42m", "moe", "1b", "3b"];

/// A model in one format.
pub struct Model {
    pub name: String,
    /// llama.cpp's name: `bf16`, `q8_0`, `q4_0`, `q4_k_m`.
    pub format: String,
    pub path: PathBuf,
    /// The same, except for bf16, which OpenVINO does not read: those weights as f16.
    pub path_for_openvino: PathBuf,
    pub cost: Cost,
    /// The longest context of the model.
    pub positions: usize,
}

/// Folders of models, and the tools that make them.
pub struct Workshop<'a> {
    pub folder: &'a Path,
    /// Folder of the trained models.
    pub trained: Option<&'a Path>,
    pub folio: &'a Path,
    pub quantize: &'a Path,
    pub for_openvino: bool,
}

impl Workshop<'_> {
    /// The file of this model in this format; made on first use.
    pub fn prepare(&self, name: &str, format: &str) -> Result<Model> {
        let path = self.file(name, format)?;
        let path_for_openvino = match format {
            "bf16" if self.for_openvino => self.file(name, "f16")?,
            _ => path.clone(),
        };
        let (cost, positions) = Gguf::open(&path)
            .map_err(anyhow::Error::from)
            .and_then(|gguf| {
                let positions = gguf.u32(&format!("{}.context_length", gguf.str("general.architecture")?))?;
                Ok((Cost::of(&gguf)?, positions as usize))
            })
            .with_context(|| path.display().to_string())?;
        let (name, format) = (name.to_owned(), format.to_owned());
        Ok(Model { name, format, path, path_for_openvino, cost, positions })
    }

    fn file(&self, name: &str, format: &str) -> Result<PathBuf> {
        let path = self.folder.join(format!("{name}-{format}.gguf"));
        made(&path, |part| match format {
            "bf16" => self.convert(name, part),
            _ => {
                let mut quantize = process::command(self.quantize, &[]);
                quantize.arg(self.file(name, "bf16")?).arg(part).arg(format.to_uppercase());
                process::output(&mut quantize).map(drop)
            }
        })?;
        Ok(path)
    }

    /// The model in bf16.
    fn convert(&self, name: &str, path: &Path) -> Result<()> {
        let source = match name {
            "42m" => self.trained("folio-rust-42m")?,
            "moe" => self.trained("folio-rust-moe-47m")?,
            _ => self.random(name)?,
        };
        let mut convert = process::command(self.folio, &["quantize", "--format", "q8_0", "--keep", "weight"]);
        process::output(convert.arg(source).arg(path)).map(drop)
    }

    fn trained(&self, folder: &str) -> Result<PathBuf> {
        Ok(self.trained.with_context(|| format!("{folder} is looked for in --models-folder"))?.join(folder))
    }

    /// As `folio bench --shape` makes it, with the trained models' tokens and as many more as the
    /// shape has, so that servers can generate text.
    fn random(&self, shape: &str) -> Result<PathBuf> {
        let lengths = ["--rounds", "1", "--input-len", "1", "--output-len", "2"];
        let mut bench = process::command(self.folio, &["bench", "latency", "--shape", shape]);
        process::output(bench.args(lengths).env("XDG_CACHE_HOME", self.folder))?;
        let folder = self.folder.join("folio").join(format!("random-{shape}"));
        let packed = File::open(process::root().join("models").join("tokenizer.json.lzma"))?;
        let packed = LzmaReader::new_mem_limit(BufReader::new(packed), u32::MAX, None)?;
        let mut tokenizer: Value = serde_json::from_reader(BufReader::new(packed))?;
        let config: Value = serde_json::from_reader(File::open(folder.join("config.json"))?)?;
        let size = config["vocab_size"].as_u64().context("config.json tells no vocab_size")?;
        let vocab = tokenizer["model"]["vocab"].as_object_mut().context("tokenizer.json holds no vocabulary")?;
        vocab.extend((vocab.len() as u64..size).map(|id| (format!("token{id}"), id.into())));
        std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string())?;
        Ok(folder)
    }
}

/// Writes the file under another name first, so that a file with the final name is complete.
fn made(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    eprintln!("== writing {}", path.display());
    let part = path.with_extension("part.gguf");
    if part.exists() {
        std::fs::remove_file(&part)?;
    }
    write(&part)?;
    Ok(std::fs::rename(part, path)?)
}
