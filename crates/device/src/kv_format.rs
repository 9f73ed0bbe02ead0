//! Formats of stored keys and values, and their sizes in bytes.
//!
//! A stored value is `scale * level + min`. Plain formats have no scales; [`KvFormat::Fp8`] and
//! [`KvFormat::Int8`] have one scale per token and head; [`KvFormat::Int4`] has a scale and a
//! minimum for every [`KV_GROUP`] values of a token's head, with a shorter last group if the head's
//! size requires it. Every backend rounds to the same codes:
//!
//! - int8: the scale is the head's largest magnitude over 127, in f32; codes are nearest, halves to
//!   even.
//! - fp8 (e4m3): the same over 448. f32 scales, since an f16 could neither hold every magnitude nor
//!   keep the next head on a cache line of its own; they cost 4 bytes beside a head's 64 or more.
//! - int4: the scale is a fifteenth of the range; minimum and scale are rounded to f16 before they
//!   determine the codes 0 to 15; magnitudes beyond f16 become its largest.
//!
//! If a value is not finite, every value of its head (int4: of its group) reads back as NaN, so
//! that it is noticed. Heads of fp8 and int8 with a largest magnitude below [`KV_TINY`] read back
//! as zeros.

use crate::BLOCK_TOKENS;

/// Values that share a scale and a minimum in [`KvFormat::Int4`].
pub const KV_GROUP: usize = 32;

/// 2^-110. Smaller heads are stored as zeros in [`KvFormat::Fp8`] and [`KvFormat::Int8`]: scales
/// and their inverses stay normal numbers.
pub const KV_TINY: f32 = f32::from_bits((127 - 110) << 23);

/// Storage of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    F32,
    F16,
    BF16,
    /// e4m3, with a scale per token and head.
    Fp8,
    /// Signed bytes, with a scale per token and head.
    Int8,
    /// Four bits per value, with a scale and a minimum per group.
    Int4,
}

impl KvFormat {
    pub const ALL: [KvFormat; 6] =
        [KvFormat::F32, KvFormat::F16, KvFormat::BF16, KvFormat::Fp8, KvFormat::Int8, KvFormat::Int4];

    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::BF16 => "bf16",
            KvFormat::Fp8 => "fp8",
            KvFormat::Int8 => "int8",
            KvFormat::Int4 => "int4",
        }
    }

    /// Bytes of one token's key, or value, in one head, including its scales.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            KvFormat::F32 => head_dim.saturating_mul(4),
            KvFormat::F16 | KvFormat::BF16 => head_dim.saturating_mul(2),
            KvFormat::Fp8 | KvFormat::Int8 => head_dim.saturating_add(size_of::<f32>()),
            // Codes j and j + 16 of a group share a byte, so a last group of up to 16 has a byte
            // per value.
            KvFormat::Int4 => {
                let codes = head_dim / KV_GROUP * (KV_GROUP / 2) + (head_dim % KV_GROUP).min(KV_GROUP / 2);
                codes + head_dim.div_ceil(KV_GROUP) * 2 * size_of::<u16>()
            }
        }
    }
}

/// Size of one layer group's paged storage. A block holds [`BLOCK_TOKENS`] tokens of every layer of
/// the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub layers: usize,
    pub blocks: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub format: KvFormat,
}

impl KvShape {
    /// Bytes of one token over all layers of the group: 2 x layers x kv_heads x bytes of a head.
    pub fn token_bytes(&self) -> u64 {
        let sizes = [self.layers, self.kv_heads, self.format.head_bytes(self.head_dim)];
        sizes.iter().fold(2, |product: u64, &size| product.saturating_mul(size as u64))
    }

    /// Bytes of one block over all layers of the group, exactly as allocated.
    pub fn block_bytes(&self) -> u64 {
        self.token_bytes().saturating_mul(BLOCK_TOKENS as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_head_and_of_a_block() {
        let check = |format: KvFormat, head_dim, bytes| assert_eq!(format.head_bytes(head_dim), bytes, "{format:?}");
        check(KvFormat::F32, 64, 256);
        check(KvFormat::BF16, 64, 128);
        check(KvFormat::Int8, 64, 68);
        check(KvFormat::Fp8, 80, 84);
        check(KvFormat::Int4, 64, 32 + 8);
        // Groups of 32 and 8, of 32 and 17, of 1.
        check(KvFormat::Int4, 40, 16 + 8 + 8);
        check(KvFormat::Int4, 49, 16 + 16 + 8);
        check(KvFormat::Int4, 1, 1 + 4);
        let shape = KvShape { layers: 3, blocks: 7, kv_heads: 2, head_dim: 64, format: KvFormat::Int8 };
        assert_eq!(shape.block_bytes(), 2 * 3 * 2 * 16 * 68);
        let huge = KvShape { layers: usize::MAX, head_dim: usize::MAX, ..shape };
        assert_eq!(huge.block_bytes(), u64::MAX);
    }
}
