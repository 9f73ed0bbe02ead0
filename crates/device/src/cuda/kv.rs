//! Paged keys and values of a layer group:
//! `[block][layer][keys | values][kv head][16 tokens][head]`, so that a block of all layers is
//! contiguous memory.

use super::driver::{Buffer, Device, Element, Launch, Matrix2d, Moving, NotBegun, Swizzle, TensorMap, args};
use crate::{BLOCK_TOKENS, Error, HostMemory, KvFormat, KvShape, Result};

pub struct Kv {
    pub(super) shape: KvShape,
    pub(super) buffer: Buffer,
    /// All heads of all tokens as rows of one matrix, for kernels that read them so.
    pub(super) map: Option<TensorMap>,
    /// Pairs (from, to) of a block copy.
    pairs: Buffer,
}

/// A block copy that runs beside the device's computation.
pub(super) type Begun = std::result::Result<Moving, NotBegun>;

/// Most pairs that one launch copies.
const COPY_PAIRS: usize = 1024;
pub(super) const PAIR_BYTES: usize = COPY_PAIRS * 8;

impl Kv {
    pub(super) fn new(device: &Device, shape: KvShape) -> Result<Self> {
        let bytes = shape.block_bytes().saturating_mul(shape.blocks as u64);
        let bytes = usize::try_from(bytes).map_err(|_| Error::OutOfMemory { what: "keys and values", bytes })?;
        let buffer = device.alloc_zeroed("keys and values", bytes)?;
        let map = map(device, &shape, &buffer)?;
        Ok(Self { shape, buffer, map, pairs: device.alloc("pairs of blocks", PAIR_BYTES)? })
    }

    /// Bytes of one layer's keys, or values, in a block.
    pub(super) fn section(&self) -> usize {
        BLOCK_TOKENS * self.shape.kv_heads * self.shape.format.head_bytes(self.shape.head_dim)
    }

    pub(super) fn block_stride(&self) -> usize {
        2 * self.shape.layers * self.section()
    }

    pub(super) fn layer_offset(&self, layer: usize) -> usize {
        assert!(layer < self.shape.layers, "layer {layer} of a group of {}", self.shape.layers);
        2 * layer * self.section()
    }

    fn at(&self, block: u32) -> usize {
        assert!((block as usize) < self.shape.blocks, "block {block} of {}", self.shape.blocks);
        block as usize * self.block_stride()
    }

    pub(super) fn save(&self, device: &Device, block: u32, out: &mut [u8]) -> Result<()> {
        assert_eq!(out.len(), self.block_stride(), "bytes of a block");
        device.download(&self.buffer, self.at(block), out)
    }

    pub(super) fn start_save(&self, device: &Device, block: u32, memory: Box<dyn HostMemory>) -> Begun {
        assert_eq!(memory.len(), self.block_stride(), "bytes of a block");
        device.start_download(&self.buffer, self.at(block), memory)
    }

    pub(super) fn start_load(&self, device: &Device, block: u32, memory: Box<dyn HostMemory>) -> Begun {
        assert_eq!(memory.len(), self.block_stride(), "bytes of a block");
        device.start_upload(&self.buffer, self.at(block), memory)
    }

    pub(super) fn load(&self, device: &Device, block: u32, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len(), self.block_stride(), "bytes of a block");
        device.upload(&self.buffer, self.at(block), bytes)
    }

    /// If later pairs read blocks that earlier ones wrote, the pairs are copied one by one.
    pub(super) fn copy(&self, device: &Device, pairs: &[(u32, u32)]) -> Result<()> {
        let bytes = self.block_stride();
        let writes = |block: u32| pairs.iter().filter(|(_, to)| *to == block).count();
        let apart = pairs.iter().all(|&(from, to)| writes(from) == 0 && writes(to) == 1);
        if pairs.len() < 4 || !apart || !bytes.is_multiple_of(16) {
            for &(from, to) in pairs {
                device.copy(&self.buffer, self.at(to), &self.buffer, self.at(from), bytes);
            }
            return Ok(());
        }
        for some in pairs.chunks(COPY_PAIRS) {
            let words: Vec<u32> = some.iter().flat_map(|&(from, to)| [from, to]).collect();
            some.iter().for_each(|&(from, to)| assert!(self.at(from) != self.at(to), "a block copied onto itself"));
            device.upload(&self.pairs, 0, &words)?;
            let grid = [bytes.div_ceil(16384) as u32, some.len() as u32, 1];
            let launch = Launch { grid, threads: 256, shared_bytes: 0, overlap: false };
            let kernel = device.kernel("copy_blocks");
            device.launch(&kernel, launch, args![self.buffer.ptr(), self.pairs.ptr(), bytes as i64]);
        }
        Ok(())
    }
}

/// Rows of one head and token, for the bulk copies of Hopper.
fn map(device: &Device, shape: &KvShape, buffer: &Buffer) -> Result<Option<TensorMap>> {
    // Codes form such rows if their scales take up whole rows as well.
    let (row_bytes, box_cols, element, swizzle) = match (shape.format, shape.head_dim) {
        (KvFormat::BF16, head_dim) => (2 * head_dim, 64, Element::Bf16, Swizzle::Bytes128),
        (KvFormat::Fp8 | KvFormat::Int8, 64) => (64, 64, Element::U8, Swizzle::Bytes64),
        (KvFormat::Fp8 | KvFormat::Int8, 128) if shape.kv_heads.is_multiple_of(2) => {
            (128, 128, Element::U8, Swizzle::Bytes128)
        }
        _ => return Ok(None),
    };
    if device.info().capability != (9, 0) || !row_bytes.is_multiple_of(16) || buffer.bytes() == 0 {
        return Ok(None);
    }
    let matrix = Matrix2d {
        ptr: buffer.ptr(),
        rows: (buffer.bytes() / row_bytes) as u64,
        cols: shape.head_dim as u64,
        stride_bytes: row_bytes as u64,
        box_rows: BLOCK_TOKENS as u32,
        box_cols,
        element,
        swizzle,
    };
    device.tensor_map_2d(&matrix).map(Some)
}

/// The number of a format in the kernels.
pub(super) fn format_number(format: KvFormat) -> i32 {
    match format {
        KvFormat::F32 => 0,
        KvFormat::F16 => 1,
        KvFormat::BF16 => 2,
        KvFormat::Fp8 => 3,
        KvFormat::Int8 => 4,
        KvFormat::Int4 => 5,
    }
}
