//! Models as GGUF files, for llama.cpp and everything built on it: from a Hugging Face folder or
//! from another GGUF file.
//!
//! Tensors are read, encoded and written one after the other; metadata and vocabulary come first,
//! since the file begins with them.

mod describe;
mod mix;
mod names;
mod vocab;

use std::path::Path;

use folio_formats::gguf::{Entry, FileWriter, Gguf, Value};
use folio_formats::quant::{encode, encode_fitted};
use folio_formats::{Format, Matrix, WeightSource};
use folio_model::OpenModel;

use super::read_json;
use crate::{Error, Progress, Result};
pub use mix::Mix;
use mix::Whole;
use names::{Planned, interleaved_row};

type Pairs = Vec<(String, Value)>;

/// Keys that a new file sets itself.
const REWRITTEN: [&str; 4] = ["general.file_type", "general.quantization_version", "general.alignment", "split.count"];

pub struct GgufJob<'a> {
    /// A model folder or a `.gguf` file.
    pub source: &'a Path,
    pub out: &'a Path,
    pub mix: Mix,
    /// A tensor stays unchanged if its name, in the source or in GGUF, contains one of these.
    pub keep: &'a [String],
    pub threads: usize,
}

/// Size of the written file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GgufWritten {
    pub num_tensors: usize,
    pub num_quantized: usize,
    pub bytes: u64,
}

/// Writes the whole file, which gets its name once it is complete.
pub fn write_gguf(job: &GgufJob<'_>, report: &mut dyn FnMut(Progress)) -> Result<GgufWritten> {
    let is_gguf = job.source.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
    let plan = if is_gguf { from_gguf(job)? } else { from_folder(job)? };
    let entries = plan.tensors.iter().map(|tensor| Entry::new(&tensor.planned.name, tensor.format, &tensor.shape));
    let entries: Vec<Entry> = entries.collect();
    let total = entries.iter().map(Entry::bytes).sum::<u64>().max(1);
    let mut written = GgufWritten { num_tensors: entries.len(), ..GgufWritten::default() };
    let mut writer = FileWriter::create(job.out, &plan.pairs, entries)?;
    for tensor in &plan.tensors {
        let bytes = tensor.bytes(&*plan.weights, job.threads)?;
        writer.tensor(&tensor.planned.name, &bytes)?;
        written.bytes += bytes.len() as u64;
        written.num_quantized += usize::from(tensor.format.is_quantized());
        let layer = layer_of(&tensor.planned.name).unwrap_or(plan.layers);
        let done = written.bytes as f32 / total as f32;
        report(Progress { layer, layers: plan.layers, what: "encoding", done });
    }
    plan.weights.check()?;
    writer.finish()?;
    Ok(written)
}

/// The tensors and metadata of the new file.
struct Plan {
    pairs: Pairs,
    tensors: Vec<Tensor>,
    weights: Box<dyn WeightSource>,
    layers: usize,
}

struct Tensor {
    planned: Planned,
    format: Format,
    shape: Vec<usize>,
    /// Values computed here instead of read from the source.
    values: Option<Vec<f32>>,
}

fn from_folder(job: &GgufJob<'_>) -> Result<Plan> {
    let config = read_json(&job.source.join("config.json"))?;
    let OpenModel { spec, weights, .. } = folio_model::open(job.source)?;
    let mut described = describe::describe(job.source, &config, &spec, job.mix)?;
    described.pairs.extend(vocab::describe(job.source, spec.vocab_size)?);
    let planned = names::plan(weights.names(), described.rules, spec.tied_head).map_err(|name| Error::File {
        path: job.source.to_owned(),
        problem: format!("tensor {name} has no GGUF name"),
    })?;
    let experts = config["num_experts"].as_u64().or(config["num_local_experts"].as_u64()).unwrap_or(0) as usize;
    let whole = Whole { layers: spec.layers.len(), experts, tied: spec.tied_head };
    let mut tensors = Vec::with_capacity(planned.len() + 1);
    if let Some(factors) = described.rope_factors {
        let planned = Planned { name: "rope_freqs.weight".to_owned(), sources: Vec::new(), interleaved_heads: None };
        tensors.push(Tensor { planned, format: Format::F32, shape: vec![factors.len()], values: Some(factors) });
    }
    for planned in planned {
        tensors.push(placed(planned, &*weights, job, whole)?);
    }
    Ok(Plan { pairs: described.pairs, tensors, weights, layers: whole.layers })
}

