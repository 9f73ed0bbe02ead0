//! Every storage format, as one table row: block length, block bytes, decoder.

use std::fmt;

use crate::quant::{iq4, k, mxfp4, plain, simple};
use crate::{Error, Result};

/// How values lie in a file. `decode` is the reference: plain loops, bit-equal to the `gguf` package's.
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
}

/// One line of the table. A new format is one more line and its decoder.
struct Row {
    format: Format,
    name: &'static str,
    block_len: usize,
    block_bytes: usize,
    /// The type number in a GGUF file, where GGUF has the format.
    gguf: Option<u32>,
    /// Decodes whole blocks; the lengths have been checked.
    decode: fn(&[u8], &mut [f32]),
}

macro_rules! table {
    ($($format:ident, $len:expr, $bytes:expr, $gguf:expr, $decode:path;)*) => {
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
            decode: $decode,
        }),*];
    };
}

table! {
    F32,    1,   4,                   Some(0),  plain::f32;
    F16,    1,   2,                   Some(1),  plain::f16;
    BF16,   1,   2,                   Some(30), plain::bf16;
    Q4_0,   32,  simple::Q4_0_BYTES,  Some(2),  simple::q4_0;
    Q4_1,   32,  simple::Q4_1_BYTES,  Some(3),  simple::q4_1;
    Q5_0,   32,  simple::Q5_0_BYTES,  Some(6),  simple::q5_0;
    Q5_1,   32,  simple::Q5_1_BYTES,  Some(7),  simple::q5_1;
    Q8_0,   32,  simple::Q8_0_BYTES,  Some(8),  simple::q8_0;
    Q2_K,   256, k::Q2_K_BYTES,       Some(10), k::q2_k;
    Q3_K,   256, k::Q3_K_BYTES,       Some(11), k::q3_k;
    Q4_K,   256, k::Q4_K_BYTES,       Some(12), k::q4_k;
    Q5_K,   256, k::Q5_K_BYTES,       Some(13), k::q5_k;
    Q6_K,   256, k::Q6_K_BYTES,       Some(14), k::q6_k;
    IQ4_NL, 32,  iq4::IQ4_NL_BYTES,   Some(20), iq4::iq4_nl;
    IQ4_XS, 256, iq4::IQ4_XS_BYTES,   Some(23), iq4::iq4_xs;
    MXFP4,  32,  mxfp4::MXFP4_BYTES,  Some(39), mxfp4::mxfp4;
    I8,     1,   1,                   Some(24), plain::i8;
    U8,     1,   1,                   None,     plain::u8;
    I16,    1,   2,                   Some(25), plain::i16;
    I32,    1,   4,                   Some(26), plain::i32;
    I64,    1,   8,                   Some(27), plain::i64;
    F64,    1,   8,                   Some(28), plain::f64;
}

impl Format {
    fn row(self) -> &'static Row {
        let row = &ROWS[self as usize];
        debug_assert_eq!(row.format, self);
        row
    }

    /// The name as GGUF tools print it: `F32`, `Q5_0`, `Q4_K`.
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

    /// The bytes that `values` values take; an error if they are not whole blocks.
    pub fn bytes_for(self, values: u64) -> Result<u64> {
        let block = self.block_len() as u64;
        if !values.is_multiple_of(block) {
            return Err(Error::PartialBlock { format: self, block: self.block_len(), values });
        }
        (values / block).checked_mul(self.block_bytes() as u64).ok_or(Error::TooManyValues { format: self, values })
    }

    /// Decodes `bytes` into exactly `out.len()` values.
    ///
    /// Panics if the lengths do not belong together: a view's bytes were checked when its file was opened.
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        let row = self.row();
        assert!(
            out.len().is_multiple_of(row.block_len) && bytes.len() == out.len() / row.block_len * row.block_bytes,
            "{} bytes do not hold {} values of {self}",
            bytes.len(),
            out.len(),
        );
        (row.decode)(bytes, out);
    }

    /// The format of a GGUF tensor type number.
    pub fn from_gguf(id: u32) -> Option<Self> {
        ROWS.iter().find(|row| row.gguf == Some(id)).map(|row| row.format)
    }

    /// The GGUF tensor type number, where GGUF has the format.
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
            _ => return None,
        })
    }

    /// The format of that name, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        ROWS.iter().find(|row| row.name.eq_ignore_ascii_case(name)).map(|row| row.format)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
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
    #[should_panic(expected = "do not hold")]
    fn decode_wants_matching_lengths() {
        Format::Q8_0.decode(&[0; 33], &mut [0.0; 32]);
    }
}
