//! Weights in eight-bit floats, with scales for the tensor, a row, a group or a block:
//! compressed-tensors' `float-quantized`, ModelOpt's `FP8`, and the `fp8` of DeepSeek and Qwen
//! checkpoints with `weight_scale_inv`.
//!
//! The weights are read exactly. Scales of activations, static or dynamic, are not used:
//! activations keep more bits here than eight-bit floats have.

use std::borrow::Cow;

use serde_json::Value;

use super::layer::Layer;
use super::patterns::{Names, names};
use super::scales::{Scales, Sharing};
use super::{Packed, Packing, scheme, short};
use crate::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix, Result, WeightSource};

/// Widest block of a scale: far wider than any published one.
const MAX_BLOCK: u64 = 1 << 20;

/// The layer's `weight` under these scales, read from `suffix`.
pub(super) fn matrix<'a>(layer: &Layer<'a, '_>, scales: &Scales, suffix: &str, sharing: Sharing) -> Result<Matrix<'a>> {
    let (rows, cols) = (layer.rows, layer.cols);
    let view = layer.shaped("weight", &[Format::F8_E4M3], &[rows, cols])?;
    let group = sharing.group(cols);
    scales.refuse_zeros(layer, suffix, group, |row, col| view.bytes[row * cols + col] & 0x7f != 0)?;
    let row = |index: usize| GroupedRow {
        codes: Cow::Borrowed(&view.bytes[index * cols..(index + 1) * cols]),
        scales: scales.row(index).to_vec(),
        ..GroupedRow::default()
    };
    let form = Grouped {
        group,
        levels: GroupedLevels::Float8,
        activations: ActivationScale::Group,
        order: None,
        outliers: None,
    };
    layer.matrix("weight", form, (0..rows).map(row).collect())
}

/// `quant_method: fp8` and `fbgemm_fp8`.
#[derive(Debug)]
pub(super) struct Fp8 {
    /// Rows and columns of a block, if scales are by block.
    block: Option<(usize, usize)>,
    left_out: Vec<String>,
}

impl Fp8 {
    pub fn open(config: &Value) -> Result<Box<dyn Packing>> {
        let block = match config.get("weight_block_size") {
            None | Some(Value::Null) => None,
            Some(value) => Some(block_size(value).ok_or_else(|| {
                scheme(
                    "weight_block_size",
                    format!("is {}, but must be two whole numbers from 1 to {MAX_BLOCK}", short(value)),
                )
            })?),
        };
        let mut left_out = names(config, "modules_to_not_convert")?;
        left_out.extend(names(config, "ignored_layers")?);
        Ok(Box::new(Self { block, left_out }))
    }
}

/// `[rows, columns]`, both positive.
pub(super) fn block_size(value: &Value) -> Option<(usize, usize)> {
    let side = |value: &Value| value.as_u64().filter(|side| (1..=MAX_BLOCK).contains(side)).map(|side| side as usize);
    match value.as_array()?.as_slice() {
        [rows, cols] => Some((side(rows)?, side(cols)?)),
        _ => None,
    }
}

impl Packing for Fp8 {
    fn holds(&self, source: &dyn WeightSource, stem: &str) -> bool {
        source.tensor(&format!("{stem}.weight")).is_some_and(|view| view.format == Format::F8_E4M3)
    }

    fn matrix<'a>(&self, source: &'a dyn WeightSource, stem: &str, rows: usize, cols: usize) -> Result<Packed<'a>> {
        let layer = Layer::new(source, stem, rows, cols);
        if let Some(name) = self.left_out.iter().find(|name| Names::Ends.matches(name, stem)) {
            return Err(layer.wrong("weight", format!("is F8_E4M3, but the configuration leaves out {name:?}")));
        }
        // Some writers use the older name of the same tensor.
        let suffix = match layer.find("weight_scale_inv") {
            None if layer.find("weight_scale").is_some() => "weight_scale",
            _ => "weight_scale_inv",
        };
        let sharing = match (self.block, layer.find(suffix)) {
            (Some((rows, cols)), _) => Sharing::Block { rows, cols },
            (None, Some(view)) if view.shape.iter().any(|dim| *dim > 1) => Sharing::Row,
            (None, _) => Sharing::Tensor,
        };
        let scales = Scales::any(&layer, suffix, sharing)?;
        let matrix = matrix(&layer, &scales, suffix, sharing)?;
        layer.find("activation_scale");
        Ok(layer.done(matrix))
    }
}