fn from_gguf(job: &GgufJob<'_>) -> Result<Plan> {
    let gguf = Gguf::open(job.source)?;
    let layers = (0..).take_while(|layer| gguf.contains(&format!("blk.{layer}.attn_norm.weight"))).count();
    let architecture = gguf.str("general.architecture")?;
    let experts = gguf.u32(&format!("{architecture}.expert_count")).unwrap_or(0) as usize;
    let whole = Whole { layers, experts, tied: !gguf.contains("output.weight") };
    let mut pairs: Pairs = gguf.metadata().pairs().to_vec();
    pairs.retain(|(key, _)| !REWRITTEN.contains(&key.as_str()) && !key.starts_with("split."));
    pairs.push(("general.file_type".to_owned(), job.mix.file_type().into()));
    pairs.push(("general.quantization_version".to_owned(), 2u32.into()));
    let planned = gguf.names().into_iter().map(|name| Planned {
        name: name.to_owned(),
        sources: vec![name.to_owned()],
        interleaved_heads: None,
    });
    let planned: Vec<Planned> = planned.collect();
    let tensors = planned.into_iter().map(|planned| placed(planned, &gguf, job, whole)).collect::<Result<_>>()?;
    Ok(Plan { pairs, tensors, weights: Box::new(gguf), layers })
}

/// Shape and format of a tensor.
fn placed(planned: Planned, weights: &dyn WeightSource, job: &GgufJob<'_>, whole: Whole) -> Result<Tensor> {
    let view = weights.require(&planned.sources[0])?;
    let mut shape = view.shape.clone();
    if planned.name.contains("_exps.") && planned.sources[0] != planned.name {
        shape.insert(0, planned.sources.len());
    }
    let kept = planned
        .sources
        .iter()
        .chain([&planned.name])
        .any(|name| job.keep.iter().any(|keep| name.contains(keep.as_str())));
    let format = match job.mix.format(&planned.name, &shape, whole) {
        Some(format) if !kept => format,
        Some(_) => view.format,
        // Norms, biases and routers.
        None if matches!(view.format, Format::F32 | Format::F16 | Format::BF16) => Format::F32,
        None => view.format,
    };
    if view.format.is_quantized() && format != view.format {
        return Err(Error::File {
            path: job.source.to_owned(),
            problem: format!("tensor {} is {} already: start from the model in full precision", view.name, view.format),
        });
    }
    Ok(Tensor { planned, format, shape, values: None })
}

impl Tensor {
    fn bytes(&self, weights: &dyn WeightSource, threads: usize) -> Result<Vec<u8>> {
        if let Some(values) = &self.values {
            return Ok(encode(Format::F32, values)?);
        }
        let mut out = Vec::new();
        for name in &self.planned.sources {
            let view = weights.require(name)?;
            if view.format == self.format && self.planned.interleaved_heads.is_none() {
                out.extend(view.bytes);
            } else if let (Some(heads), 1) = (self.planned.interleaved_heads, self.shape.len()) {
                let values = view.to_f32()?;
                let turned = (0..values.len()).map(|at| values[interleaved_row(at, values.len(), heads)]);
                out.extend(encode(self.format, &turned.collect::<Vec<f32>>())?);
            } else {
                let matrix = view.matrix()?;
                out.extend(self.encode_rows(&matrix, threads, name)?);
            }
            weights.release(name);
        }
        Ok(out)
    }

    /// Rows in the new order, encoded by several threads.
    fn encode_rows(&self, matrix: &Matrix<'_>, threads: usize, name: &str) -> Result<Vec<u8>> {
        let (rows, cols) = (matrix.num_rows(), matrix.cols());
        let from = |row: usize| match self.planned.interleaved_heads {
            Some(heads) => interleaved_row(row, rows, heads),
            None => row,
        };
        let ones = vec![1.0; cols];
        let some = |range: std::ops::Range<usize>| -> Result<Vec<u8>> {
            let mut values = vec![0.0; cols];
            let mut bytes = Vec::new();
            for row in range {
                matrix.read_row(from(row), &mut values);
                if values.iter().any(|value| !value.is_finite()) {
                    return Err(Error::NotFinite { name: name.to_owned() });
                }
                bytes.extend(encode_fitted(self.format, &values, &ones)?);
            }
            Ok(bytes)
        };
        let share = rows.div_ceil(threads.max(1)).max(1);
        let parts: Vec<Result<Vec<u8>>> = std::thread::scope(|scope| {
            let starts = (0..rows).step_by(share);
            let workers = starts.map(|start| scope.spawn(move || some(start..(start + share).min(rows))));
            let workers: Vec<_> = workers.collect();
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let parts: Vec<Vec<u8>> = parts.into_iter().collect::<Result<_>>()?;
        Ok(parts.concat())
    }
}

fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}
