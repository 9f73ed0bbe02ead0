//! Operations on each row by itself: geometry and arguments of the kernels in norm.cu, rows.cu and
//! qkv.cu.

use super::driver::{Device, KernelArg, args};
use super::inputs::Inputs;
use super::kv::{Kv, format_number};
use super::tensor::{Float, Tensor, Vector, optional};
use super::{Cuda, launch};
use crate::{Activation, KvFormat, NormSpan, PrepareQkv};

/// Widest row that a block keeps in registers.
const NORM_WIDTH: usize = 8192;

/// From this number of rows on, one block per row is enough.
const MANY_ROWS: usize = 512;

fn blocks(count: usize, each: usize) -> u32 {
    count.div_ceil(each) as u32
}

/// Threads of a norm over rows of this width, and the ending of its kernel's name.
fn norm_shape(width: usize) -> (u32, &'static str) {
    let threads = (width.div_ceil(8).next_multiple_of(32)).clamp(32, 1024) as u32;
    (threads, if width.is_multiple_of(4) && width <= NORM_WIDTH { "" } else { "_wide" })
}

pub(super) fn rms_norm(device: &Device, out: &Tensor, x: &Tensor, weight: &Vector, eps: f32, rows: usize) {
    let width = weight.len();
    x.check("a norm's input", rows, width);
    out.check("a norm's output", rows, width);
    let (threads, suffix) = norm_shape(width);
    let name = format!("rms_norm_{}_{}{suffix}", x.float().name(), out.float().name());
    launch(device, &name, [rows as u32, 1, 1], threads, args![out.ptr(), x.ptr(), weight.ptr(), eps, width as i32]);
}

/// `residual += x * scale; out = rms_norm(residual)`.
#[expect(clippy::too_many_arguments)]
pub(super) fn add_rms_norm(
    device: &Device,
    out: &Tensor,
    residual: &Tensor,
    x: &Tensor,
    scale: f32,
    weight: &Vector,
    eps: f32,
    rows: usize,
) {
    let width = weight.len();
    [(x, "a branch"), (out, "a norm's output"), (residual, "the residual")]
        .iter()
        .for_each(|(tensor, what)| tensor.check(what, rows, width));
    if residual.float() != Float::F32 {
        add(device, residual, x, scale, rows);
        rms_norm(device, out, residual, weight, eps, rows);
        return;
    }
    let (threads, suffix) = norm_shape(width);
    let name = format!("add_rms_norm_{}_{}{suffix}", x.float().name(), out.float().name());
    let grid = [rows as u32, 1, 1];
    launch(
        device,
        &name,
        grid,
        threads,
        args![out.ptr(), residual.ptr(), x.ptr(), scale, weight.ptr(), eps, width as i32],
    );
}

pub(super) fn add(device: &Device, target: &Tensor, x: &Tensor, scale: f32, rows: usize) {
    target.check("a sum", rows, x.cols());
    x.check("an addend", rows, x.cols());
    let count = rows * x.cols();
    let name = format!("add_{}_{}", target.float().name(), x.float().name());
    launch(device, &name, [blocks(count, 1024), 1, 1], 256, args![target.ptr(), x.ptr(), scale, count as u32]);
}

pub(super) fn gate(device: &Device, out: &Tensor, gate_up: &Tensor, activation: Activation, rows: usize) {
    let width = out.cols();
    gate_up.check("gate and up", rows, 2 * width);
    out.check("gated", rows, width);
    let (number, alpha, limit) = activation_number(activation);
    let name = format!("gate_{}", out.float().name());
    let grid = [blocks(width, 1024), rows as u32, 1];
    launch(device, &name, grid, 128, args![out.ptr(), gate_up.ptr(), number, alpha, limit, width as i32]);
}

/// The number of an activation in the kernels, with its constants.
pub(super) fn activation_number(activation: Activation) -> (i32, f32, f32) {
    match activation {
        Activation::Silu => (0, 0.0, 0.0),
        Activation::Gelu => (1, 0.0, 0.0),
        Activation::GeluTanh => (2, 0.0, 0.0),
        Activation::SwigluClamped { alpha, limit } => (3, alpha, limit),
    }
}

pub(super) fn add_gated(device: &Device, out: &Tensor, x: &Tensor, gate: &Tensor, rows: usize) {
    let width = x.cols();
    out.check("a gated sum", rows, width);
    x.check("a gated addend", rows, width);
    gate.check("a gate", rows, 1);
    let name = match (out.float(), gate.float()) {
        (Float::Bf16, Float::F32) => "add_gated_bf16_scores",
        (Float::Bf16, Float::Bf16) => "add_gated_bf16",
        (Float::F32, _) => "add_gated_f32",
    };
    let grid = [blocks(width, 1024), rows as u32, 1];
    launch(device, name, grid, 256, args![out.ptr(), x.ptr(), gate.ptr(), width as i32]);
}

