//! bitsandbytes: eight-bit rows with the largest magnitude of each, and four-bit blocks of normal
//! or small floats.
//!
//! Eight bits: `weight [outputs, inputs]` of signed bytes and `SCB [outputs]`; a value is
//! `byte * SCB / 127`. bitsandbytes decides at run time which inputs are outliers, so its files do
//! not name them. Folio's files do: `outlier_columns [n]` and `outlier_values [outputs, n]` are the
//! columns in bf16, and the codes there are ignored.
//!
//! Four bits: `weight` is the flattened tensor, two codes per byte with the first one high, in
//! blocks of `blocksize` that ignore row boundaries. `weight.absmax` has a block's scale or,
//! quantized twice, a code for it, which `weight.nested_*` decodes. Facts that are not tensors are
//! JSON in `weight.quant_state.bitsandbytes__nf4` (or `fp4`).

use half::bf16;
use serde::Deserialize;
use serde_json::Value;

use super::{Packed, Packing, packed, scheme, tensor};
use crate::error::shown;
use crate::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix, Result, WeightSource};

/// The package's table of codes, as f32: quantiles of a normal distribution, scaled to -1 to 1.
#[allow(clippy::excessive_precision)]
const NF4: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];
/// Its four-bit floats: a sign, then twelfths of 1/16, 8, 12, 4, 6, 2 and 3.
const FP4: [f32; 16] = {
    let twelfths = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];
    let mut table = [0.0; 16];
    let mut code = 1;
    while code < 8 {
        table[code] = twelfths[code] / 12.0;
        table[code + 8] = -twelfths[code] / 12.0;
        code += 1;
    }
    table
};
/// Versions of the package differ in the last digits of the table that they store and never read.
const TABLE_TOLERANCE: f32 = 1e-3;
/// The JSON is about 150 bytes long.
const LONGEST_STATE: usize = 4096;
const LONGEST_BLOCK: usize = 4096;

#[derive(Debug)]
struct BitsAndBytes {
    bits: u32,
}

/// Contents of the JSON.
#[derive(Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_dtype: Option<String>,
    nested_offset: Option<f64>,
}

pub(super) fn open(config: &Value) -> Result<Box<dyn Packing>> {
    let set = |field: &str| {
        [field, &format!("_{field}")].into_iter().any(|field| config.get(field) == Some(&Value::Bool(true)))
    };
    match (set("load_in_4bit"), set("load_in_8bit")) {
        (true, false) => Ok(Box::new(BitsAndBytes { bits: 4 })),
        (false, true) => Ok(Box::new(BitsAndBytes { bits: 8 })),
        _ => Err(scheme("load_in_4bit", "or load_in_8bit must be true, and not both")),
    }
}

impl Packing for BitsAndBytes {
    fn holds(&self, source: &dyn WeightSource, stem: &str) -> bool {
        match self.bits {
            8 => source.contains(&format!("{stem}.SCB")),
            _ => source.contains(&format!("{stem}.weight.absmax")),
        }
    }

    fn matrix<'a>(&self, source: &'a dyn WeightSource, stem: &str, rows: usize, cols: usize) -> Result<Packed<'a>> {
        match self.bits {
            8 => eight_bit(source, stem, rows, cols),
            _ => four_bit(source, stem, rows, cols),
        }
    }
}

