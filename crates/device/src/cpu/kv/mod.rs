//! Paged keys and values of one layer group.
//!
//! Inside a block the sixteen tokens are the lanes of a vector when scores are computed, and the
//! head's values are the lanes when values are summed: keys are
//! `[layer][block][kv_head][head_dim][16]`, values `[layer][block][kv_head][16][head_dim]` (bf16 in
//! pairs of neighbours, `pairs.rs`). The scales of a head and block follow right behind, so that
//! copying a block means copying its bytes. `storage.rs` describes how a head is stored. Memory is
//! mapped zero and costs nothing until a block is written.

mod nibbles;
mod pairs;
mod plain;
mod scaled;
mod storage;
mod tokens;

use std::marker::PhantomData;
use std::ops::Range;

pub(crate) use nibbles::Nibbles;
pub(crate) use pairs::Pairs;
pub(crate) use plain::Plain;
pub(crate) use scaled::{E4m3, Scaled, Signed};
pub(crate) use storage::{Storage, with_storage};
pub(crate) use tokens::{HeadBlock, copy_token};

use super::Ctx;
use super::attention::MAX_HEAD_DIM;
use super::buffer::Buffer;
use super::simd::LANES;
use crate::{BLOCK_TOKENS, Error, KvFormat, KvShape, Result};

/// The storage of one layer group.
pub struct Kv {
    shape: KvShape,
    /// Bytes of a block of one layer and head, and of all its heads; the same for keys and for
    /// values.
    head_bytes: usize,
    block_bytes: usize,
    keys: Buffer<u8>,
    /// Sixteen f32 longer than its blocks, so that a vector may be read at any value.
    values: Buffer<u8>,
}

impl Kv {
    pub fn new(shape: KvShape) -> Result<Self> {
        let out_of_memory = || Error::OutOfMemory { what: "the kv cache", bytes: u64::MAX };
        let product = |sizes: &[usize]| {
            sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size)).ok_or_else(out_of_memory)
        };
        if shape.head_dim > MAX_HEAD_DIM {
            let what = format!("a head of {} values (at most {MAX_HEAD_DIM})", shape.head_dim);
            return Err(Error::Unsupported { backend: "cpu", what });
        }
        let head_bytes = product(&[BLOCK_TOKENS, shape.format.head_bytes(shape.head_dim)])?;
        let block_bytes = product(&[shape.kv_heads, head_bytes])?;
        let bytes = product(&[shape.layers, shape.blocks, block_bytes])?;
        let padded = bytes.checked_add(LANES * size_of::<f32>()).ok_or_else(out_of_memory)?;
        Ok(Self {
            shape,
            head_bytes,
            block_bytes,
            keys: Buffer::zeroed("the keys of the kv cache", bytes)?,
            values: Buffer::zeroed("the values of the kv cache", padded)?,
        })
    }

    pub fn format(&self) -> KvFormat {
        self.shape.format
    }

    /// Start of a layer in `keys` and `values`, after a check that an operation and the storage
    /// have the same heads. The start is inside both, and at least the bytes of all blocks of a
    /// layer follow it.
    fn layer_start<T: Storage>(&self, layer: usize, kv_heads: usize, head_dim: usize) -> usize {
        let shape = &self.shape;
        assert!(layer < shape.layers, "layer {layer} of a group of {}", shape.layers);
        assert_eq!(shape.kv_heads, kv_heads, "kv heads of the storage and of the operation");
        assert_eq!(shape.head_dim, head_dim, "head_dim of the storage and of the operation");
        assert_eq!(shape.format, T::FORMAT, "format of the storage and of the operation");
        layer * shape.blocks * self.block_bytes
    }

    /// The storage of one layer, for reading.
    pub(crate) fn layer<T: Storage>(&self, layer: usize, kv_heads: usize, head_dim: usize) -> Layer<'_, T> {
        let start = self.layer_start::<T>(layer, kv_heads, head_dim);
        // SAFETY: the start lies inside both buffers.
        let (keys, values) = unsafe { (self.keys.as_ptr().add(start), self.values.as_ptr().add(start)) };
        let (blocks, head_bytes) = (self.shape.blocks, self.head_bytes);
        Layer { keys, values, blocks, kv_heads, head_bytes, storage: PhantomData }
    }

    /// Like [`Kv::layer`], for writing.
    pub(crate) fn layer_mut<T: Storage>(&mut self, layer: usize, kv_heads: usize, head_dim: usize) -> LayerMut<'_, T> {
        let start = self.layer_start::<T>(layer, kv_heads, head_dim);
        // SAFETY: as in `layer`.
        let (keys, values) = unsafe { (self.keys.as_mut_ptr().add(start), self.values.as_mut_ptr().add(start)) };
        let (blocks, head_bytes) = (self.shape.blocks, self.head_bytes);
        LayerMut { keys, values, blocks, kv_heads, head_dim, head_bytes, storage: PhantomData }
    }
}

