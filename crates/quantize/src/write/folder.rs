//! A quantized model as a folder that transformers and vLLM load: tensors, config.json, and all
//! other files of the source.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use folio_formats::Format;
use folio_formats::WeightSource;
use folio_formats::safetensors::{SHARD_BYTES, Safetensors, Writer};
use serde_json::Value;

use super::staging::Staging;
use super::{bitsandbytes, compressed};
use crate::{Error, Finished, Options, Result, Sink, Target};

/// Files with weights, or about them; all others of a folder are copied.
const WEIGHT_ENDINGS: [&str; 8] = [".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".index.json"];
/// Far more than any tokenizer; a larger file is no side file.
const SIDE_FILE_BYTES: u64 = 256 << 20;

/// Takes the finished tensors of [`crate::run`].
#[derive(Debug)]
pub struct FolderWriter {
    source: PathBuf,
    staging: Staging,
    writer: Writer,
    target: Target,
    threshold: f32,
    /// The model's own type, in PyTorch's spelling.
    dtype: String,
    config: Value,
    written: HashSet<String>,
    /// Linears that were not quantized, without `.weight`.
    kept: Vec<String>,
    num_quantized: usize,
}

/// Size of the written folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FolderWritten {
    pub num_tensors: usize,
    /// Linears that were quantized.
    pub num_quantized: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
}

impl FolderWriter {
    /// `source` is a model folder; with `replaces`, the finished folder replaces an existing one at
    /// `out`.
    pub fn create(source: &Path, out: &Path, options: &Options, replaces: bool) -> Result<Self> {
        let config = super::read_json(&source.join("config.json"))?;
        if config.get("quantization_config").is_some_and(|config| !config.is_null()) {
            let problem = "the model is quantized already: start from the one in full precision".to_owned();
            return Err(Error::File { path: source.join("config.json"), problem });
        }
        let dtype = config["dtype"].as_str().or(config["torch_dtype"].as_str()).unwrap_or("bfloat16").to_owned();
        let staging = Staging::create(out, replaces)?;
        Ok(Self {
            source: source.to_owned(),
            writer: Writer::create(staging.path(), SHARD_BYTES)?,
            staging,
            target: options.target,
            threshold: options.outlier_threshold,
            dtype,
            config,
            written: HashSet::new(),
            kept: Vec::new(),
            num_quantized: 0,
        })
    }

    /// Adds the tensors that the run did not use, the configuration and the side files, and gives
    /// the folder its name.
    pub fn finish(mut self) -> Result<FolderWritten> {
        self.copy_rest()?;
        let mut ignored = std::mem::take(&mut self.kept);
        // Loaders create a module for it even if it has no tensor of its own.
        if !self.written.contains("lm_head.weight") {
            ignored.push("lm_head".to_owned());
        }
        let about = match self.target {
            Target::Nf4 | Target::LlmInt8 => bitsandbytes::config(self.target, &ignored, &self.dtype, self.threshold),
            _ => compressed::config(self.target, &ignored),
        };
        self.config["quantization_config"] = about;
        let path = self.staging.path().join("config.json");
        fs::write(&path, format!("{:#}\n", self.config)).map_err(|source| Error::Io { path, source })?;
        copy_side_files(&self.source, self.staging.path())?;
        let written = self.writer.finish()?;
        self.staging.finish()?;
        Ok(FolderWritten { num_tensors: written.num_tensors, num_quantized: self.num_quantized, bytes: written.bytes })
    }

    fn plain(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) -> Result<()> {
        if shape.len() == 2
            && !name.contains("embed")
            && let Some(stem) = name.strip_suffix(".weight")
        {
            self.kept.push(stem.to_owned());
        }
        self.written.insert(name.to_owned());
        Ok(self.writer.tensor(name, dtype, shape, bytes)?)
    }

    /// Copies tensors of the source that the model does not use.
    fn copy_rest(&mut self) -> Result<()> {
        let source = Safetensors::open(&self.source)?;
        for name in source.names() {
            if !self.written.contains(name)
                && let Some(stored) = source.stored(name)
            {
                self.plain(name, stored.dtype, &stored.shape, stored.bytes)?;
                source.release(name);
            }
        }
        Ok(source.check()?)
    }
}

impl Sink for FolderWriter {
    fn tensor(&mut self, name: &str, tensor: Finished<'_>) -> Result<()> {
        let q = match tensor {
            Finished::Plain(plain) => {
                let dtype = dtype_name(plain.format).ok_or_else(|| Error::Unsupported {
                    what: name.to_owned(),
                    why: "its format has no place in a safetensors file",
                })?;
                return self.plain(name, dtype, &plain.shape, &plain.bytes);
            }
            Finished::Quantized(q) => q,
        };
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        let stored = match self.target {
            Target::Nf4 | Target::LlmInt8 => bitsandbytes::tensors(q, &self.dtype),
            _ => compressed::tensors(q),
        };
        for part in stored {
            self.writer.tensor(&format!("{stem}{}", part.suffix), part.dtype, &part.shape, &part.bytes)?;
        }
        self.written.insert(name.to_owned());
        self.num_quantized += 1;
        Ok(())
    }
}

fn dtype_name(format: Format) -> Option<&'static str> {
    Some(match format {
        Format::F64 => "F64",
        Format::F32 => "F32",
        Format::F16 => "F16",
        Format::BF16 => "BF16",
        Format::I64 => "I64",
        Format::I32 => "I32",
        Format::I16 => "I16",
        Format::I8 => "I8",
        Format::U8 => "U8",
        _ => return None,
    })
}

fn copy_side_files(from: &Path, to: &Path) -> Result<()> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { path, source }
    };
    for entry in fs::read_dir(from).map_err(io(from))? {
        let path = entry.map_err(io(from))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let about = fs::metadata(&path).map_err(io(&path))?;
        let weights = WEIGHT_ENDINGS.iter().any(|ending| name.ends_with(ending));
        if about.is_file()
            && !weights
            && !name.starts_with('.')
            && name != "config.json"
            && about.len() <= SIDE_FILE_BYTES
        {
            let bytes = fs::read(&path).map_err(io(&path))?;
            fs::write(to.join(name), bytes).map_err(io(&path))?;
        }
    }
    Ok(())
}
