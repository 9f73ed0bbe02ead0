//! Every storage format, as one table row: block length, block bytes, decoder.

use std::fmt;

use crate::quant::{float8, iq4, k, mxfp4, plain, simple};
use crate::{ActivationScale, Coding, Error, Levels, Numbers, Result, Units};

/// Storage formats of a file. `decode` is the reference: plain loops, bit-equal to the `gguf`
/// package's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum Format {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    /// Plain integers: index and flag tensors, and checkpoint packings that a later stage unpacks.
    I8,
    U8,
    I16,
    I32,
    I64,
    F64,
    /// Eight-bit floats: weights with scales beside them, and (E8M0, powers of two) those scales.
    F8_E4M3,
    F8_E5M2,
    F8_E8M0,
}

/// One line of the table. A new format is one more line and its decoder.
struct Row {
    format: Format,
    name: &'static str,
    block_len: usize,
    block_bytes: usize,
    /// The type number in a GGUF file, if GGUF has the format.
    gguf: Option<u32>,
    read: Read,
}

/// Decoder of whole blocks; the lengths have been checked.
#[derive(Clone, Copy)]
enum Read {
    /// Each value by itself.
    Values(fn(&[u8], &mut [f32])),
    /// Unpacks one block into codes, scales and minimums.
    Codes(Coding, Unpack<()>),
    /// Unpacks one block into codes and multiples of the returned units.
    Multiples(Coding, Unpack<Units>),
}

type Unpack<T> = fn(&[u8], &mut [u8], &mut [f32], &mut [f32]) -> T;

/// Groups with a scale alone.
const fn scaled(group: usize, levels: Levels) -> Coding {
    Coding { group, levels, affine: false, numbers: Numbers::Own, activations: ActivationScale::Group }
}

/// Groups with a scale and a minimum; codes are levels from zero up.
const fn affine(group: usize, levels: Levels) -> Coding {
    Coding { affine: true, ..scaled(group, levels) }
}

/// A coding with scales and minimums as multiples.
const fn by_units(coding: Coding) -> Coding {
    Coding { numbers: Numbers::Multiples, ..coding }
}

const FROM_ZERO: Levels = Levels::nibbles_from(0);
const FIVE: Levels = Levels::Five { zero: 0 };

macro_rules! table {
    ($($format:ident, $len:expr, $bytes:expr, $gguf:expr, $read:expr;)*) => {
        impl Format {
            /// Every format, in the order of the table.
            pub const ALL: &'static [Format] = &[$(Format::$format),*];
        }
        const ROWS: &[Row] = &[$(Row {
            format: Format::$format,
            name: stringify!($format),
            block_len: $len,
            block_bytes: $bytes,
            gguf: $gguf,
            read: $read,
        }),*];
    };
}

use Read::{Codes, Multiples, Values};

table! {
    F32,    1,   4,                   Some(0),  Values(plain::f32);
    F16,    1,   2,                   Some(1),  Values(plain::f16);
    BF16,   1,   2,                   Some(30), Values(plain::bf16);
    Q4_0,   32,  simple::Q4_0_BYTES,  Some(2),  Codes(scaled(32, Levels::nibbles_from(-8)), simple::q4_0);
    Q4_1,   32,  simple::Q4_1_BYTES,  Some(3),  Codes(affine(32, FROM_ZERO), simple::q4_1);
    Q5_0,   32,  simple::Q5_0_BYTES,  Some(6),  Codes(scaled(32, Levels::Five { zero: 16 }), simple::q5_0);
    Q5_1,   32,  simple::Q5_1_BYTES,  Some(7),  Codes(affine(32, FIVE), simple::q5_1);
    Q8_0,   32,  simple::Q8_0_BYTES,  Some(8),  Codes(scaled(32, Levels::Bytes), simple::q8_0);
    Q2_K,   256, k::Q2_K_BYTES,       Some(10), Multiples(by_units(affine(16, FROM_ZERO)), k::q2_k);
    Q3_K,   256, k::Q3_K_BYTES,       Some(11), Multiples(by_units(scaled(16, Levels::nibbles_from(-4))), k::q3_k);
    Q4_K,   256, k::Q4_K_BYTES,       Some(12), Multiples(by_units(affine(32, FROM_ZERO)), k::q4_k);
    Q5_K,   256, k::Q5_K_BYTES,       Some(13), Multiples(by_units(affine(32, FIVE)), k::q5_k);
    Q6_K,   256, k::Q6_K_BYTES,       Some(14), Multiples(by_units(scaled(16, Levels::Six { zero: 32 })), k::q6_k);
    IQ4_NL, 32,  iq4::IQ4_NL_BYTES,   Some(20), Codes(scaled(32, iq4::LEVELS), iq4::iq4_nl);
    IQ4_XS, 256, iq4::IQ4_XS_BYTES,   Some(23), Multiples(by_units(scaled(32, iq4::LEVELS)), iq4::iq4_xs);
    MXFP4,  32,  mxfp4::MXFP4_BYTES,  Some(39), Codes(scaled(32, mxfp4::DOUBLED), mxfp4::mxfp4);
    I8,     1,   1,                   Some(24), Values(plain::i8);
    U8,     1,   1,                   None,     Values(plain::u8);
    I16,    1,   2,                   Some(25), Values(plain::i16);
    I32,    1,   4,                   Some(26), Values(plain::i32);
    I64,    1,   8,                   Some(27), Values(plain::i64);
    F64,    1,   8,                   Some(28), Values(plain::f64);
    F8_E4M3, 1,  1,                   None,     Values(float8::f8_e4m3);
    F8_E5M2, 1,  1,                   None,     Values(float8::f8_e5m2);
    F8_E8M0, 1,  1,                   None,     Values(float8::f8_e8m0);
}