fn eight_bit<'a>(source: &'a dyn WeightSource, stem: &str, rows: usize, cols: usize) -> Result<Packed<'a>> {
    let [codes_name, largest_name, order_name] =
        ["weight", "SCB", "weight_format"].map(|part| format!("{stem}.{part}"));
    let mut tensors = vec![codes_name.clone(), largest_name.clone()];
    if source.contains(&order_name) {
        let order = source.require(&order_name)?;
        if order.bytes != [0] {
            return Err(packed(&order_name, format!("is {:?}, but only 0, plain rows, is read", order.bytes.first())));
        }
        tensors.push(order_name);
    }
    let codes = tensor(source, &codes_name, &[rows, cols], &[Format::I8])?;
    let largest = finite(source, &largest_name, &[rows])?;
    let row = |(codes, largest): (&'a [u8], &f32)| GroupedRow {
        codes: codes.into(),
        scales: vec![*largest],
        ..GroupedRow::default()
    };
    let mut grouped: Vec<GroupedRow<'a>> = codes.bytes.chunks_exact(cols.max(1)).zip(&largest).map(row).collect();
    let mut form = form(cols, GroupedLevels::Of127);
    if let Some(columns) = outlier_columns(source, stem, cols)? {
        let values_name = format!("{stem}.outlier_values");
        let values = tensor(source, &values_name, &[rows, columns.len()], &[Format::BF16])?;
        for (row, values) in grouped.iter_mut().zip(values.bytes.chunks_exact(2 * columns.len().max(1))) {
            let codes = row.codes.to_mut();
            columns.iter().for_each(|column| codes[*column as usize] = 0);
            row.outliers = values.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes)).collect();
        }
        tensors.extend([format!("{stem}.outlier_columns"), values_name]);
        (form.outliers, form.activations) = (Some(columns.into()), ActivationScale::Row);
    }
    let matrix = Matrix::from_grouped(cols, form, grouped)?;
    Ok(Packed { matrix, tensors })
}

/// The columns with values beside the codes, if the file has them.
fn outlier_columns(source: &dyn WeightSource, stem: &str, cols: usize) -> Result<Option<Vec<u32>>> {
    let name = format!("{stem}.outlier_columns");
    if !source.contains(&name) {
        return Ok(None);
    }
    let count = source.require(&name)?.shape.first().copied().unwrap_or(0);
    let view = tensor(source, &name, &[count], &[Format::I32])?;
    let columns: Vec<i32> = view.bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
    let columns = columns.into_iter().map(|column| u32::try_from(column).ok().filter(|at| (*at as usize) < cols));
    let columns: Option<Vec<u32>> = columns.collect();
    columns.map(Some).ok_or_else(|| packed(&name, format!("names a column that is not one of the {cols}")))
}

fn form(group: usize, levels: GroupedLevels) -> Grouped {
    Grouped { group: group.max(1), levels, activations: ActivationScale::Group, order: None, outliers: None }
}

/// The values of a f32 tensor, all of them finite.
fn finite(source: &dyn WeightSource, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    let values = tensor(source, name, shape, &[Format::F32])?.to_f32()?;
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => Err(packed(name, format!("is {} at {at}", values[at]))),
    }
}

fn four_bit<'a>(source: &'a dyn WeightSource, stem: &str, rows: usize, cols: usize) -> Result<Packed<'a>> {
    let name = format!("{stem}.weight");
    let mut tensors = vec![name.clone()];
    let state = State::read(source, &name, &mut tensors)?;
    if state.shape != [rows, cols] {
        return Err(packed(&name, format!("is [{rows}, {cols}], but its quant_state says {:?}", state.shape)));
    }
    let levels = state.levels(source, &name, &mut tensors)?;
    let codes = source.require(&name)?;
    // Some tools write the bytes under another dtype, for sharded training.
    let values = rows.saturating_mul(cols);
    if codes.bytes.len() != values.div_ceil(2) {
        let (needed, found) = (values.div_ceil(2), codes.bytes.len());
        return Err(packed(&name, format!("has {found} bytes, but [{rows}, {cols}] of four bits needs {needed}")));
    }
    let absmax = state.absmax(source, &name, values.div_ceil(state.blocksize), &mut tensors)?;
    // Blocks run across rows; a group is the longest run that is inside one row and one block
    // wherever a row begins.
    let group = common_divisor(cols, state.blocksize);
    let code = |at: usize| match codes.bytes[at / 2] {
        byte if at.is_multiple_of(2) => byte >> 4,
        byte => byte & 15,
    };
    let row = |row: usize| {
        let first = row * cols;
        let scales = (first..first + cols).step_by(group).map(|at| absmax[at / state.blocksize]);
        let codes: Vec<u8> = (first..first + cols).map(code).collect();
        GroupedRow { codes: codes.into(), scales: scales.collect(), ..GroupedRow::default() }
    };
    let matrix = Matrix::from_grouped(cols, form(group, levels), (0..rows).map(row).collect())?;
    Ok(Packed { matrix, tensors })
}

