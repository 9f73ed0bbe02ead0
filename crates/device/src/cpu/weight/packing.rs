//! How values lie in a panel: what a step of the inner dimension is, and how many bytes it takes.

use folio_formats::{Coding, Format, Levels, Part};

use super::LANES;
use crate::{Error, Result};

/// How the values of a panel lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    F32,
    F16,
    BF16,
    /// Codes, with a scale (and a minimum) a group, and one factor an output.
    Coded(Coding),
}

impl Packing {
    /// What becomes of a part of a matrix.
    pub fn for_part(part: &Part<'_>) -> Result<Self> {
        if let Some(coding) = part.coding() {
            let group = coding.group;
            assert!(Coding::GROUPS.contains(&group), "groups of {group} values");
            return Ok(Packing::Coded(coding));
        }
        match part.format() {
            Some(Format::F32) => Ok(Packing::F32),
            Some(Format::F16) => Ok(Packing::F16),
            Some(format @ (Format::I8 | Format::U8 | Format::I16 | Format::I32 | Format::I64 | Format::F64)) => {
                Err(Error::UnsupportedFormat { backend: "cpu", format })
            }
            _ => Ok(Packing::BF16),
        }
    }

    /// Inner values in a step.
    pub fn step_values(&self) -> usize {
        match self {
            Packing::F32 | Packing::F16 => 1,
            Packing::BF16 => 2,
            Packing::Coded(coding) => coding.group,
        }
    }

    /// Bytes of a step, all lanes.
    pub fn step_bytes(&self) -> usize {
        match self {
            Packing::F32 | Packing::BF16 => 4 * LANES,
            Packing::F16 => 2 * LANES,
            Packing::Coded(coding) => code_bytes(coding) + number_bytes(coding),
        }
    }

    /// Bytes of a panel of so many inner values.
    pub fn panel_bytes(&self, inputs: usize) -> usize {
        inputs.div_ceil(self.step_values()).saturating_mul(self.step_bytes())
    }

    pub fn has_factors(&self) -> bool {
        matches!(self, Packing::Coded(_))
    }
}

/// Bytes of a group's codes.
pub fn code_bytes(coding: &Coding) -> usize {
    let bits = match coding.levels {
        Levels::Nibbles(_) => 4,
        Levels::Five { .. } => 5,
        Levels::Six { .. } => 6,
        Levels::Bytes => 8,
    };
    coding.group * LANES * bits / 8
}

/// Bytes of what follows them: scales, and minimums if there are any, as f16.
fn number_bytes(coding: &Coding) -> usize {
    if coding.affine { 4 * LANES } else { 2 * LANES }
}
