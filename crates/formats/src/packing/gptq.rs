//! GPTQ, as AutoGPTQ and gptqmodel write it: codes packed along the inputs, zero points along the
//! outputs.
//!
//! `qweight [inputs * bits / 32, outputs]` and `qzeros [groups, outputs * bits / 32]` hold 32-bit
//! words, `scales` is `[groups, outputs]`, and `g_idx [inputs]` is the group of each input: in
//! order, or in the order of quantization with act-order. The first version of the format stores
//! each zero point less one. A layer's tensors show which `dynamic` rule applies to it: a skipped
//! layer has a plain weight, and one with other bits has other shapes.

use std::sync::Arc;

use serde_json::Value;

use super::words::{group_size, integer, scales, unpack, words};
use super::{Packed, Packing, packed, scheme, tensor};
use crate::error::shown;
use crate::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix, Result, WeightSource};

/// Outputs that are unpacked together: a cache line of words.
const ROWS_AT_ONCE: usize = 16;

#[derive(Debug)]
struct Gptq {
    zero_points: ZeroPoints,
    /// Whether inputs were quantized in an order of their own, so that `g_idx` is required.
    act_order: bool,
    /// The rule for every layer, then those of `dynamic`.
    rules: Vec<Rule>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ZeroPoints {
    /// Version 1 of the format stores zero points less one.
    LessOne,
    /// Version 2 of the format stores zero points unchanged.
    AsTheyAre,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Rule {
    bits: u32,
    /// Inputs in a group; `None` for all of them.
    group: Option<usize>,
}

/// One layer's sizes, checked against its tensors.
struct Layer<'s> {
    source: &'s dyn WeightSource,
    stem: &'s str,
    rows: usize,
    cols: usize,
    bits: u32,
    group: usize,
    num_groups: usize,
}

pub(super) fn open(config: &Value) -> Result<Box<dyn Packing>> {
    let first = Rule { bits: bits("bits", integer(config, "bits")?)?, group: None };
    let first = Rule { group: group_size("group_size", integer(config, "group_size")?)?, ..first };
    if config.get("is_marlin_format").and_then(Value::as_bool) == Some(true) {
        return Err(scheme("is_marlin_format", "is true, but weights in the order of one GPU kernel are not read"));
    }
    if let Some(words) = config.get("pack_dtype").and_then(Value::as_str)
        && words != "int32"
    {
        return Err(scheme("pack_dtype", format!("is \"{}\", but only int32 is read", shown(words))));
    }
    let rules: Vec<Rule> = std::iter::once(Ok(first)).chain(dynamic_rules(config, first)).collect::<Result<_>>()?;
    let act_order = config.get("desc_act").and_then(Value::as_bool).unwrap_or(false);
    Ok(Box::new(Gptq { zero_points: zero_points(config, &rules)?, act_order, rules }))
}

fn zero_points(config: &Value, rules: &[Rule]) -> Result<ZeroPoints> {
    let field = if config.get("checkpoint_format").is_some() { "checkpoint_format" } else { "format" };
    match config.get(field).and_then(Value::as_str) {
        None | Some("gptq") => Ok(ZeroPoints::LessOne),
        Some("gptq_v2") => Ok(ZeroPoints::AsTheyAre),
        // Split into planes of bits, which changes nothing if a word holds whole codes.
        Some("gptq_p") if rules.iter().all(|rule| rule.bits != 3) => Ok(ZeroPoints::AsTheyAre),
        Some(other) => Err(scheme(field, format!("is \"{}\", but only gptq and gptq_v2 are read", shown(other)))),
    }
}

/// Rules of `dynamic` for layers that differ. Skipped layers have no rule: they have no packed
/// tensors.
fn dynamic_rules<'c>(config: &'c Value, first: Rule) -> impl Iterator<Item = Result<Rule>> + use<'c> {
    let entries = config.get("dynamic").and_then(Value::as_object).into_iter().flatten();
    entries.filter(|(pattern, _)| !pattern.starts_with("-:")).map(move |(pattern, entry)| {
        let (bits_field, group_field) = (format!("dynamic.{pattern}.bits"), format!("dynamic.{pattern}.group_size"));
        let number = |key, field: &str| match entry.get(key) {
            None => Ok(None),
            Some(value) => value.as_i64().map(Some).ok_or_else(|| scheme(field, "is not a whole number")),
        };
        let mut rule = first;
        if let Some(found) = number("bits", &bits_field)? {
            rule.bits = bits(&bits_field, found)?;
        }
        if let Some(found) = number("group_size", &group_field)? {
            rule.group = group_size(&group_field, found)?;
        }
        Ok(rule)
    })
}

