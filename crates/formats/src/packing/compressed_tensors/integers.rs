//! Integers of 1 to 8 bits, in 32-bit words or one per byte, with or without zero points, in stored
//! or calibrated order.

use std::borrow::Cow;
use std::sync::Arc;

use super::super::layer::Layer;
use super::super::scales::{Scales, Sharing};
use super::Weights;
use crate::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix, Result};

/// `weight_packed`: words of integers, each larger than its level by half the range.
pub(super) fn words<'a>(layer: &Layer<'a, '_>, weights: &Weights) -> Result<Matrix<'a>> {
    let (rows, cols, bits) = (layer.rows, layer.cols, weights.bits);
    check_stored_shape(layer)?;
    let view = layer.need("weight_packed", &[Format::I32])?;
    let Some(stream) = Stream::find(bits, cols, |words| view.shape == [rows, words]) else {
        let expected = [rows, (cols * bits).div_ceil(32)];
        let problem =
            format!("has shape {:?}, but {expected:?} is needed for {cols} values of {bits} bits", view.shape);
        return Err(layer.wrong("weight_packed", problem));
    };
    let half = 1u8 << (bits - 1);
    let integers = |row: usize| {
        let words = &view.bytes[row * stream.words * 4..(row + 1) * stream.words * 4];
        Cow::Owned(stream.read(words, cols).into_iter().map(|code| code.wrapping_sub(half)).collect())
    };
    assemble(layer, weights, "weight_packed", ActivationScale::Group, integers)
}

/// `weight`: one integer per byte.
pub(super) fn bytes<'a>(layer: &Layer<'a, '_>, weights: &Weights, row_activations: bool) -> Result<Matrix<'a>> {
    let (rows, cols) = (layer.rows, layer.cols);
    let view = layer.shaped("weight", &[Format::I8], &[rows, cols])?;
    let half = 1i16 << (weights.bits - 1);
    if let Some(at) = view.bytes.iter().position(|byte| !(-half..half).contains(&i16::from(*byte as i8))) {
        let (value, row, col, bits) = (view.bytes[at] as i8, at / cols, at % cols, weights.bits);
        return Err(layer.wrong("weight", format!("is {value} at [{row}, {col}], which has more than {bits} bits")));
    }
    // Integer kernels compute one scale per row on both sides exactly; finer weights get finer
    // activations.
    let whole_rows = matches!(weights.sharing, Sharing::Row | Sharing::Tensor) && weights.bits == 8;
    let activations = if row_activations && whole_rows { ActivationScale::Row } else { ActivationScale::Group };
    let integers = |row: usize| Cow::Borrowed(&view.bytes[row * cols..(row + 1) * cols]);
    assemble(layer, weights, "weight", activations, integers)
}

/// Checks `weight_shape`, the shape before packing, if it was written.
fn check_stored_shape(layer: &Layer<'_, '_>) -> Result<()> {
    let Some(view) = layer.find("weight_shape") else { return Ok(()) };
    let found: Vec<i64> = match view.format {
        Format::I64 => view.bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        Format::I32 => view.bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect(),
        other => return Err(layer.wrong("weight_shape", format!("is stored as {other}, but I64 is needed"))),
    };
    let expected = [layer.rows, layer.cols];
    match found.iter().copied().eq(expected.map(|dim| dim as i64)) {
        true => Ok(()),
        false => Err(layer.wrong("weight_shape", format!("says {found:?}, but the layer is {expected:?}"))),
    }
}

/// Rows of integers, as two's complement, under their scales and zero points.
fn assemble<'a>(
    layer: &Layer<'a, '_>,
    weights: &Weights,
    suffix: &str,
    activations: ActivationScale,
    integers: impl Fn(usize) -> Cow<'a, [u8]>,
) -> Result<Matrix<'a>> {
    let scales = Scales::floats(layer, "weight_scale", weights.sharing)?;
    let zeros = Zeros::read(layer, weights, suffix)?;
    let order = column_order(layer, weights.sharing)?;
    let group = weights.sharing.group(layer.cols);
    let form = Form::choose(weights, &zeros, &scales);
    let half = 1i16 << (weights.bits - 1);
    let mut rows = Vec::with_capacity(layer.rows);
    for index in 0..layer.rows {
        let mut codes = integers(index);
        if let Some(order) = &order {
            codes = order.iter().map(|input| codes[*input as usize]).collect();
        }
        let scales = scales.row(index).to_vec();
        let zero = |at: usize| zeros.as_ref().map_or(0, |zeros| i16::from(zeros.at(index, at)));
        refuse_zero_scales(layer, index, &scales, |at| {
            let run = &codes[at * group..codes.len().min((at + 1) * group)];
            run.iter().any(|code| i16::from(*code as i8) != zero(at))
        })?;
        let mut minimums = Vec::new();
        match form.zeros {
            ZeroForm::None => {}
            ZeroForm::Minimums => {
                minimums = scales.iter().enumerate().map(|(at, scale)| -scale * f32::from(zero(at))).collect();
            }
            ZeroForm::Folded => {
                for (at, run) in codes.to_mut().chunks_mut(group).enumerate() {
                    run.iter_mut().for_each(|code| *code = code.wrapping_sub(zero(at) as u8));
                }
            }
        }
        if form.nibbles {
            codes.to_mut().iter_mut().for_each(|code| *code = code.wrapping_add(half as u8));
        }
        rows.push(GroupedRow { codes, scales, minimums, ..GroupedRow::default() });
    }
    let levels = match form.nibbles {
        true => GroupedLevels::Nibbles(std::array::from_fn(|code| code as f32 - f32::from(half))),
        false => GroupedLevels::Signed8,
    };
    layer.matrix(suffix, Grouped { group, levels, activations, order, outliers: None }, rows)
}

