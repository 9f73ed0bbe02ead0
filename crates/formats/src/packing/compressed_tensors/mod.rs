//! `quant_method: compressed-tensors`, as llm-compressor writes it: integers in words or bytes,
//! eight-bit and four-bit floats, any of them for any group of layers.
//!
//! The tensors decide whether a layer is packed, the configuration how to read it; a contradiction
//! between the two is an error. Quantized activations concern the kernels: integers by token are
//! passed on as a request, scales for eight-bit or four-bit floats are skipped, since activations
//! keep more bits here.

mod config;
mod integers;

use serde_json::Value;

use self::config::{Group, Storage, Weights};
use super::layer::Layer;
use super::patterns::{Target, names};
use super::scales::{Scales, Sharing};
use super::{Packed, Packing, fp4, fp8};
use crate::{Format, Matrix, Result, WeightSource};

#[derive(Debug)]
pub(super) struct CompressedTensors {
    groups: Vec<Group>,
    ignore: Vec<Target>,
}

impl CompressedTensors {
    pub fn open(config: &Value) -> Result<Box<dyn Packing>> {
        // A pattern that cannot be read excludes nothing; the tensors show what was excluded.
        let ignore = names(config, "ignore")?.iter().filter_map(|text| Target::read(text)).collect();
        Ok(Box::new(Self { groups: config::groups(config)?, ignore }))
    }

    /// The group with the target that names the layer most narrowly; of equals, the first.
    fn group(&self, stem: &str) -> Option<&Group> {
        let ranked = self.groups.iter().filter_map(|group| {
            let best = group.targets.iter().filter_map(|target| target.rank(stem)).min()?;
            Some((best, group))
        });
        ranked.min_by_key(|(rank, _)| *rank).map(|(_, group)| group)
    }
}

impl Packing for CompressedTensors {
    fn holds(&self, source: &dyn WeightSource, stem: &str) -> bool {
        let format = |suffix: &str| source.tensor(&format!("{stem}.{suffix}")).map(|view| view.format);
        format("weight_packed").is_some() || matches!(format("weight"), Some(Format::I8 | Format::U8 | Format::F8_E4M3))
    }

    fn matrix<'a>(&self, source: &'a dyn WeightSource, stem: &str, rows: usize, cols: usize) -> Result<Packed<'a>> {
        let layer = Layer::new(source, stem, rows, cols);
        let held = if layer.find("weight_packed").is_some() { "weight_packed" } else { "weight" };
        if self.ignore.iter().any(|target| target.rank(stem).is_some()) {
            return Err(layer.wrong(held, "is quantized, but the configuration's ignore list names the layer"));
        }
        let Some(group) = self.group(stem) else {
            return Err(layer.wrong(held, "is quantized, but no group of the configuration names the layer"));
        };
        let Some(weights) = &group.weights else {
            let problem = format!("is quantized, but group {} has no weights", group.name);
            return Err(layer.wrong(held, problem));
        };
        let matrix = read(&layer, group, weights, held)?;
        Ok(layer.done(matrix))
    }
}

fn read<'a>(layer: &Layer<'a, '_>, group: &Group, weights: &Weights, held: &str) -> Result<Matrix<'a>> {
    match (group.storage, weights.sharing) {
        (Storage::Words, _) => integers::words(layer, weights),
        (Storage::Bytes, sharing) if weights.float => {
            let scales = Scales::floats(layer, "weight_scale", sharing)?;
            fp8::matrix(layer, &scales, "weight_scale", sharing)
        }
        (Storage::Bytes, _) => integers::bytes(layer, weights, group.row_activations),
        (Storage::Nvfp4, Sharing::Group(size)) => {
            fp4::nvfp4(layer, "weight_packed", size, fp4::TensorScale::Reciprocal("weight_global_scale"))
        }
        (Storage::Mxfp4, Sharing::Group(size)) => fp4::mxfp4(layer, "weight_packed", size),
        (Storage::Mxfp8, sharing) => {
            let scales = Scales::powers(layer, "weight_scale", sharing)?;
            fp8::matrix(layer, &scales, "weight_scale", sharing)
        }
        _ => Err(layer.wrong(held, format!("is quantized, but group {} is dense", group.name))),
    }
}
