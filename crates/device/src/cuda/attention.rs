//! Chooses the attention kernels of a step, and the rows that each of them computes.
//!
//! Rows alone in their span, and each row of a tree, are decoded, split by split of their keys; the
//! rows of prompt chunks are computed in tiles. Hopper has its own kernels for tiles: a fast one
//! and, for bits that must not depend on how a prompt was cut, one that gives a row the bits it
//! gets from splits. Elsewhere the kernel of the splits computes both, with the same bits. Anything
//! else (f32 activations, rare formats and head sizes) goes row by row to a plain kernel.

use super::driver::{Device, KernelArg, Launch, TensorMap, args};
use super::inputs::Inputs;
use super::kv::Kv;
use super::scratch::Scratch;
use super::tensor::{Float, Tensor, optional};
use super::work::{self, TILE_ROWS, TileRule, WorkKey};
use super::{Cuda, launch};
use crate::{Attention, Error, InputLimits, KvFormat, Result};

/// Largest head of the kernels with matrix instructions, and the factor of its size.
const MMA_HEAD: (usize, usize) = (256, 16);
/// Most pairs of a span and a KV head with merged splits.
const MOST_MERGED: usize = 65_536;
/// Head sizes that Hopper's kernels were made for, and the shared memory that each takes.
const HOPPER_HEADS: [(usize, u32); 4] = [(64, 99_488), (96, 197_792), (128, 197_792), (256, 197_792)];
const HOPPER_INVARIANT_HEADS: [(usize, u32); 3] = [(64, 115_872), (96, 214_176), (128, 230_560)];

/// Most bytes of the next weight to prefetch into the device's cache while attention runs.
const MOST_FETCHED: usize = 32 << 20;

/// Ok if the splits of this number of spans can be counted.
pub(super) fn check_merges(spans: usize, kv_heads: usize) -> Result<()> {
    if spans.saturating_mul(kv_heads) <= MOST_MERGED {
        return Ok(());
    }
    let what =
        format!("{spans} sequences at once with {kv_heads} kv heads (at most {} with so many)", MOST_MERGED / kv_heads);
    Err(Error::Unsupported { backend: "cuda", what })
}

/// Mirrors `AttentionArgs`.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttentionArgs {
    out: u64,
    qkv: u64,
    kv: u64,
    sinks: u64,
    first_row: u64,
    num_rows: u64,
    context: u64,
    first_block: u64,
    blocks: u64,
    work: u64,
    num_work: u64,
    partial: u64,
    ancestors: u64,
    ahead: u64,
    ahead_bytes: i64,
    block_stride: i64,
    layer_offset: i64,
    value_offset: i64,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    qkv_width: i32,
    scale: f32,
    soft_cap: f32,
    window: i32,
    partial_rows: i32,
}

const _: () = assert!(size_of::<AttentionArgs>() == 176);

// SAFETY: repr(C), numbers and addresses only, as in attention.cuh.
unsafe impl KernelArg for AttentionArgs {}

/// The kernels that compute a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Road {
    /// Splits by matrix instructions; tiles by Hopper's kernel if there is one.
    Matrix {
        hopper: Option<Hopper>,
    },
    Plain,
}

/// One of Hopper's kernels for tiles, and the shared memory that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hopper {
    kind: &'static str,
    shared_bytes: u32,
}

impl Hopper {
    fn of(head_dim: usize, scale: f32, batch_invariant: bool) -> Option<Hopper> {
        let (kind, heads): (_, &[_]) = match batch_invariant {
            // The fast kernel needs scores that grow with their product.
            false if scale > 0.0 => ("chunk", &HOPPER_HEADS),
            false => return None,
            true => ("invariant", &HOPPER_INVARIANT_HEADS),
        };
        let known = heads.iter().find(|(head, _)| *head == head_dim);
        known.map(|&(_, shared_bytes)| Hopper { kind, shared_bytes })
    }
}

fn road(device: &Device, float: Float, kv: &Kv, op: &Attention<'_, Cuda>, batch_invariant: bool) -> Road {
    let (format, head_dim) = (kv.shape.format, op.head_dim);
    let matrix = float == Float::Bf16
        && matches!(format, KvFormat::BF16 | KvFormat::Fp8 | KvFormat::Int8)
        && head_dim <= MMA_HEAD.0
        && head_dim.is_multiple_of(MMA_HEAD.1);
    if !matrix {
        return Road::Plain;
    }
    let width = (op.heads + 2 * op.kv_heads) * head_dim;
    let hopper =
        device.info().capability == (9, 0) && format == KvFormat::BF16 && width.is_multiple_of(8) && kv.map.is_some();
    Road::Matrix { hopper: Hopper::of(head_dim, op.scale, batch_invariant).filter(|_| hopper) }
}