/// Form of integers and zero points as codes.
struct Form {
    /// Whether codes have four bits, counted from the lowest integer; otherwise they are bytes.
    nibbles: bool,
    zeros: ZeroForm,
}

#[derive(Clone, Copy)]
enum ZeroForm {
    None,
    Minimums,
    /// Zero points are subtracted from the integers.
    Folded,
}

impl Form {
    fn choose(weights: &Weights, zeros: &Option<Zeros>, scales: &Scales) -> Self {
        // A minimum is `-scale * zero`. If the scale's mantissa has eight bits to spare, the
        // minimum and its sum with the product are exact, and so is the value. Scales that came
        // from 16 bits have them to spare.
        let exact = || scales.values().iter().all(|scale| scale.to_bits() & 0xff == 0);
        let (nibbles, zeros) = match (zeros, weights.bits) {
            (None, bits) => (bits <= 4, ZeroForm::None),
            (Some(_), ..=4) if exact() => (true, ZeroForm::Minimums),
            (Some(_), ..=7) => (false, ZeroForm::Folded),
            (Some(_), _) => (false, ZeroForm::Minimums),
        };
        Self { nibbles, zeros }
    }
}

fn refuse_zero_scales(layer: &Layer<'_, '_>, row: usize, scales: &[f32], weighs: impl Fn(usize) -> bool) -> Result<()> {
    match scales.iter().enumerate().find(|(at, scale)| **scale == 0.0 && weighs(*at)) {
        Some((at, _)) => {
            let problem = format!("is zero for row {row}, group {at}, where weights are not");
            Err(layer.wrong("weight_scale", problem))
        }
        None => Ok(()),
    }
}

/// Zero points, one for each scale.
struct Zeros {
    values: Vec<i8>,
    groups: usize,
    by_row: bool,
}

impl Zeros {
    fn read(layer: &Layer<'_, '_>, weights: &Weights, suffix: &str) -> Result<Option<Self>> {
        const NAME: &str = "weight_zero_point";
        let (rows, bits) = (layer.rows, weights.bits);
        let by_row = weights.sharing != Sharing::Tensor;
        let groups = layer.cols.div_ceil(weights.sharing.group(layer.cols).max(1));
        if weights.symmetric {
            return match layer.find(NAME) {
                Some(view) if view.bytes.iter().any(|byte| *byte != 0) && suffix == "weight" => {
                    Err(layer.wrong(NAME, "is not zero, but the configuration says symmetric"))
                }
                _ => Ok(None),
            };
        }
        let view = layer.need(NAME, &[Format::I8, Format::I32])?;
        let lines = if by_row { rows } else { 1 };
        if view.format == Format::I8 {
            let beside_one =
                |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|dim| *dim != 1).collect() };
            if beside_one(&view.shape) != beside_one(&[lines, groups]) {
                let problem = format!("has shape {:?}, but {:?} is needed", view.shape, [lines, groups]);
                return Err(layer.wrong(NAME, problem));
            }
            let values = view.bytes.iter().map(|byte| *byte as i8).collect();
            return Self { values, groups, by_row }.in_range(layer, bits).map(Some);
        }
        // Packed down the rows: a column of words for every group.
        let Some(stream) = Stream::find(bits, lines, |words| view.shape == [words, groups]) else {
            let expected = [(lines * bits).div_ceil(32), groups];
            return Err(layer.wrong(NAME, format!("has shape {:?}, but {expected:?} is needed", view.shape)));
        };
        let mut values = vec![0; lines * groups];
        for group in 0..groups {
            let word = |at: usize| &view.bytes[(at * groups + group) * 4..][..4];
            let column: Vec<u8> = (0..stream.words).flat_map(|at| word(at).iter().copied()).collect();
            for (line, code) in stream.read(&column, lines).into_iter().enumerate() {
                values[line * groups + group] = (i16::from(code) - (1i16 << (bits - 1))) as i8;
            }
        }
        Ok(Some(Self { values, groups, by_row }))
    }

    fn in_range(self, layer: &Layer<'_, '_>, bits: usize) -> Result<Self> {
        let half = 1i16 << (bits - 1);
        match self.values.iter().find(|zero| !(-half..half).contains(&i16::from(**zero))) {
            Some(zero) => Err(layer.wrong("weight_zero_point", format!("is {zero}, which has more than {bits} bits"))),
            None => Ok(self),
        }
    }

    fn at(&self, row: usize, group: usize) -> i8 {
        self.values[if self.by_row { row } else { 0 } * self.groups + group]
    }
}

