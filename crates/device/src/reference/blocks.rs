//! One block of keys and values as bytes, `[keys, values][layer][slot][kv_head][head_dim]` in the storage format.

use std::ops::Range;

use half::{bf16, f16};

use super::Kv;
use crate::{BLOCK_TOKENS, KvFormat, KvShape};

/// Where each layer's part of a block lies in `keys` and `values`.
fn parts(shape: &KvShape, block: u32) -> impl Iterator<Item = Range<usize>> + Clone + use<> {
    let (layers, blocks, block) = (shape.layers, shape.blocks, block as usize);
    assert!(block < blocks, "block {block} of {blocks}");
    let len = BLOCK_TOKENS * shape.kv_heads * shape.head_dim;
    (0..layers).map(move |layer| (layer * blocks + block) * len).map(move |start| start..start + len)
}

pub fn save(kv: &Kv, block: u32, out: &mut [u8]) {
    assert_eq!(out.len() as u64, kv.shape.block_bytes(), "bytes of a block");
    let parts = parts(&kv.shape, block);
    let keys = parts.clone().flat_map(|part| &kv.keys[part]);
    let values = keys.chain(parts.flat_map(|part| &kv.values[part]));
    for (value, out) in values.zip(out.chunks_exact_mut(kv.shape.format.bytes())) {
        // Already rounded to the format: nothing is lost.
        match kv.shape.format {
            KvFormat::F32 => out.copy_from_slice(&value.to_le_bytes()),
            KvFormat::F16 => out.copy_from_slice(&f16::from_f32(*value).to_le_bytes()),
            KvFormat::BF16 => out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes()),
        }
    }
}

pub fn load(kv: &mut Kv, block: u32, bytes: &[u8]) {
    assert_eq!(bytes.len() as u64, kv.shape.block_bytes(), "bytes of a block");
    let parts = parts(&kv.shape, block);
    let format = kv.shape.format;
    let mut stored = bytes.chunks_exact(format.bytes()).map(|bytes| match (format, bytes) {
        (KvFormat::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (KvFormat::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (KvFormat::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        _ => unreachable!("chunks are as long as an element"),
    });
    for storage in [&mut kv.keys, &mut kv.values] {
        for part in parts.clone() {
            storage[part].iter_mut().zip(&mut stored).for_each(|(to, from)| *to = from);
        }
    }
}