fn bits(field: &str, found: i64) -> Result<u32> {
    match found {
        2 | 3 | 4 | 8 => Ok(found as u32),
        _ => Err(scheme(field, format!("is {found}, but only 2, 3, 4 and 8 are read"))),
    }
}

impl Packing for Gptq {
    fn holds(&self, source: &dyn WeightSource, stem: &str) -> bool {
        source.contains(&format!("{stem}.qweight"))
    }

    fn matrix<'a>(&self, source: &'a dyn WeightSource, stem: &str, rows: usize, cols: usize) -> Result<Packed<'a>> {
        let layer = self.layer(source, stem, rows, cols)?;
        let scales = scales(source, &layer.name("scales"), layer.num_groups, rows)?;
        let zeros = layer.zeros(self.zero_points)?;
        let in_order = !self.act_order && !source.contains(&layer.name("g_idx"));
        let order = if in_order { None } else { layer.order()? };
        let mut codes = layer.codes(order.as_deref())?;
        // A zero point that all groups share becomes part of the levels, which saves the kernels
        // the minimums.
        let same = zeros.first().copied().filter(|first| zeros.iter().all(|zero| zero == first));
        let (levels, affine) = match (layer.bits, same) {
            (8, Some(128)) => (GroupedLevels::Signed8, false),
            (8, _) => (GroupedLevels::Signed8, true),
            (_, Some(zero)) => (shifted(zero), false),
            _ => (GroupedLevels::UNSIGNED4, true),
        };
        // Unsigned bytes read as signed ones are 128 too low.
        let shift = if layer.bits == 8 { 128 } else { 0 };
        if layer.bits == 8 {
            codes.iter_mut().flatten().for_each(|code| *code ^= 0x80);
        }
        let at = |row: usize| (0..layer.num_groups).map(move |group| group * rows + row);
        let grouped = codes.into_iter().enumerate().map(|(row, codes)| GroupedRow {
            codes: codes.into(),
            scales: at(row).map(|i| scales[i]).collect(),
            minimums: match affine {
                true => at(row).map(|i| scales[i] * f32::from(shift - i16::from(zeros[i]))).collect(),
                false => Vec::new(),
            },
            outliers: Vec::new(),
        });
        let (group, activations) = (layer.group, ActivationScale::Group);
        let form = Grouped { group, levels, activations, order, outliers: None };
        let matrix = Matrix::from_grouped(cols, form, grouped.collect())?;
        let parts: &[&str] =
            if in_order { &["qweight", "qzeros", "scales"] } else { &["qweight", "qzeros", "scales", "g_idx"] };
        Ok(Packed { matrix, tensors: parts.iter().map(|part| layer.name(part)).collect() })
    }
}

/// The levels of codes 0 to 15 with one zero point for all.
fn shifted(zero: u8) -> GroupedLevels {
    GroupedLevels::Nibbles(std::array::from_fn(|code| code as f32 - f32::from(zero)))
}

impl Gptq {
    /// The layer's sizes by the first rule that its tensors fit.
    fn layer<'s>(&self, source: &'s dyn WeightSource, stem: &'s str, rows: usize, cols: usize) -> Result<Layer<'s>> {
        let name = |part: &str| format!("{stem}.{part}");
        let (codes, scales) = (source.require(&name("qweight"))?, source.require(&name("scales"))?);
        let layer = |rule: &Rule| {
            let group = rule.group.unwrap_or(cols).min(cols).max(1);
            Layer { source, stem, rows, cols, bits: rule.bits, group, num_groups: cols.div_ceil(group) }
        };
        let mut layers = self.rules.iter().map(layer);
        let first = layers.next().expect("the configuration's own rule");
        let fits = |layer: &Layer<'_>| codes.shape == layer.codes_shape() && scales.shape == [layer.num_groups, rows];
        let chosen = match fits(&first) {
            true => first,
            false => layers.find(fits).unwrap_or(first),
        };
        if chosen.bits == 3 && !(rows.is_multiple_of(32) && cols.is_multiple_of(32)) {
            let problem = format!("has 3 bits a code, which takes multiples of 32, but is [{rows}, {cols}]");
            return Err(packed(&name("qweight"), problem));
        }
        // If no rule fits, the error names the first one's shape, here or when the scales are read.
        tensor(source, &name("qweight"), &chosen.codes_shape(), &[Format::I32])?;
        Ok(chosen)
    }
}

