//! Weights in four-bit floats, two per byte: NVFP4 (groups of 16 under eight-bit scales, and one
//! more scale for the tensor) and MXFP4 (groups of 32 under powers of two).
//!
//! compressed-tensors stores NVFP4's tensor scale as its reciprocal, ModelOpt stores it directly;
//! both are applied in the order in which their tools compute, so that the bits agree.

use std::borrow::Cow;

use super::layer::Layer;
use super::scales::{Scales, Sharing};
use crate::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix, Result};

/// Factor of NVFP4's eight-bit scales.
pub(super) enum TensorScale<'s> {
    /// The eight-bit scales are divided by this tensor.
    Reciprocal(&'s str),
    Factor(&'s str),
}

pub(super) fn nvfp4<'a>(
    layer: &Layer<'a, '_>,
    codes: &str,
    group: usize,
    tensor: TensorScale<'_>,
) -> Result<Matrix<'a>> {
    let sharing = Sharing::Group(group);
    let scales = Scales::float8(layer, "weight_scale", sharing)?;
    let (TensorScale::Reciprocal(suffix) | TensorScale::Factor(suffix)) = tensor;
    let by = layer.number(suffix)?;
    if !(by.is_finite() && by > 0.0) {
        return Err(layer.wrong(suffix, format!("is {by}, but must be positive and finite")));
    }
    let scales = match tensor {
        TensorScale::Reciprocal(_) => scales.map(|scale| scale / by),
        TensorScale::Factor(_) => scales.map(|scale| scale * by),
    };
    if scales.values().iter().any(|scale| !scale.is_finite()) {
        return Err(layer.wrong(suffix, format!("is {by}, which makes scales infinite")));
    }
    // Scales too small for eight bits were written as zero by some versions, so zeros are no fault
    // here.
    matrix(layer, codes, &scales, group)
}

pub(super) fn mxfp4<'a>(layer: &Layer<'a, '_>, codes: &str, group: usize) -> Result<Matrix<'a>> {
    let scales = Scales::powers(layer, "weight_scale", Sharing::Group(group))?;
    matrix(layer, codes, &scales, group)
}

fn matrix<'a>(layer: &Layer<'a, '_>, suffix: &str, scales: &Scales, group: usize) -> Result<Matrix<'a>> {
    let (rows, cols) = (layer.rows, layer.cols);
    if !cols.is_multiple_of(2) {
        return Err(layer.wrong(suffix, format!("packs two values a byte, but the layer has {cols} inputs")));
    }
    let view = layer.shaped(suffix, &[Format::U8], &[rows, cols / 2])?;
    let row = |index: usize| {
        let bytes = &view.bytes[index * cols / 2..(index + 1) * cols / 2];
        GroupedRow {
            codes: Cow::Owned(bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect()),
            scales: scales.row(index).to_vec(),
            ..GroupedRow::default()
        }
    };
    let form = Grouped {
        group,
        levels: GroupedLevels::E2M1,
        activations: ActivationScale::Group,
        order: None,
        outliers: None,
    };
    layer.matrix(suffix, form, (0..rows).map(row).collect())
}
