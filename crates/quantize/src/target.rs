//! The targets of a linear's weights: the kinds of codes, the number of values that share a scale,
//! and the storage of scales.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// The coding of one matrix. In all of them `value = scale * level(code)`, less a zero point if
/// there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Codes of 4 or 8 bits; `group` neighbours along a row share a scale, or the whole row does.
    Int { bits: u8, group: Option<usize>, zero_points: bool },
    /// E4M3: one scale per row, or one per block of 128 x 128.
    Fp8 { block: bool },
    /// E2M1 in groups of 32 with a power of two as scale.
    Mxfp4,
    /// E2M1 in groups of 16 with an E4M3 scale, and one f32 scale per matrix.
    Nvfp4,
    /// The 16 levels of a normal distribution, in groups of 64.
    Nf4,
    /// 8 bits per row; columns that meet large activations are stored in bf16.
    LlmInt8,
}

/// Edge length of a square block of fp8 weights with one scale.
pub const FP8_BLOCK: usize = 128;

/// Storage of scales, to which they are rounded before codes are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleKind {
    Bf16,
    F32,
    /// Scales are powers of two.
    E8m0,
    /// E4M3 beside an f32 divisor of the whole matrix.
    E4m3,
}

const NAMED: [(&str, Target); 10] = [
    ("int8", Target::Int { bits: 8, group: Some(128), zero_points: false }),
    ("int8-channel", Target::Int { bits: 8, group: None, zero_points: false }),
    ("int4-g128", Target::Int { bits: 4, group: Some(128), zero_points: false }),
    ("int4-g32", Target::Int { bits: 4, group: Some(32), zero_points: false }),
    ("fp8", Target::Fp8 { block: false }),
    ("fp8-block", Target::Fp8 { block: true }),
    ("mxfp4", Target::Mxfp4),
    ("nvfp4", Target::Nvfp4),
    ("nf4", Target::Nf4),
    ("llm-int8", Target::LlmInt8),
];

impl Target {
    /// Values along a row that share a scale, given the row's length. The last group of a row may
    /// be short.
    pub fn group(self, cols: usize) -> usize {
        let group = match self {
            Target::Int { group, .. } => group.unwrap_or(cols),
            Target::Fp8 { block: true } => FP8_BLOCK,
            Target::Fp8 { block: false } | Target::LlmInt8 => cols,
            Target::Mxfp4 => 32,
            Target::Nvfp4 => 16,
            Target::Nf4 => 64,
        };
        group.clamp(1, cols.max(1))
    }

    /// Rows that share a scale.
    pub fn rows_per_scale(self) -> usize {
        if self == (Target::Fp8 { block: true }) { FP8_BLOCK } else { 1 }
    }

    /// Bits of a code.
    pub fn bits(self) -> u8 {
        match self {
            Target::Int { bits, .. } => bits,
            Target::Fp8 { .. } | Target::LlmInt8 => 8,
            Target::Mxfp4 | Target::Nvfp4 | Target::Nf4 => 4,
        }
    }

    pub fn zero_points(self) -> bool {
        matches!(self, Target::Int { zero_points: true, .. })
    }

    pub fn scale_kind(self) -> ScaleKind {
        match self {
            Target::Int { .. } | Target::Fp8 { .. } => ScaleKind::Bf16,
            Target::Nf4 | Target::LlmInt8 => ScaleKind::F32,
            Target::Mxfp4 => ScaleKind::E8m0,
            Target::Nvfp4 => ScaleKind::E4m3,
        }
    }

    /// Whether a row of this length can be quantized: writers and other loaders need whole groups.
    pub(crate) fn check(self, name: &str, cols: usize) -> Result<()> {
        let group = self.group(usize::MAX);
        if group == usize::MAX || self == (Target::Fp8 { block: true }) || cols.is_multiple_of(group) {
            return Ok(());
        }
        Err(Error::GroupSize { target: self.to_string(), group, name: name.to_owned(), cols })
    }
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = NAMED.iter().find(|(name, _)| *name == text).map(|(_, target)| *target);
        found.ok_or_else(|| Error::UnknownTarget {
            found: text.to_owned(),
            expected: NAMED.map(|(name, _)| name).join(", "),
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((name, _)) = NAMED.iter().find(|(_, target)| target == self) {
            return f.pad(name);
        }
        match self {
            Target::Int { bits, group, zero_points } => {
                write!(f, "int{bits}")?;
                match group {
                    Some(group) => write!(f, "-g{group}")?,
                    None => f.write_str("-channel")?,
                }
                f.write_str(if *zero_points { "-zp" } else { "" })
            }
            other => write!(f, "{other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for (name, target) in NAMED {
            assert_eq!(name.parse::<Target>().unwrap(), target);
            assert_eq!(target.to_string(), name);
        }
        assert!("int3".parse::<Target>().unwrap_err().to_string().contains("int4-g128"));
        let odd = Target::Int { bits: 4, group: Some(64), zero_points: true };
        assert_eq!(odd.to_string(), "int4-g64-zp");
    }

    #[test]
    fn rows_must_be_whole_groups() {
        let int4: Target = "int4-g128".parse().unwrap();
        assert!(int4.check("w", 256).is_ok());
        assert!(matches!(int4.check("w", 200), Err(Error::GroupSize { group: 128, cols: 200, .. })));
        assert!(Target::Fp8 { block: true }.check("w", 200).is_ok());
        assert!(Target::LlmInt8.check("w", 7).is_ok());
    }
}
