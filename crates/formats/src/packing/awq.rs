//! AWQ in the checkpoint layout of its GEMM kernels: codes and zero points packed along the
//! outputs, eight per word.
//!
//! `qweight [inputs, outputs / 8]` and `qzeros [groups, outputs / 8]` hold 32-bit words of four-bit
//! codes: the nibbles are outputs 0 2 4 6 1 3 5 7 from the lowest up; `scales` is
//! `[groups, outputs]`. A layer that was not converted has a plain weight. The layouts of the GEMV
//! kernels, recognized by `version`, are refused.

use serde_json::Value;

use super::words::{group_size, integer, scales, words};
use super::{Packed, Packing, packed, scheme, tensor};
use crate::error::shown;
use crate::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix, Result, WeightSource};

const BITS: u32 = 4;
/// Outputs in a word.
const WIDTH: usize = 8;
/// The nibble of a word that holds output 0, 1, 2 ...
const NIBBLES: [u32; WIDTH] = [0, 4, 1, 5, 2, 6, 3, 7];

#[derive(Debug)]
struct Awq {
    /// Inputs in a group; `None` for all of them.
    group: Option<usize>,
}

pub(super) fn open(config: &Value) -> Result<Box<dyn Packing>> {
    // The names that AutoAWQ's own files use come second.
    let named =
        |names: [&'static str; 2]| names.into_iter().find(|name| config.get(name).is_some()).unwrap_or(names[0]);
    let (bits, size) = (named(["bits", "w_bit"]), named(["group_size", "q_group_size"]));
    let found = integer(config, bits)?;
    if found != i64::from(BITS) {
        return Err(scheme(bits, format!("is {found}, but AWQ is read with {BITS} bits alone")));
    }
    let version = ["version", "checkpoint_format", "format"].into_iter().find(|field| config.get(field).is_some());
    if let Some(field) = version {
        let found = config.get(field).and_then(Value::as_str).unwrap_or_default().to_ascii_lowercase();
        // "exllama" names a kernel that reads the same files.
        if !["gemm", "exllama"].contains(&found.as_str()) {
            return Err(scheme(
                field,
                format!("is \"{}\", but AWQ weights are read in gemm packing alone", shown(&found)),
            ));
        }
    }
    Ok(Box::new(Awq { group: group_size(size, integer(config, size)?)? }))
}

impl Packing for Awq {
    fn holds(&self, source: &dyn WeightSource, stem: &str) -> bool {
        source.contains(&format!("{stem}.qweight"))
    }

    fn matrix<'a>(&self, source: &'a dyn WeightSource, stem: &str, rows: usize, cols: usize) -> Result<Packed<'a>> {
        let [codes_name, zeros_name, scales_name] =
            ["qweight", "qzeros", "scales"].map(|part| format!("{stem}.{part}"));
        let group = self.group.unwrap_or(cols).max(1);
        if !rows.is_multiple_of(WIDTH) || !cols.is_multiple_of(group) {
            let problem = format!(
                "is packed in words of {WIDTH} outputs and groups of {group} inputs, which [{rows}, {cols}] is no \
                 multiple of"
            );
            return Err(packed(&codes_name, problem));
        }
        let num_groups = cols / group;
        let words_shape = |height| [height, rows / WIDTH];
        let codes = tensor(source, &codes_name, &words_shape(cols), &[Format::I32])?;
        let zeros = tensor(source, &zeros_name, &words_shape(num_groups), &[Format::I32])?;
        let scales = scales(source, &scales_name, num_groups, rows)?;
        let zeros: Vec<u32> = words(&zeros).collect();
        let (words, _) = codes.bytes.as_chunks::<4>();
        let mut grouped = Vec::with_capacity(rows);
        for at in 0..rows / WIDTH {
            let mut eight: [GroupedRow<'a>; WIDTH] = Default::default();
            let column: Vec<u32> =
                words.iter().skip(at).step_by(rows / WIDTH).map(|w| u32::from_le_bytes(*w)).collect();
            for (output, row) in eight.iter_mut().enumerate() {
                let shift = NIBBLES[output] * BITS;
                row.codes = column.iter().map(|word| (word >> shift & 15) as u8).collect();
                row.scales = (0..num_groups).map(|group| scales[group * rows + at * WIDTH + output]).collect();
                let zero = |group| (zeros[group * (rows / WIDTH) + at] >> shift & 15) as u8;
                row.minimums = row.scales.iter().enumerate().map(|(g, scale)| -scale * f32::from(zero(g))).collect();
            }
            grouped.extend(eight);
        }
        let (levels, activations) = (GroupedLevels::UNSIGNED4, ActivationScale::Group);
        let form = Grouped { group, levels, activations, order: None, outliers: None };
        let matrix = Matrix::from_grouped(cols, form, grouped)?;
        Ok(Packed { matrix, tensors: vec![codes_name, zeros_name, scales_name] })
    }
}