/// One layer of a [`Kv`], for reading.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a, T> {
    keys: *const u8,
    values: *const u8,
    blocks: usize,
    kv_heads: usize,
    head_bytes: usize,
    storage: PhantomData<&'a [T]>,
}

// SAFETY: it is two `&[u8]`: the storage is borrowed, and only read.
unsafe impl<T: Sync> Sync for Layer<'_, T> {}

impl<T> Layer<'_, T> {
    /// Bytes of one head's keys, or values, in a block.
    pub fn head_bytes(&self) -> usize {
        self.head_bytes
    }

    /// Keys and values of one head in one block, in the layout of [`Storage`]; sixteen f32 more are
    /// readable behind the values.
    #[inline(always)]
    pub fn block(&self, block: u32, kv_head: usize) -> (*const u8, *const u8) {
        let block = block as usize;
        assert!(block < self.blocks && kv_head < self.kv_heads, "block {block} of {}", self.blocks);
        let start = (block * self.kv_heads + kv_head) * self.head_bytes;
        // SAFETY: block and head were checked against the size of the layer.
        unsafe { (self.keys.add(start), self.values.add(start)) }
    }
}

/// One layer of a [`Kv`], for writing by several threads, each to its own slots.
pub(crate) struct LayerMut<'a, T> {
    keys: *mut u8,
    values: *mut u8,
    blocks: usize,
    kv_heads: usize,
    head_dim: usize,
    head_bytes: usize,
    storage: PhantomData<&'a mut [T]>,
}

// SAFETY: the storage is borrowed for writing, and `write`'s callers promise that threads write
// different slots.
unsafe impl<T: Send> Sync for LayerMut<'_, T> {}

impl<T: Storage> LayerMut<'_, T> {
    /// Rounds and stores the key and value of one token and head.
    ///
    /// # Safety
    /// No two threads may write the same slot.
    #[inline(always)]
    pub unsafe fn write(&self, slot: u32, kv_head: usize, key: &[f32], value: &[f32]) {
        let (block, token) = (slot as usize / BLOCK_TOKENS, slot as usize % BLOCK_TOKENS);
        assert!(block < self.blocks && kv_head < self.kv_heads, "slot {slot} of {} blocks", self.blocks);
        assert!(key.len() == self.head_dim && value.len() == self.head_dim, "a head of {} values", self.head_dim);
        let start = (block * self.kv_heads + kv_head) * self.head_bytes;
        // SAFETY: block, head and token were checked against the layer's size, and both slices are
        // one head's.
        unsafe {
            T::write_key(self.keys.add(start), token, key);
            T::write_value(self.values.add(start), token, value);
        }
    }
}

/// Copies whole blocks of all layers: pairs of (from, to), in order.
pub fn copy_blocks(_ctx: Ctx<'_>, kv: &mut Kv, pairs: &[(u32, u32)]) {
    let (blocks, bytes) = (kv.shape.blocks, kv.block_bytes);
    for &(from, to) in pairs {
        let (from, to) = (from as usize, to as usize);
        assert!(from < blocks && to < blocks, "copy of block {from} to {to} of {blocks}");
        for layer in 0..kv.shape.layers {
            let start = (layer * blocks + from) * bytes;
            let target = (layer * blocks + to) * bytes;
            kv.keys.copy_within(start..start + bytes, target);
            kv.values.copy_within(start..start + bytes, target);
        }
    }
}

