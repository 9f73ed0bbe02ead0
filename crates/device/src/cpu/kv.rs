//! Paged keys and values of one layer group.
//!
//! Inside a block the sixteen tokens are the lanes of a vector where scores are computed, and the head's values are
//! the lanes where values are summed: keys lie `[layer][block][kv_head][head_dim][16]`, values
//! `[layer][block][kv_head][16][head_dim]`. Memory is mapped zero and costs nothing until a block is written.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::Ctx;
use super::attention::MAX_HEAD_DIM;
use super::buffer::Buffer;
use super::simd::{LANES, Simd};
use crate::{BLOCK_TOKENS, Error, KvFormat, KvShape, Result};

/// A storage type of keys and values.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Rounded to nearest even.
    fn narrow(value: f32) -> Self;
    /// Sixteen values, widened.
    /// # Safety
    /// Sixteen values must be readable at `from`.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F;
}

impl Element for f32 {
    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const f32) -> S::F {
        // SAFETY: the caller vouches for the memory.
        unsafe { simd.load(from) }
    }
}

impl Element for f16 {
    #[inline(always)]
    fn narrow(value: f32) -> f16 {
        f16::from_f32(value)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const f16) -> S::F {
        // SAFETY: the caller vouches for the memory; an f16 is its sixteen bits.
        unsafe { simd.load_f16(from.cast()) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn narrow(value: f32) -> bf16 {
        bf16::from_f32(value)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const bf16) -> S::F {
        // SAFETY: the caller vouches for the memory; a bf16 is its sixteen bits.
        unsafe { simd.load_bf16(from.cast()) }
    }
}

/// Evaluates an expression with `$element` naming the storage type of `$format`.
macro_rules! with_element {
    ($format:expr, $element:ident => $body:expr) => {
        match $format {
            $crate::KvFormat::F32 => {
                type $element = f32;
                $body
            }
            $crate::KvFormat::F16 => {
                type $element = half::f16;
                $body
            }
            $crate::KvFormat::BF16 => {
                type $element = half::bf16;
                $body
            }
        }
    };
}
pub(crate) use with_element;

/// The storage of one layer group.
pub struct Kv {
    shape: KvShape,
    /// Bytes of a block of one layer, all heads; the same for keys and for values.
    block_bytes: usize,
    keys: Buffer<u8>,
    /// Sixteen elements longer than its blocks, so that a vector may be read at any value.
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
        let element = shape.format.bytes();
        let block_bytes = product(&[shape.kv_heads, shape.head_dim, BLOCK_TOKENS, element])?;
        let bytes = product(&[shape.layers, shape.blocks, block_bytes])?;
        let padded = bytes.checked_add(LANES * element).ok_or_else(out_of_memory)?;
        Ok(Self {
            shape,
            block_bytes,
            keys: Buffer::zeroed("the keys of the kv cache", bytes)?,
            values: Buffer::zeroed("the values of the kv cache", padded)?,
        })
    }

    pub fn format(&self) -> KvFormat {
        self.shape.format
    }

    /// Where a layer starts in `keys` and `values`, after a check that an operation and the storage speak of the same
    /// heads. The start lies inside both, and as many bytes as all blocks of a layer take follow it.
    fn layer_start<T: Element>(&self, layer: usize, kv_heads: usize, head_dim: usize) -> usize {
        let shape = &self.shape;
        assert!(layer < shape.layers, "layer {layer} of a group of {}", shape.layers);
        assert_eq!(shape.kv_heads, kv_heads, "kv heads of the storage and of the operation");
        assert_eq!(shape.head_dim, head_dim, "head_dim of the storage and of the operation");
        assert_eq!(size_of::<T>(), shape.format.bytes(), "bytes of an element");
        layer * shape.blocks * self.block_bytes
    }

    /// The storage of one layer, to be read.
    pub(crate) fn layer<T: Element>(&self, layer: usize, kv_heads: usize, head_dim: usize) -> Layer<'_, T> {
        let start = self.layer_start::<T>(layer, kv_heads, head_dim);
        // SAFETY: the start lies inside both buffers. They are aligned to 64 bytes and it is whole elements from there.
        let (keys, values) = unsafe { (self.keys.as_ptr().add(start), self.values.as_ptr().add(start)) };
        let (keys, values) = (keys.cast(), values.cast());
        Layer { keys, values, blocks: self.shape.blocks, kv_heads, head_dim, storage: PhantomData }
    }

    /// As [`Kv::layer`], to be written to.
    pub(crate) fn layer_mut<T: Element>(&mut self, layer: usize, kv_heads: usize, head_dim: usize) -> LayerMut<'_, T> {
        let start = self.layer_start::<T>(layer, kv_heads, head_dim);
        // SAFETY: as in `layer`.
        let (keys, values) = unsafe { (self.keys.as_mut_ptr().add(start), self.values.as_mut_ptr().add(start)) };
        let (keys, values) = (keys.cast(), values.cast());
        LayerMut { keys, values, blocks: self.shape.blocks, kv_heads, head_dim, storage: PhantomData }
    }
}

/// One layer of a [`Kv`], to be read.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a, T> {
    keys: *const T,
    values: *const T,
    blocks: usize,
    kv_heads: usize,
    head_dim: usize,
    storage: PhantomData<&'a [T]>,
}

