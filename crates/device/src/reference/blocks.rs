//! One block of keys and values as bytes: `[keys, values][layer][slot][kv_head]` heads in the
//! storage format.

use std::ops::Range;

use super::Kv;
use crate::{BLOCK_TOKENS, KvShape};

/// Ranges of each layer's part of a block in `keys` and `values`.
fn parts(shape: &KvShape, block: u32) -> impl Iterator<Item = Range<usize>> + Clone + use<> {
    let (layers, blocks, block) = (shape.layers, shape.blocks, block as usize);
    assert!(block < blocks, "block {block} of {blocks}");
    let len = BLOCK_TOKENS * shape.kv_heads * shape.format.head_bytes(shape.head_dim);
    (0..layers).map(move |layer| (layer * blocks + block) * len).map(move |start| start..start + len)
}

pub fn save(kv: &Kv, block: u32, mut out: &mut [u8]) {
    assert_eq!(out.len() as u64, kv.shape.block_bytes(), "bytes of a block");
    for storage in [&kv.keys, &kv.values] {
        for part in parts(&kv.shape, block) {
            out.split_off_mut(..part.len()).expect("room for every part").copy_from_slice(&storage[part]);
        }
    }
}

pub fn load(kv: &mut Kv, block: u32, mut bytes: &[u8]) {
    assert_eq!(bytes.len() as u64, kv.shape.block_bytes(), "bytes of a block");
    for storage in [&mut kv.keys, &mut kv.values] {
        for part in parts(&kv.shape, block) {
            let from = bytes.split_off(..part.len()).expect("every part is there");
            storage[part].copy_from_slice(from);
        }
    }
}

pub fn copy(kv: &mut Kv, from: u32, to: u32) {
    for (from, to) in parts(&kv.shape, from).zip(parts(&kv.shape, to)) {
        kv.keys.copy_within(from.clone(), to.start);
        kv.values.copy_within(from, to.start);
    }
}