/// Copies single tokens of all layers: pairs of slots (from, to), in order.
pub fn move_tokens(_ctx: Ctx<'_>, kv: &mut Kv, pairs: &[(u32, u32)]) {
    let KvShape { layers, blocks, kv_heads, head_dim, format } = kv.shape;
    let slots = blocks * BLOCK_TOKENS;
    let heads = (0..layers).flat_map(|layer| (0..kv_heads).map(move |head| (layer, head)));
    for (layer, head) in heads {
        for &(from, to) in pairs {
            let (from, to) = (from as usize, to as usize);
            assert!(from < slots && to < slots, "move of slot {from} to {to} of {slots}");
            let start = |slot: usize| ((layer * blocks + slot / BLOCK_TOKENS) * kv_heads + head) * kv.head_bytes;
            let (source, target) = (start(from), start(to));
            let (keys, values) = (kv.keys.as_mut_ptr(), kv.values.as_mut_ptr());
            // SAFETY: layer, slot and head are inside the storage, which is borrowed for writing
            // and has this format.
            unsafe {
                let source = HeadBlock { keys: keys.add(source).cast_const(), values: values.add(source).cast_const() };
                let target = HeadBlock { keys: keys.add(target), values: values.add(target) };
                let (from, to) = ((source, from % BLOCK_TOKENS), (target, to % BLOCK_TOKENS));
                with_storage!(format, T => copy_token::<T>(head_dim, from, to));
            }
        }
    }
}

impl Kv {
    /// Range of one layer's part of a block in `keys` and in `values`.
    fn part(&self, layer: usize, block: u32) -> Range<usize> {
        let (block, blocks) = (block as usize, self.shape.blocks);
        assert!(block < blocks, "block {block} of {blocks}");
        let start = (layer * blocks + block) * self.block_bytes;
        start..start + self.block_bytes
    }
}

/// One block as bytes: `[keys, values][layer]`, each with the bytes that memory has.
pub fn save_block(kv: &Kv, block: u32, out: &mut [u8]) {
    assert_eq!(out.len() as u64, kv.shape.block_bytes(), "bytes of a block");
    let (keys, values) = out.split_at_mut(kv.shape.layers * kv.block_bytes);
    for layer in 0..kv.shape.layers {
        let at = layer * kv.block_bytes..(layer + 1) * kv.block_bytes;
        let part = kv.part(layer, block);
        keys[at.clone()].copy_from_slice(&kv.keys[part.clone()]);
        values[at].copy_from_slice(&kv.values[part]);
    }
}

/// The inverse of [`save_block`].
pub fn load_block(kv: &mut Kv, block: u32, bytes: &[u8]) {
    assert_eq!(bytes.len() as u64, kv.shape.block_bytes(), "bytes of a block");
    let (keys, values) = bytes.split_at(kv.shape.layers * kv.block_bytes);
    for layer in 0..kv.shape.layers {
        let at = layer * kv.block_bytes..(layer + 1) * kv.block_bytes;
        let part = kv.part(layer, block);
        kv.keys[part.clone()].copy_from_slice(&keys[at.clone()]);
        kv.values[part].copy_from_slice(&values[at]);
    }
}

#[cfg(test)]
impl Kv {
    /// Fills the keys and values of a block with NaN, in every layer.
    pub(crate) fn poison(&mut self, block: usize) {
        for layer in 0..self.shape.layers {
            let start = (layer * self.shape.blocks + block) * self.block_bytes;
            self.keys[start..start + self.block_bytes].fill(0xff);
            self.values[start..start + self.block_bytes].fill(0xff);
        }
    }
}

#[cfg(test)]
mod tests;