impl Layer<'_> {
    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.stem)
    }

    fn num_words(&self, codes: usize) -> usize {
        codes.saturating_mul(self.bits as usize).div_ceil(32)
    }

    fn codes_shape(&self) -> [usize; 2] {
        [self.num_words(self.cols), self.rows]
    }

    /// Columns in the order of their groups; `None` if they are in this order already.
    fn order(&self) -> Result<Option<Arc<[u32]>>> {
        let name = self.name("g_idx");
        let wrong = |problem: String| Err(packed(&name, problem));
        let view = tensor(self.source, &name, &[self.cols], &[Format::I32])?;
        let mut members = vec![Vec::new(); self.num_groups];
        for (col, group) in words(&view).map(|word| word as i32).enumerate() {
            match usize::try_from(group).ok().and_then(|group| members.get_mut(group)) {
                Some(members) => members.push(col as u32),
                None => return wrong(format!("puts input {col} into group {group} of {}", self.num_groups)),
            }
        }
        for (group, members) in members.iter().enumerate() {
            let expected = self.group.min(self.cols - group * self.group);
            if members.len() != expected {
                return wrong(format!("gives group {group} {} inputs, but it has {expected}", members.len()));
            }
        }
        let order: Vec<u32> = members.into_iter().flatten().collect();
        Ok(if order.is_sorted() { None } else { Some(order.into()) })
    }

    /// Zero points `[groups, rows]`, with the stored offset undone.
    fn zeros(&self, stored: ZeroPoints) -> Result<Vec<u8>> {
        let name = self.name("qzeros");
        let row_words = self.num_words(self.rows);
        let view = tensor(self.source, &name, &[self.num_groups, row_words], &[Format::I32])?;
        let mut zeros = Vec::with_capacity(self.num_groups * self.rows);
        let all: Vec<u32> = words(&view).collect();
        for packed in all.chunks(row_words.max(1)) {
            let before = zeros.len();
            let mut keep = |zero| {
                if zeros.len() - before < self.rows {
                    zeros.push(zero);
                }
            };
            // The offset of one is added in the way it was subtracted: from whole words, in which a
            // zero point of 0 borrowed from the next one, or from each code alone if codes lie
            // across words.
            match (stored, self.bits) {
                (ZeroPoints::AsTheyAre, bits) => unpack(packed.iter().copied(), bits, keep),
                (ZeroPoints::LessOne, 3) => unpack(packed.iter().copied(), 3, |zero| keep((zero + 1) & 7)),
                (ZeroPoints::LessOne, bits) => {
                    let ones = u32::MAX / ((1 << bits) - 1);
                    unpack(packed.iter().map(|word| word.wrapping_add(ones)), bits, keep);
                }
            }
        }
        Ok(zeros)
    }

    /// Codes of every output, one per byte, in the given order of columns.
    fn codes(&self, order: Option<&[u32]>) -> Result<Vec<Vec<u8>>> {
        let view = tensor(self.source, &self.name("qweight"), &self.codes_shape(), &[Format::I32])?;
        let (words, _) = view.bytes.as_chunks::<4>();
        let mut rows = Vec::with_capacity(self.rows);
        let mut columns: [Vec<u32>; ROWS_AT_ONCE] = Default::default();
        for first in (0..self.rows).step_by(ROWS_AT_ONCE) {
            let count = ROWS_AT_ONCE.min(self.rows - first);
            columns.iter_mut().for_each(Vec::clear);
            for line in words.chunks_exact(self.rows) {
                for (column, word) in columns.iter_mut().zip(&line[first..first + count]) {
                    column.push(u32::from_le_bytes(*word));
                }
            }
            for column in &columns[..count] {
                let mut codes = Vec::with_capacity(column.len() * 32 / self.bits as usize);
                unpack(column.iter().copied(), self.bits, |code| codes.push(code));
                codes.truncate(self.cols);
                rows.push(match order {
                    None => codes,
                    Some(order) => order.iter().map(|col| codes[*col as usize]).collect(),
                });
            }
        }
        Ok(rows)
    }
}
