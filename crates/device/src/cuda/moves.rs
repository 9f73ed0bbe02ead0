//! Copies keys and values of single tokens from slot to slot. The pairs travel as arguments of the
//! kernel, so that the host waits for no copy.

use super::driver::{Device, KernelArg, args};
use super::kv::Kv;
use super::launch;
use crate::{BLOCK_TOKENS, KvFormat};

/// Most pairs that one launch copies.
const AT_ONCE: usize = 64;

/// Mirrors `Moves`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Moves {
    pairs: [u32; 2 * AT_ONCE],
}

const _: () = assert!(size_of::<Moves>() == 512);

// SAFETY: repr(C), numbers only, as in move_tokens.cu.
unsafe impl KernelArg for Moves {}

pub(super) fn move_tokens(device: &Device, kv: &Kv, pairs: &[(u32, u32)]) {
    let (shape, slots) = (&kv.shape, kv.shape.blocks * BLOCK_TOKENS);
    for &(from, to) in pairs {
        assert!((from as usize) < slots && (to as usize) < slots, "move of slot {from} to {to} of {slots}");
    }
    let scaled = matches!(shape.format, KvFormat::Fp8 | KvFormat::Int8);
    let row_bytes = if scaled { shape.head_dim } else { shape.format.head_bytes(shape.head_dim) };
    let piece = [16, 4, 1].into_iter().find(|&piece| row_bytes.is_multiple_of(piece)).unwrap_or(1);
    let units = shape.kv_heads * (row_bytes / piece + usize::from(scaled));
    if units * shape.layers == 0 {
        return;
    }
    let layer_stride = if shape.layers > 1 { kv.layer_offset(1) } else { 0 };
    let (block_stride, layer_stride, section) = (kv.block_stride() as i64, layer_stride as i64, kv.section() as i64);
    let (kv_heads, row_bytes, scaled) = (shape.kv_heads as i32, row_bytes as i32, i32::from(scaled));
    for some in pairs.chunks(AT_ONCE) {
        let mut moves = Moves { pairs: [0; 2 * AT_ONCE] };
        for (words, &(from, to)) in moves.pairs.chunks_exact_mut(2).zip(some) {
            words.copy_from_slice(&[from, to]);
        }
        let grid = [units.div_ceil(256) as u32, 2 * shape.layers as u32, 1];
        let (buffer, num) = (kv.buffer.ptr(), some.len() as i32);
        let args = args![buffer, moves, num, block_stride, layer_stride, section, kv_heads, row_bytes, scaled];
        launch(device, &format!("move_tokens_{piece}"), grid, 256, args);
    }
}