/// `weight_g_idx` names each column's group; columns are sorted by group, in their own order inside
/// it.
fn column_order(layer: &Layer<'_, '_>, sharing: Sharing) -> Result<Option<Arc<[u32]>>> {
    const NAME: &str = "weight_g_idx";
    if layer.find(NAME).is_none() {
        return Ok(None);
    }
    let view = layer.shaped(NAME, &[Format::I32], &[layer.cols])?;
    let of: Vec<i32> = view.bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
    // The list was never filled in.
    if of.iter().all(|group| *group == -1) {
        return Ok(None);
    }
    let Sharing::Group(size) = sharing else {
        return Err(layer.wrong(NAME, "orders columns by group, but the configuration has no groups"));
    };
    let groups = layer.cols.div_ceil(size);
    let mut counts = vec![0usize; groups];
    for group in &of {
        match usize::try_from(*group).ok().and_then(|group| counts.get_mut(group)) {
            Some(count) => *count += 1,
            None => return Err(layer.wrong(NAME, format!("names group {group}, but there are {groups}"))),
        }
    }
    let full = |at: usize| size.min(layer.cols - at * size);
    if let Some(at) = (0..groups).find(|at| counts[*at] != full(*at)) {
        let problem = format!("gives group {at} {} columns, but {} belong to it", counts[at], full(at));
        return Err(layer.wrong(NAME, problem));
    }
    let mut order: Vec<u32> = (0..layer.cols as u32).collect();
    order.sort_by_key(|column| of[*column as usize]);
    Ok(if order.is_sorted() { None } else { Some(order.into()) })
}

/// Small integers in words, from the lowest bit up.
struct Stream {
    bits: usize,
    words: usize,
    /// Whether integers may lie across two words; older versions left the rest of a word unused
    /// instead.
    dense: bool,
}

impl Stream {
    /// The form in which `count` integers take a number of words that `fits`.
    fn find(bits: usize, count: usize, fits: impl Fn(usize) -> bool) -> Option<Self> {
        let dense = Self { bits, words: count.checked_mul(bits)?.div_ceil(32), dense: true };
        let apart = Self { bits, words: count.div_ceil(32 / bits), dense: false };
        [dense, apart].into_iter().find(|stream| fits(stream.words))
    }

    /// Unpacks the words of one run into one code per byte.
    fn read(&self, bytes: &[u8], count: usize) -> Vec<u8> {
        let (bits, a_word) = (self.bits, 32 / self.bits);
        let mask = (1u16 << bits) - 1;
        let code = |index: usize| {
            let bit = if self.dense { index * bits } else { index / a_word * 32 + index % a_word * bits };
            let low = u16::from(bytes[bit / 8]);
            let high = bytes.get(bit / 8 + 1).map_or(0, |byte| u16::from(*byte));
            ((low | high << 8) >> (bit % 8) & mask) as u8
        };
        (0..count).map(code).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Stream;

    #[test]
    fn integers_of_any_width_are_found() {
        // Two words, from the lowest bit: integers of 3 bits, some of them across the border.
        let value = 0b101_110_111_000_001_010_011_100_101_110_111u64;
        let dense = Stream { bits: 3, words: 2, dense: true };
        assert_eq!(dense.read(&value.to_le_bytes(), 11), [7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5]);
        let apart = Stream { bits: 3, words: 2, dense: false };
        let spread = 7u64 | 6 << 27 | 5 << 32;
        let read = apart.read(&spread.to_le_bytes(), 11);
        assert_eq!((read[0], read[9], read[10]), (7, 6, 5));
        assert_eq!(Stream::find(4, 9, |words| words == 2).map(|stream| stream.dense), Some(true));
        assert_eq!(Stream::find(3, 40, |words| words == 4).map(|stream| stream.dense), Some(true));
        assert_eq!(Stream::find(5, 96, |words| words == 16).map(|stream| stream.dense), Some(false));
        assert!(Stream::find(4, 9, |words| words == 3).is_none());
    }
}