pub(super) fn gather(device: &Device, out: &Tensor, x: &Tensor, inputs: &Inputs) {
    let (width, outputs) = (x.cols(), inputs.size().outputs);
    out.check("gathered rows", outputs, width);
    assert_eq!(out.float(), x.float(), "gathered rows are of the type they had");
    let name = format!("gather_rows_{}", x.float().name());
    let grid = [blocks(width, 1024), outputs as u32, 1];
    launch(device, &name, grid, 256, args![out.ptr(), x.ptr(), inputs.outputs(), width as i32]);
}

pub(super) fn finish_logits(device: &Device, logits: &Tensor, scale: f32, soft_cap: Option<f32>, rows: usize) {
    logits.check("logits", rows, logits.cols());
    assert_eq!(logits.float(), Float::F32, "logits are f32");
    let count = rows * logits.cols();
    let grid = [blocks(count, 1024), 1, 1];
    launch(device, "finish_logits", grid, 256, args![logits.ptr(), scale, soft_cap.unwrap_or(0.0), count as i64]);
}

pub(super) fn rope_angles(device: &Device, inputs: &mut Inputs, rope: usize, inv_freq: &Vector, magnitude: f32) {
    let (cos, sin) = inputs.set_rope(rope, inv_freq);
    let pairs = inv_freq.len();
    let count = inputs.size().rows * pairs;
    let grid = [blocks(count, 256), 1, 1];
    let positions = inputs.positions();
    launch(
        device,
        "rope_angles",
        grid,
        256,
        args![cos, sin, positions, inv_freq.ptr(), magnitude, pairs as i32, count as i32],
    );
}

/// Mirrors `PrepareQkvArgs`.
#[derive(Clone, Copy)]
#[repr(C)]
struct PrepareQkvArgs {
    qkv: u64,
    kv: u64,
    slots: u64,
    cos: u64,
    sin: u64,
    q_norm: u64,
    k_norm: u64,
    block_stride: i64,
    layer_offset: i64,
    value_offset: i64,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    pairs: i32,
    eps: f32,
    row_span: i32,
    format: i32,
    padding: i32,
}

const _: () = assert!(size_of::<PrepareQkvArgs>() == 112);

// SAFETY: repr(C), numbers and addresses only, as in qkv.cu.
unsafe impl KernelArg for PrepareQkvArgs {}

/// The kernel, and the number of heads per block.
fn prepare_kernel(float: Float, head_dim: usize, pairs: usize, format: KvFormat) -> (&'static str, usize) {
    let multiples =
        |of_head: usize, of_pairs: usize| head_dim.is_multiple_of(of_head) && pairs.is_multiple_of(of_pairs);
    match float {
        Float::Bf16 if head_dim <= 128 && multiples(8, 4) && format != KvFormat::Int4 => ("prepare_qkv_bf16_fast", 16),
        Float::Bf16 if head_dim <= 256 && multiples(4, 2) => ("prepare_qkv_bf16_256", 8),
        Float::Bf16 => ("prepare_qkv_bf16_any", 8),
        Float::F32 => ("prepare_qkv_f32_any", 8),
    }
}

pub(super) fn prepare_qkv(
    device: &Device,
    qkv: &Tensor,
    kv: &Kv,
    layer: usize,
    op: &PrepareQkv<'_, Cuda>,
    inputs: &Inputs,
) {
    let (rows, heads) = (inputs.size().rows, op.heads + 2 * op.kv_heads);
    qkv.check("queries, keys and values", rows, heads * op.head_dim);
    assert_eq!((op.kv_heads, op.head_dim), (kv.shape.kv_heads, kv.shape.head_dim), "heads of the op and of storage");
    assert!(op.head_dim <= 512, "a head of {} values; the kernels take 512", op.head_dim);
    let (cos, sin, pairs) = op.rope.map_or((0, 0, 0), |rope| inputs.rope(rope));
    let row_span = op.norm_span == NormSpan::Row && (op.q_norm.is_some() || op.k_norm.is_some());
    let call = PrepareQkvArgs {
        qkv: qkv.ptr(),
        kv: kv.buffer.ptr(),
        slots: inputs.slots(op.group),
        cos,
        sin,
        q_norm: optional(op.q_norm),
        k_norm: optional(op.k_norm),
        block_stride: kv.block_stride() as i64,
        layer_offset: kv.layer_offset(layer) as i64,
        value_offset: kv.section() as i64,
        heads: op.heads as i32,
        kv_heads: op.kv_heads as i32,
        head_dim: op.head_dim as i32,
        pairs: pairs as i32,
        eps: op.eps,
        row_span: i32::from(row_span),
        format: format_number(kv.shape.format),
        padding: 0,
    };
    let (name, each) = prepare_kernel(qkv.float(), op.head_dim, pairs, kv.shape.format);
    // A norm over whole rows needs a row in one block; many rows fill the device that way too, and
    // read less.
    let one_block = row_span || rows >= MANY_ROWS;
    let grid = [rows as u32, if one_block { 1 } else { blocks(heads, each) }, 1];
    launch(device, name, grid, 256, args![call]);
}
