//! `quant_method: modelopt`: eight-bit and four-bit floats as NVIDIA's Model Optimizer exports
//! them.
//!
//! A layer's own tensors show which of the two it has, so mixed checkpoints need no list of layers.
//! `input_scale` and the scales of a quantized KV cache are skipped: neither changes the weights.

use serde_json::Value;

use super::fp4::{self, TensorScale};
use super::layer::Layer;
use super::patterns::{Names, names};
use super::scales::{Scales, Sharing};
use super::{Packed, Packing, fp8, scheme, short};
use crate::error::shown;
use crate::{Format, Result, WeightSource};

/// Values that share a scale in NVFP4.
const FP4_GROUP: usize = 16;
/// Rows and columns of a block in `FP8_PB_WO`.
const FP8_BLOCK: usize = 128;

/// Algorithms, and the kinds of numbers that each may store.
const ALGORITHMS: &[(&str, Kinds)] = &[
    ("FP8", Kinds::Eight),
    ("FP8_PER_CHANNEL_PER_TOKEN", Kinds::Eight),
    ("FP8_PB_WO", Kinds::Eight),
    ("NVFP4", Kinds::Four),
    ("W4A16_NVFP4", Kinds::Four),
    ("W4A8_NVFP4_FP8", Kinds::Four),
    ("MIXED_PRECISION", Kinds::Both),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kinds {
    Eight,
    Four,
    Both,
}

#[derive(Debug)]
pub(super) struct ModelOpt {
    kinds: Kinds,
    algorithm: &'static str,
    /// The configuration's group size; the algorithm's own if it has none.
    group: Option<usize>,
    left_out: Vec<String>,
}

impl ModelOpt {
    /// From `quantization_config`, or from hf_quant_config.json, which has the same under
    /// `quantization`.
    pub fn open(config: &Value) -> Result<Box<dyn Packing>> {
        let config = config.get("quantization").filter(|inner| inner.is_object()).unwrap_or(config);
        let Some(text) = config.get("quant_algo").and_then(Value::as_str) else {
            return Err(scheme("quant_algo", "is missing or no string"));
        };
        let Some((algorithm, kinds)) = ALGORITHMS.iter().find(|(name, _)| *name == text) else {
            let known: Vec<&str> = ALGORITHMS.iter().map(|(name, _)| *name).collect();
            let problem = format!("is \"{}\", but only {} are read", shown(text), known.join(", "));
            return Err(scheme("quant_algo", problem));
        };
        let group = match config.get("group_size").filter(|value| !value.is_null()) {
            None => None,
            Some(value) => match value.as_u64() {
                Some(group @ 1..=4096) => Some(group as usize),
                _ => return Err(scheme("group_size", format!("is {}, but must lie between 1 and 4096", short(value)))),
            },
        };
        let mut left_out = names(config, "exclude_modules")?;
        left_out.extend(names(config, "ignore")?);
        Ok(Box::new(Self { kinds: *kinds, algorithm, group, left_out }))
    }
}

impl Packing for ModelOpt {
    fn holds(&self, source: &dyn WeightSource, stem: &str) -> bool {
        let weight = source.tensor(&format!("{stem}.weight"));
        weight.is_some_and(|view| matches!(view.format, Format::F8_E4M3 | Format::U8 | Format::I8))
    }

    fn matrix<'a>(&self, source: &'a dyn WeightSource, stem: &str, rows: usize, cols: usize) -> Result<Packed<'a>> {
        let layer = Layer::new(source, stem, rows, cols);
        let weight = layer.need("weight", &[Format::F8_E4M3, Format::U8])?;
        if let Some(name) = self.left_out.iter().find(|name| Names::Wildcards.matches(name, stem)) {
            let problem = format!("is quantized, but the configuration leaves out \"{}\"", shown(name));
            return Err(layer.wrong("weight", problem));
        }
        if layer.find("pre_quant_scale").is_some() {
            return Err(layer.wrong("pre_quant_scale", "scales the layer's inputs, which is not supported"));
        }
        let four = weight.format == Format::U8;
        if self.kinds != Kinds::Both && four != (self.kinds == Kinds::Four) {
            let problem =
                format!("is stored as {}, which is not what quant_algo {} stores", weight.format, self.algorithm);
            return Err(layer.wrong("weight", problem));
        }
        if four {
            let group = self.group.unwrap_or(FP4_GROUP);
            let matrix = fp4::nvfp4(&layer, "weight", group, TensorScale::Factor("weight_scale_2"))?;
            return Ok(layer.done(matrix));
        }
        let sharing = self.sharing(&layer);
        let scales = Scales::floats(&layer, "weight_scale", sharing)?;
        let matrix = fp8::matrix(&layer, &scales, "weight_scale", sharing)?;
        Ok(layer.done(matrix))
    }
}

impl ModelOpt {
    /// Derived from the number of scales: one, one per row, or one per block.
    fn sharing(&self, layer: &Layer<'_, '_>) -> Sharing {
        let count = layer.find("weight_scale").map_or(1, |view| view.shape.iter().product::<usize>());
        if count == 1 {
            Sharing::Tensor
        } else if self.algorithm == "FP8_PB_WO" || count != layer.rows {
            let side = self.group.filter(|_| self.algorithm == "FP8_PB_WO").unwrap_or(FP8_BLOCK);
            Sharing::Block { rows: side, cols: side }
        } else {
            Sharing::Row
        }
    }
}