// SAFETY: it is two `&[T]`: the storage is borrowed, and only read.
unsafe impl<T: Sync> Sync for Layer<'_, T> {}

impl<T> Layer<'_, T> {
    /// Keys `[head_dim][16]` and values `[16][head_dim]` of one head in one block; sixteen more values are readable
    /// behind each row of values.
    #[inline(always)]
    pub fn block(&self, block: u32, kv_head: usize) -> (*const T, *const T) {
        let block = block as usize;
        assert!(block < self.blocks && kv_head < self.kv_heads, "block {block} of {}", self.blocks);
        let start = (block * self.kv_heads + kv_head) * BLOCK_TOKENS * self.head_dim;
        // SAFETY: block and head were checked against the size of the layer.
        unsafe { (self.keys.add(start), self.values.add(start)) }
    }
}

/// One layer of a [`Kv`], written to by several threads, each its own slots.
pub(crate) struct LayerMut<'a, T> {
    keys: *mut T,
    values: *mut T,
    blocks: usize,
    kv_heads: usize,
    head_dim: usize,
    storage: PhantomData<&'a mut [T]>,
}

// SAFETY: the storage is borrowed for writing, and threads write different slots, as `write`'s callers promise.
unsafe impl<T: Send> Sync for LayerMut<'_, T> {}

impl<T: Element> LayerMut<'_, T> {
    /// Stores the key and value of one token and head.
    ///
    /// # Safety
    /// No two threads may write the same slot.
    #[inline(always)]
    pub unsafe fn write(&self, slot: u32, kv_head: usize, key: &[f32], value: &[f32]) {
        let (block, token) = (slot as usize / BLOCK_TOKENS, slot as usize % BLOCK_TOKENS);
        assert!(block < self.blocks && kv_head < self.kv_heads, "slot {slot} of {} blocks", self.blocks);
        assert!(key.len() == self.head_dim && value.len() == self.head_dim, "a head of {} values", self.head_dim);
        let start = (block * self.kv_heads + kv_head) * BLOCK_TOKENS * self.head_dim;
        for (i, (&key, &value)) in key.iter().zip(value).enumerate() {
            // SAFETY: block, head, token and `i` were checked against the size of the layer.
            unsafe {
                self.keys.add(start + i * BLOCK_TOKENS + token).write(T::narrow(key));
                self.values.add(start + token * self.head_dim + i).write(T::narrow(value));
            }
        }
    }
}

/// Copies whole blocks, all layers: pairs of (from, to), in order.
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

impl Kv {
    /// Where one layer's part of a block lies in `keys` and in `values`.
    fn part(&self, layer: usize, block: u32) -> Range<usize> {
        let (block, blocks) = (block as usize, self.shape.blocks);
        assert!(block < blocks, "block {block} of {blocks}");
        let start = (layer * blocks + block) * self.block_bytes;
        start..start + self.block_bytes
    }
}

/// One block as bytes: `[keys, values][layer]`, each as it lies in memory.
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
    /// Fills both halves of a block with a value that is not a number, in every layer.
    pub(crate) fn poison(&mut self, block: usize) {
        for layer in 0..self.shape.layers {
            let start = (layer * self.shape.blocks + block) * self.block_bytes;
            self.keys[start..start + self.block_bytes].fill(0xff);
            self.values[start..start + self.block_bytes].fill(0xff);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Isa, Pool};

    #[test]
    fn a_copied_block_is_equal_in_every_layer_and_the_rest_untouched() {
        let shape = KvShape { layers: 3, blocks: 5, kv_heads: 2, head_dim: 24, format: KvFormat::BF16 };
        let mut kv = Kv::new(shape).unwrap();
        let key: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let value: Vec<f32> = (0..24).map(|i| -(i as f32)).collect();
        for layer in 0..3 {
            // SAFETY: one thread.
            unsafe { kv.layer_mut::<bf16>(layer, 2, 24).write(16 + 7, 1, &key, &value) };
        }
        let pool = Pool::new(1).unwrap();
        copy_blocks(Ctx { pool: &pool, isa: Isa::Scalar }, &mut kv, &[(1, 4), (4, 0)]);
        for layer in 0..3 {
            let view = kv.layer::<bf16>(layer, 2, 24);
            for block in [0, 1, 4, 2] {
                let (keys, values) = view.block(block, 1);
                for i in 0..24 {
                    // SAFETY: `i` is below head_dim and 7 below sixteen.
                    let found = unsafe { ((*keys.add(i * 16 + 7)).to_f32(), (*values.add(7 * 24 + i)).to_f32()) };
                    let expected = if block == 2 { (0.0, 0.0) } else { (key[i], value[i]) };
                    assert_eq!(found, expected, "layer {layer} block {block} value {i}");
                }
            }
        }
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        let shape = KvShape { layers: 1 << 20, blocks: 1 << 30, kv_heads: 8, head_dim: 128, format: KvFormat::F32 };
        assert!(Kv::new(shape).is_err());
        let shape = KvShape { layers: 1, blocks: 1, kv_heads: 1, head_dim: MAX_HEAD_DIM + 1, format: KvFormat::F32 };
        let error = Kv::new(shape).err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("a head of 8193 values (at most 8192) is not supported on cpu"));
    }
}