/// Shared memory of Hopper's kernel of splits, if it computes this layer; only a Hopper device has
/// the map. The kernel takes no ancestors, and would read keys and values more than once for more
/// than eight rows.
fn hopper_splits(call: &AttentionArgs, kv: &Kv) -> Option<u32> {
    let few = call.heads / call.kv_heads <= 8;
    let rows = kv.buffer.bytes() / (kv.shape.head_dim * if kv.shape.format == KvFormat::BF16 { 2 } else { 1 });
    if kv.map.is_none() || call.ancestors != 0 || !few || rows > i32::MAX as usize {
        return None;
    }
    match (kv.shape.format, kv.shape.head_dim) {
        (KvFormat::BF16, 128) => Some(226_264),
        (KvFormat::BF16, 64) => Some(224_704),
        (_, 128) => Some(223_648),
        (_, 64) => Some(129_440),
        _ => None,
    }
}

/// Bytes of partial results: for every split of the largest step one row of sums per head, its
/// maximum and its weight.
pub(super) fn partial_bytes(limits: &InputLimits, heads: usize, head_dim: usize) -> usize {
    let row = heads * (head_dim + 4) * size_of::<f32>();
    work::most_splits(limits).saturating_mul(row)
}

impl Cuda {
    pub(super) fn attend(
        &mut self,
        out: &Tensor,
        qkv: &Tensor,
        kv: &Kv,
        layer: usize,
        op: &Attention<'_, Cuda>,
        inputs: &Inputs,
    ) {
        let rows = inputs.size().rows;
        let width = (op.heads + 2 * op.kv_heads) * op.head_dim;
        qkv.check("queries, keys and values", rows, width);
        out.check("attention's result", rows, op.heads * op.head_dim);
        assert_eq!(
            (op.kv_heads, op.head_dim),
            (kv.shape.kv_heads, kv.shape.head_dim),
            "heads of the op and of storage"
        );
        let group = op.heads / op.kv_heads;
        assert!(group * op.kv_heads == op.heads && group <= TILE_ROWS, "{} heads of {}", op.heads, op.kv_heads);
        let road = road(&self.device, qkv.float(), kv, op, self.config.batch_invariant);
        let tiles = match road {
            Road::Plain => TileRule::EachRow,
            Road::Matrix { hopper: Some(_) } => TileRule::Tokens(TILE_ROWS / group),
            Road::Matrix { hopper: None } => TileRule::Packed(group),
        };
        let window = op.window.unwrap_or(0);
        let work = inputs.work(WorkKey { window, tiles });
        let ([first_row, num_rows, context], [first_block, blocks]) = (inputs.spans(), inputs.tables(op.group));
        // The memory is mostly idle while drafts are verified, and busy while prompts are computed.
        let ahead = self.ahead.take().filter(|_| inputs.decodes()).unwrap_or_default();
        let mut call = AttentionArgs {
            out: out.ptr(),
            qkv: qkv.ptr(),
            kv: kv.buffer.ptr(),
            sinks: optional(op.sinks),
            first_row,
            num_rows,
            context,
            first_block,
            blocks,
            work: work.tiles,
            num_work: work.num_tiles,
            partial: 0,
            ancestors: 0,
            ahead: ahead.0,
            ahead_bytes: ahead.1.min(MOST_FETCHED) as i64,
            block_stride: kv.block_stride() as i64,
            layer_offset: kv.layer_offset(layer) as i64,
            value_offset: kv.section() as i64,
            heads: op.heads as i32,
            kv_heads: op.kv_heads as i32,
            head_dim: op.head_dim as i32,
            qkv_width: width as i32,
            scale: op.scale,
            soft_cap: op.soft_cap.unwrap_or(0.0),
            window: window as i32,
            partial_rows: 1,
        };
        let format = kv.shape.format.name();
        match road {
            Road::Plain => {
                call.ancestors = inputs.ancestors();
                let wide = i32::from(qkv.float() == Float::F32);
                let grid = [8 * self.device.info().multiprocessors, 1, 1];
                launch(&self.device, &format!("attention_plain_{format}"), grid, 128, args![call, wide]);
            }
            Road::Matrix { hopper } => {
                if work.tiles_now > 0 {
                    match (hopper, &kv.map) {
                        (Some(hopper), Some(map)) => self.hopper_tiles(&call, op.head_dim, hopper, map),
                        _ => self.tiles(&call, op.head_dim, kv.shape.format),
                    }
                }
                // A recorded step is replayed with other contexts, but with the same kinds of work.
                if work.splits_now > 0 {
                    (call.work, call.num_work) = (work.splits, work.num_splits);
                    call.ancestors = inputs.ancestors();
                    // Room for the partial results of the largest possible step.
                    let bytes = partial_bytes(inputs.limits(), op.heads, op.head_dim);
                    let Some(partial) = self.room(Scratch::PARTIAL, bytes) else { return };
                    call.partial = partial;
                    self.splits(&call, kv);
                }
            }
        }
    }

