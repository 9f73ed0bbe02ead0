//! The tensor types that GGUF numbers, with the size of their blocks.
//!
//! Types that Folio does not decode are listed too, so that the layout of a file with one is known
//! and the error can name it.

use crate::Format;

#[derive(Clone, Copy, Debug)]
pub(super) struct TensorType {
    id: u32,
    pub name: &'static str,
    pub block_len: u64,
    pub block_bytes: u64,
}

/// Id, name, values in a block, bytes of a block.
const UNREAD: &[(u32, &str, u64, u64)] = &[
    (9, "Q8_1", 32, 40),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (29, "IQ1_M", 256, 56),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
];

impl TensorType {
    pub(super) fn find(id: u32) -> Option<Self> {
        if let Some(format) = Format::from_gguf(id) {
            let (block_len, block_bytes) = (format.block_len() as u64, format.block_bytes() as u64);
            return Some(Self { id, name: format.name(), block_len, block_bytes });
        }
        let (id, name, block_len, block_bytes) = *UNREAD.iter().find(|row| row.0 == id)?;
        Some(Self { id, name, block_len, block_bytes })
    }

    /// `None` if Folio has no decoder.
    pub(super) fn format(self) -> Option<Format> {
        Format::from_gguf(self.id)
    }
}
