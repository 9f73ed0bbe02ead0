//! Arrangement of values in a panel: the content of a step of the inner dimension, and its size in
//! bytes.

use folio_formats::{Coding, Format, Levels, Numbers, Part};

use super::LANES;
use crate::{Error, Result};

/// The arrangement of a panel's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    F32,
    F16,
    BF16,
    /// Codes, with a scale (and a minimum) per group, or multiples and their units, and one factor
    /// per output.
    Coded(Coding),
}

impl Packing {
    /// The packing of a part of a matrix.
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
            Packing::Coded(coding) => coding.group * step_groups(coding),
        }
    }

    /// Bytes of a step, all lanes.
    pub fn step_bytes(&self) -> usize {
        match self {
            Packing::F32 | Packing::BF16 => 4 * LANES,
            Packing::F16 => 2 * LANES,
            Packing::Coded(coding) => number_bytes(coding) + step_groups(coding) * code_bytes(coding),
        }
    }

    /// Bytes of a panel with this number of inner values.
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

/// Groups in a step.
pub fn step_groups(coding: &Coding) -> usize {
    match coding.numbers {
        Numbers::Own => 1,
        Numbers::Multiples => Coding::BLOCK / coding.group,
    }
}

/// Offsets of a group's data in its step.
#[derive(Clone, Copy)]
pub struct GroupPlace {
    pub codes: usize,
    /// Offset of scales, as f16 or as multiples.
    pub scales: usize,
    pub minimums: usize,
}

impl GroupPlace {
    /// A group's own scale and minimum stand behind its codes. Multiples fill a cache line in front
    /// of the codes of one group, or of two that have no minimums, so that a step is read from
    /// front to back.
    pub fn of(coding: &Coding, group: usize) -> Self {
        let codes = code_bytes(coding);
        match coding.numbers {
            Numbers::Own => Self { codes: 0, scales: codes, minimums: codes + 2 * LANES },
            Numbers::Multiples => {
                let (share, lines) =
                    (LINE_BYTES / (numbers(coding) * LANES), group * numbers(coding) * LANES / LINE_BYTES);
                let line = unit_bytes(coding) + lines * (LINE_BYTES + share * codes);
                let scales = line + group % share * numbers(coding) * LANES;
                Self { codes: line + LINE_BYTES + group % share * codes, scales, minimums: scales + LANES }
            }
        }
    }
}

/// Bytes of multiples that are read at a time.
pub const LINE_BYTES: usize = 64;

/// Bytes in front of a step: the units of its scales, and of its minimums if it has them, as f16.
pub fn unit_bytes(coding: &Coding) -> usize {
    match coding.numbers {
        Numbers::Own => 0,
        Numbers::Multiples => numbers(coding) * 2 * LANES,
    }
}

/// Bytes of all scales and minimums of a step.
fn number_bytes(coding: &Coding) -> usize {
    match coding.numbers {
        Numbers::Own => numbers(coding) * 2 * LANES,
        Numbers::Multiples => {
            unit_bytes(coding) + (step_groups(coding) * numbers(coding) * LANES).next_multiple_of(LINE_BYTES)
        }
    }
}

/// 1 for a scale, 2 for a scale and a minimum.
fn numbers(coding: &Coding) -> usize {
    if coding.affine { 2 } else { 1 }
}
