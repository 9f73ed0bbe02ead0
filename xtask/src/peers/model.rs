//! The models that all engines run, as GGUF files: two trained ones, and a random one of 1B shape.
//!
//! The bf16 file is Folio's conversion of a folder; the quantized ones are what llama.cpp's own tool makes of it, so that
//! they are mixed the way files in the wild are (the tied table of Q4_0 is Q6_K, and Q4_K_M has Q6_K layers).

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use folio_formats::gguf::Gguf;
use lzma_rust2::LzmaReader;

use super::cost::Cost;
use crate::process;

pub const NAMES: [&str; 3] = ["42m", "moe", "1b"];

/// A model in one format.
pub struct Model {
    pub name: String,
    /// As llama.cpp names it: `bf16`, `q8_0`, `q4_0`, `q4_k_m`.
    pub format: String,
    pub path: PathBuf,
    pub cost: Cost,
}

/// Where models come from and go to.
pub struct Workshop<'a> {
    pub folder: &'a Path,
    /// Where the trained models lie.
    pub trained: Option<&'a Path>,
    pub folio: &'a Path,
    pub quantize: &'a Path,
}

impl Workshop<'_> {
    /// The file of that model in that format; made on first use.
    pub fn prepare(&self, name: &str, format: &str) -> Result<Model> {
        let bf16 = self.folder.join(format!("{name}-bf16.gguf"));
        made(&bf16, |part| {
            let source = match name {
                "42m" => self.trained("folio-rust-42m")?,
                "moe" => self.trained("folio-rust-moe-47m")?,
                _ => self.random(name)?,
            };
            let mut convert = process::command(self.folio, &["quantize", "--format", "q8_0", "--keep", "weight"]);
            process::output(convert.arg(source).arg(part)).map(drop)
        })?;
        let path = self.folder.join(format!("{name}-{format}.gguf"));
        made(&path, |part| {
            let mut quantize = process::command(self.quantize, &[]);
            process::output(quantize.arg(&bf16).arg(part).arg(format.to_uppercase())).map(drop)
        })?;
        let cost = Cost::of(&Gguf::open(&path)?).with_context(|| path.display().to_string())?;
        Ok(Model { name: name.to_owned(), format: format.to_owned(), path, cost })
    }

    fn trained(&self, folder: &str) -> Result<PathBuf> {
        Ok(self.trained.with_context(|| format!("{folder} is looked for in --models-folder"))?.join(folder))
    }

    /// As `folio bench --shape` makes it, with the trained models' tokens, so that servers have something to say.
    fn random(&self, shape: &str) -> Result<PathBuf> {
        let lengths = ["--rounds", "1", "--input-len", "1", "--output-len", "2"];
        let mut bench = process::command(self.folio, &["bench", "latency", "--shape", shape]);
        process::output(bench.args(lengths).env("XDG_CACHE_HOME", self.folder))?;
        let folder = self.folder.join("folio").join(format!("random-{shape}"));
        let packed = File::open(process::root().join("models").join("tokenizer.json.lzma"))?;
        let mut tokenizer = LzmaReader::new_mem_limit(BufReader::new(packed), u32::MAX, None)?;
        std::io::copy(&mut tokenizer, &mut File::create(folder.join("tokenizer.json"))?)?;
        Ok(folder)
    }
}

/// Writes the file under another name first, so that one with its own is whole.
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