    fn splits(&self, call: &AttentionArgs, kv: &Kv) {
        let (format, head_dim) = (kv.shape.format, kv.shape.head_dim);
        let multiprocessors = self.device.info().multiprocessors;
        if let (Some(shared_bytes), Some(map)) = (hopper_splits(call, kv), &kv.map) {
            let decode = self.device.kernel(&format!("attention_decode_{}_{head_dim}_sm90", format.name()));
            let shape = Launch { grid: [multiprocessors, 1, 1], threads: 640, shared_bytes, overlap: true };
            self.device.launch(&decode, shape, args![*call, *map]);
            return;
        }
        let MmaShape { size, wide, narrow, .. } = MmaShape::of(head_dim);
        let decode = self.device.kernel(&format!("attention_decode_{}_{size}", format.name()));
        // A block has as many tile slots as fit with two blocks on a multiprocessor, but more than
        // a few slots only make the copies of one block wait for another's.
        let pair = 2 * if format == KvFormat::BF16 { wide } else { narrow };
        let most = if pair > 30_000 { 2 } else { 3 };
        let fixed = 5504;
        let room = self.device.info().shared_bytes + 1024;
        let places = |blocks: u32| ((room / blocks).saturating_sub(1024 + fixed) / pair).min(most);
        let blocks = if places(2) >= 2 { 2 } else { 1 };
        let shared_bytes = fixed + places(blocks) * pair;
        let grid = [blocks * multiprocessors, 1, 1];
        self.device.launch(&decode, Launch { grid, threads: 192, shared_bytes, overlap: true }, args![*call]);
    }

    fn tiles(&self, call: &AttentionArgs, head_dim: usize, format: KvFormat) {
        let MmaShape { size, tokens, wide, narrow } = MmaShape::of(head_dim);
        let grid = [2 * self.device.info().multiprocessors, 1, 1];
        let shape = |shared_bytes| Launch { grid, threads: 128, shared_bytes, overlap: true };
        if format == KvFormat::BF16 {
            let chunk = self.device.kernel(&format!("attention_chunk_bf16_{size}"));
            self.device.launch(&chunk, shape(4 * wide + 1024), args![*call]);
        } else {
            let chunk = self.device.kernel(&format!("attention_chunk_coded_{size}"));
            let is_fp8 = i32::from(format == KvFormat::Fp8);
            self.device.launch(&chunk, shape(2 * wide + 2 * narrow + 8 * tokens + 1024), args![*call, is_fp8]);
        }
    }

    fn hopper_tiles(&self, call: &AttentionArgs, head_dim: usize, hopper: Hopper, map: &TensorMap) {
        let chunk = self.device.kernel(&format!("attention_{}_bf16_{head_dim}_sm90", hopper.kind));
        let grid = [self.device.info().multiprocessors, 1, 1];
        let shape = Launch { grid, threads: 384, shared_bytes: hopper.shared_bytes, overlap: true };
        self.device.launch(&chunk, shape, args![*call, *map]);
    }
}

/// Parameters of attention_mma.cu for a head size: the size in its kernels' names, and for a tile
/// of keys in shared memory the tokens and the bytes, as bf16 and as codes.
struct MmaShape {
    size: u32,
    tokens: u32,
    wide: u32,
    narrow: u32,
}

impl MmaShape {
    fn of(head_dim: usize) -> MmaShape {
        let size = match head_dim {
            0..=64 => 64,
            65..=128 => 128,
            _ => 256,
        };
        let tokens = if size <= 128 { 64 } else { 32 };
        MmaShape { size, tokens, wide: tokens * (2 * size + 16), narrow: tokens * (size + 20) }
    }
}

#[cfg(test)]
mod tests {
    use super::check_merges;

    #[test]
    fn more_sequences_than_can_be_merged_are_refused() {
        assert!(check_merges(256, 8).is_ok() && check_merges(65_536, 1).is_ok() && check_merges(4, 0).is_ok());
        let refusal = check_merges(16_385, 4).expect_err("too many").to_string();
        assert!(refusal.contains("at most 16384"), "{refusal}");
    }
}
