//! Which attention kernel runs, and on how much of a step.
//!
//! Rows alone in their span are decoded, split by split of their keys, and merged; the rows of prompt chunks are done in
//! tiles. On Hopper a kernel of its own does the tiles, unless bits are not to depend on how a prompt was cut: then, and
//! elsewhere, the kernel of the splits does both, and a row gets the same bits from either. What neither takes (f32
//! activations, formats and head sizes that are rare) goes row by row to a plain one.

use super::driver::{Device, KernelArg, Launch, TensorMap, args};
use super::inputs::Inputs;
use super::kv::Kv;
use super::scratch::Scratch;
use super::tensor::{Float, Tensor, optional};
use super::work::{self, TILE_ROWS, TileRule, WorkKey};
use super::{Cuda, launch};
use crate::{Attention, KvFormat};

/// Head sizes that the kernels with matrix instructions were made for.
const MMA_HEADS: [usize; 6] = [64, 80, 96, 128, 192, 256];
/// The same of Hopper's, and the shared memory that each takes.
const HOPPER_HEADS: [(usize, u32); 4] = [(64, 99_488), (96, 197_792), (128, 197_792), (256, 197_792)];

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

// SAFETY: repr(C), numbers and addresses only, as in attention.cuh.
unsafe impl KernelArg for AttentionArgs {}

/// Which kernels do a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Road {
    /// Splits by matrix instructions; tiles by Hopper's kernel where there is one.
    Matrix {
        hopper_shared: Option<u32>,
    },
    Plain,
}

fn road(device: &Device, float: Float, kv: &Kv, op: &Attention<'_, Cuda>, batch_invariant: bool) -> Road {
    let (format, head_dim) = (kv.shape.format, op.head_dim);
    let matrix = float == Float::Bf16
        && matches!(format, KvFormat::BF16 | KvFormat::Fp8 | KvFormat::Int8)
        && MMA_HEADS.contains(&head_dim);
    if !matrix {
        return Road::Plain;
    }
    let width = (op.heads + 2 * op.kv_heads) * head_dim;
    let hopper = device.info().capability == (9, 0)
        && format == KvFormat::BF16
        && !batch_invariant
        && op.scale > 0.0
        && width.is_multiple_of(8)
        && kv.map.is_some();
    let known = HOPPER_HEADS.iter().find(|(head, _)| *head == head_dim).map(|(_, shared)| *shared);
    Road::Matrix { hopper_shared: known.filter(|_| hopper) }
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
            Road::Matrix { hopper_shared: Some(_) } => TileRule::Tokens(TILE_ROWS / group),
            Road::Matrix { hopper_shared: None } => TileRule::Packed(group),
        };
        let window = op.window.unwrap_or(0);
        let work = inputs.work(WorkKey { window, tiles });
        let ([first_row, num_rows, context], [first_block, blocks]) = (inputs.spans(), inputs.tables(op.group));
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
                let name = format!("attention_plain_{}_{format}", qkv.float().name());
                let grid = [8 * self.device.info().multiprocessors, 1, 1];
                launch(&self.device, &name, grid, 128, args![call]);
            }
            Road::Matrix { hopper_shared } => {
                if work.tiles_now > 0 {
                    match (hopper_shared, &kv.map) {
                        (Some(shared), Some(map)) => self.hopper_tiles(&call, op.head_dim, shared, map),
                        _ => self.tiles(&call, op.head_dim, kv.shape.format),
                    }
                }
                // A recorded step is replayed with other contexts, so nothing of it may hang on this one's.
                if work.splits_now > 0 || inputs.decodes() {
                    (call.work, call.num_work) = (work.splits, work.num_splits);
                    // Room for the partial results of the largest step there can be.
                    let items = work::most_splits(inputs.limits());
                    let bytes = items * op.heads * (op.head_dim + 4) * size_of::<f32>();
                    let Some(partial) = self.room(Scratch::PARTIAL, bytes) else { return };
                    call.partial = partial;
                    self.splits(&call, op.head_dim, kv.shape.format);
                }
            }
        }
    }

    fn splits(&self, call: &AttentionArgs, head_dim: usize, format: KvFormat) {
        let (tile, tokens) = shared_tile(head_dim, format);
        let blocks = self.device.info().multiprocessors * if format == KvFormat::BF16 { 3 } else { 4 };
        let decode = self.device.kernel(&format!("attention_decode_{}_{head_dim}", format.name()));
        let shared_bytes = 4 * tile + 64 * tokens;
        let shape = Launch { grid: [blocks, 1, 1], threads: 128, shared_bytes, overlap: true };
        self.device.launch(&decode, shape, args![*call]);
        let blocks = 4 * self.device.info().multiprocessors;
        launch(&self.device, "attention_merge_bf16", [blocks, 1, 1], 128, args![*call]);
    }

    fn tiles(&self, call: &AttentionArgs, head_dim: usize, format: KvFormat) {
        let (tile, _) = shared_tile(head_dim, format);
        let chunk = self.device.kernel(&format!("attention_chunk_{}_{head_dim}", format.name()));
        let grid = [self.device.info().multiprocessors, 1, 1];
        let shape = Launch { grid, threads: 256, shared_bytes: 4 * tile, overlap: true };
        self.device.launch(&chunk, shape, args![*call]);
    }

    fn hopper_tiles(&self, call: &AttentionArgs, head_dim: usize, shared_bytes: u32, map: &TensorMap) {
        let chunk = self.device.kernel(&format!("attention_chunk_bf16_{head_dim}_sm90"));
        let grid = [self.device.info().multiprocessors, 1, 1];
        let shape = Launch { grid, threads: 384, shared_bytes, overlap: true };
        self.device.launch(&chunk, shape, args![*call, *map]);
    }
}

/// Bytes of a tile of keys in shared memory, and its tokens, as attention_mma.cu has them.
fn shared_tile(head_dim: usize, format: KvFormat) -> (u32, u32) {
    let (head, tokens) = (head_dim as u32, if head_dim <= 128 { 64 } else { 32 });
    let row = match format {
        KvFormat::BF16 => 2 * head + 16,
        _ => head + if (head / 16).is_multiple_of(2) { 16 } else { 0 } + 4,
    };
    (tokens * row, tokens)
}