fn common_divisor(mut a: usize, mut b: usize) -> usize {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

impl State {
    fn read(source: &dyn WeightSource, weight: &str, tensors: &mut Vec<String>) -> Result<Self> {
        let names = ["nf4", "fp4"].map(|kind| format!("{weight}.quant_state.bitsandbytes__{kind}"));
        let name = names.iter().find(|name| source.contains(name)).unwrap_or(&names[0]);
        let view = source.require(name)?;
        let wrong = |problem: String| packed(name, problem);
        if view.format != Format::U8 || view.bytes.len() > LONGEST_STATE {
            let problem = format!(
                "is {} bytes of {}, but JSON in U8, {LONGEST_STATE} at most, is needed",
                view.bytes.len(),
                view.format
            );
            return Err(wrong(problem));
        }
        let state: Self =
            serde_json::from_slice(view.bytes).map_err(|problem| wrong(format!("is not as expected: {problem}")))?;
        if !name.ends_with(&format!("__{}", state.quant_type)) {
            return Err(wrong(format!("says quant_type \"{}\"", shown(&state.quant_type))));
        }
        let block = state.blocksize;
        if !block.is_power_of_two() || block > LONGEST_BLOCK {
            return Err(wrong(format!("says blocksize {block}, but a power of two up to {LONGEST_BLOCK} is needed")));
        }
        tensors.push(name.clone());
        Ok(state)
    }

    /// The table of codes, after a check that the file's table equals it.
    fn levels(&self, source: &dyn WeightSource, weight: &str, tensors: &mut Vec<String>) -> Result<GroupedLevels> {
        let name = format!("{weight}.quant_map");
        let table = if self.quant_type == "nf4" { NF4 } else { FP4 };
        let stored = finite(source, &name, &[16])?;
        if let Some(code) = (0..16).find(|code| (stored[*code] - table[*code]).abs() > TABLE_TOLERANCE) {
            let (found, kind) = (stored[code], &self.quant_type);
            return Err(packed(&name, format!("has {found} for code {code}, but {kind} has {}", table[code])));
        }
        tensors.push(name);
        Ok(GroupedLevels::Nibbles(table))
    }

    /// The scale of every block.
    fn absmax(
        &self,
        source: &dyn WeightSource,
        weight: &str,
        num_blocks: usize,
        tensors: &mut Vec<String>,
    ) -> Result<Vec<f32>> {
        let [name, nested_name, map_name] =
            ["absmax", "nested_absmax", "nested_quant_map"].map(|part| format!("{weight}.{part}"));
        tensors.push(name.clone());
        let Some(nested_block) = self.nested_blocksize else { return finite(source, &name, &[num_blocks]) };
        let codes = tensor(source, &name, &[num_blocks], &[Format::U8])?;
        let wrong = |problem: String| Err(packed(weight, format!("has a quant_state with {problem}")));
        if nested_block == 0 {
            return wrong("a nested_blocksize of 0".into());
        }
        if let Some(dtype) = self.nested_dtype.as_deref().filter(|dtype| *dtype != "float32") {
            return wrong(format!("nested_dtype \"{}\", but only float32 is read", shown(dtype)));
        }
        let offset = self.nested_offset.unwrap_or(f64::NAN) as f32;
        if !offset.is_finite() {
            return wrong("a nested_offset that is missing or no finite number".into());
        }
        let nested = finite(source, &nested_name, &[num_blocks.div_ceil(nested_block)])?;
        let map = finite(source, &map_name, &[256])?;
        tensors.extend([nested_name, map_name]);
        let scale = |(at, code): (usize, &u8)| map[usize::from(*code)] * nested[at / nested_block] + offset;
        Ok(codes.bytes.iter().enumerate().map(scale).collect())
    }
}