impl Format {
    fn row(self) -> &'static Row {
        let row = &ROWS[self as usize];
        debug_assert_eq!(row.format, self);
        row
    }

    /// The name that GGUF tools print: `F32`, `Q5_0`, `Q4_K`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Values in a block. A row of a matrix is a whole number of blocks.
    pub fn block_len(self) -> usize {
        self.row().block_len
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.row().block_bytes
    }

    /// True for the formats that pack several values into a block.
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// The number of bytes of `values` values; an error if they are not whole blocks.
    pub fn bytes_for(self, values: u64) -> Result<u64> {
        let block = self.block_len() as u64;
        if !values.is_multiple_of(block) {
            return Err(Error::PartialBlock { format: self, block: self.block_len(), values });
        }
        (values / block).checked_mul(self.block_bytes() as u64).ok_or(Error::TooManyValues { format: self, values })
    }

    /// Decodes `bytes` into exactly `out.len()` values.
    ///
    /// Panics if the lengths do not match: a view's bytes were checked when its file was opened.
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        self.check(bytes, out.len());
        match self.row().read {
            Values(decode) => decode(bytes, out),
            Codes(coding, _) | Multiples(coding, _) => {
                let mut block = Unpacked::new();
                for (bytes, out) in bytes.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(self.block_len())) {
                    let groups = if coding.affine { out.len() / coding.group } else { 0 };
                    let Unpacked { codes, scales, minimums } = &mut block;
                    let (scales, minimums) = (&mut scales[..out.len() / coding.group], &mut minimums[..groups]);
                    self.read_codes(bytes, &mut codes[..out.len()], scales, minimums);
                    block.values(&coding, out);
                }
            }
        }
    }

    /// The integer form of a row; `None` for formats with one number per value.
    pub fn coding(self) -> Option<Coding> {
        match self.row().read {
            Codes(coding, _) | Multiples(coding, _) => Some(coding),
            Values(_) => None,
        }
    }

    /// Reads one code per value, and the groups' scales and minimums (unchanged if the format has
    /// none).
    ///
    /// Panics for formats without a [`Format::coding`] and if the lengths do not match.
    pub fn read_codes(self, bytes: &[u8], codes: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
        match self.row().read {
            Codes(_, unpack) => self.read_blocks(bytes, codes, scales, minimums, unpack),
            Multiples(_, unpack) => {
                self.read_blocks(bytes, codes, scales, minimums, |bytes, codes, scales, minimums| {
                    let units = unpack(bytes, codes, scales, minimums);
                    scales.iter_mut().for_each(|scale| *scale *= units.scale);
                    minimums.iter_mut().for_each(|minimum| *minimum *= units.minimum);
                })
            }
            Values(_) => panic!("{self} has no codes"),
        }
    }

    /// Reads codes of formats with [`Numbers::Multiples`]: scales and minimums are multiples, and
    /// `units` has one entry per super-block.
    ///
    /// Panics for other formats and if the lengths do not match.
    pub fn read_multiples(
        self,
        bytes: &[u8],
        codes: &mut [u8],
        scales: &mut [f32],
        minimums: &mut [f32],
        units: &mut [Units],
    ) {
        let Multiples(_, unpack) = self.row().read else { panic!("{self} has no multiples") };
        let mut units = units.iter_mut();
        self.read_blocks(bytes, codes, scales, minimums, |bytes, codes, scales, minimums| {
            *units.next().expect("units for every block") = unpack(bytes, codes, scales, minimums);
        });
    }

    fn read_blocks(
        self,
        bytes: &[u8],
        codes: &mut [u8],
        scales: &mut [f32],
        minimums: &mut [f32],
        mut unpack: impl FnMut(&[u8], &mut [u8], &mut [f32], &mut [f32]),
    ) {
        self.check(bytes, codes.len());
        let coding = self.coding().expect("a format of codes");
        let (block, groups) = (self.block_len(), self.block_len() / coding.group);
        for (index, bytes) in bytes.chunks_exact(self.block_bytes()).enumerate() {
            let at = index * groups..(index + 1) * groups;
            let minimums = if coding.affine { &mut minimums[at.clone()] } else { &mut [] };
            unpack(bytes, &mut codes[index * block..(index + 1) * block], &mut scales[at], minimums);
        }
    }

    fn check(self, bytes: &[u8], values: usize) {
        let row = self.row();
        assert!(
            values.is_multiple_of(row.block_len) && bytes.len() == values / row.block_len * row.block_bytes,
            "{} bytes do not hold {values} values of {self}",
            bytes.len(),
        );
    }

    /// The format of a GGUF tensor type number.
    pub fn from_gguf(id: u32) -> Option<Self> {
        ROWS.iter().find(|row| row.gguf == Some(id)).map(|row| row.format)
    }

    /// The GGUF tensor type number, if GGUF has the format.
    pub fn gguf_id(self) -> Option<u32> {
        self.row().gguf
    }

    /// The format of a safetensors dtype name.
    pub fn from_safetensors(dtype: &str) -> Option<Self> {
        Some(match dtype {
            "F64" => Self::F64,
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::BF16,
            "I64" => Self::I64,
            "I32" => Self::I32,
            "I16" => Self::I16,
            "I8" => Self::I8,
            "U8" | "BOOL" => Self::U8,
            "F8_E4M3" => Self::F8_E4M3,
            "F8_E5M2" => Self::F8_E5M2,
            "F8_E8M0" => Self::F8_E8M0,
            _ => return None,
        })
    }

    /// The format with this name, in upper or lower case.
    pub fn from_name(name: &str) -> Option<Self> {
        ROWS.iter().find(|row| row.name.eq_ignore_ascii_case(name)).map(|row| row.format)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One block of the longest format, unpacked.
struct Unpacked {
    codes: [u8; 256],
    scales: [f32; 16],
    minimums: [f32; 16],
}

impl Unpacked {
    fn new() -> Self {
        Self { codes: [0; 256], scales: [0.0; 16], minimums: [0.0; 16] }
    }

    fn values(&self, coding: &Coding, out: &mut [f32]) {
        let groups = out.chunks_exact_mut(coding.group).zip(self.codes.chunks_exact(coding.group));
        for (group, (out, codes)) in groups.enumerate() {
            let (scale, minimum) = (self.scales[group], self.minimums[group]);
            for (value, code) in out.iter_mut().zip(codes) {
                *value = scale * f32::from(coding.levels.level(*code));
                // A missing minimum is not added: adding zero would lose the sign of minus zero.
                if coding.affine {
                    *value += minimum;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (index, row) in ROWS.iter().enumerate() {
            assert_eq!(row.format as usize, index);
            assert_eq!(Format::from_name(row.name), Some(row.format));
            if let Some(id) = row.gguf {
                assert_eq!(Format::from_gguf(id), Some(row.format));
            }
        }
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(Format::Q5_0.bytes_for(64).unwrap(), 44);
        assert_eq!(Format::BF16.bytes_for(3).unwrap(), 6);
        assert!(matches!(Format::Q4_K.bytes_for(128), Err(Error::PartialBlock { block: 256, values: 128, .. })));
        assert!(matches!(Format::F32.bytes_for(u64::MAX), Err(Error::TooManyValues { .. })));
    }

    #[test]
    fn multiples_are_small_whole_numbers_of_which_the_numbers_are_made() {
        let mut seen = 0;
        for &format in Format::ALL {
            let Some(coding) = format.coding().filter(|coding| coding.numbers == Numbers::Multiples) else { continue };
            assert_eq!(format.block_len(), Coding::BLOCK, "{format}");
            // The f16 values among them are finite.
            let bytes: Vec<u8> = (0..2 * format.block_bytes()).map(|i| (i * 89 + 7) as u8 & 0xbf).collect();
            let (values, groups) = (2 * Coding::BLOCK, 2 * Coding::BLOCK / coding.group);
            let row = || (vec![0; values], vec![0.0; groups], vec![0.0; groups]);
            let ((mut codes, mut scales, mut minimums), mut plain) = (row(), row());
            let mut units = [Units::default(); 2];
            format.read_codes(&bytes, &mut plain.0, &mut plain.1, &mut plain.2);
            format.read_multiples(&bytes, &mut codes, &mut scales, &mut minimums, &mut units);
            assert_eq!(codes, plain.0);
            for group in 0..groups {
                let unit = units[group * coding.group / Coding::BLOCK];
                for (multiple, unit, number) in
                    [(scales[group], unit.scale, plain.1[group]), (minimums[group], unit.minimum, plain.2[group])]
                {
                    assert_eq!(multiple, f32::from(multiple as i8), "{format}");
                    assert_eq!(multiple * unit, number, "{format}");
                }
            }
            seen += 1;
        }
        assert_eq!(seen, 6);
    }

    #[test]
    #[should_panic(expected = "do not hold")]
    fn decode_wants_matching_lengths() {
        Format::Q8_0.decode(&[0; 33], &mut [0.0; 32]);
    }
}
