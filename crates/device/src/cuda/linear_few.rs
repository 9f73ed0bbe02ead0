//! Products of one row that also normalize their input, gate their output or add it to the residual
//! stream (`kernels/linear_few.cuh`): the weights they take, and their geometry.
//!
//! Their sums differ from those of the streaming kernels in the last bits, so they are not used if
//! bits must not depend on the number of rows.

use super::Cuda;
use super::driver::{Device, Kernel, KernelArg, Launch, args};
use super::linear_stream::{Call, stream_and};
use super::products::{FUSED_ROWS, Fusion, Path};
use super::rows::activation_number;
use super::tensor::{Float, Tensor, Vector, optional};
use super::weight::{CHUNK, CHUNK_BYTES, Form, Run, Weight};
use crate::Activation;

/// Constants of linear_few.cuh.
const ROWS: usize = 16;
const MOST_WARPS: usize = 16;
const FEWEST_WARPS: usize = 8;

/// Mirrors `FewArgs` of linear_few.cuh.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct FewArgs {
    out: u64,
    x: u64,
    weights: u64,
    scales: u64,
    factors: u64,
    bias: u64,
    norm: u64,
    m: i32,
    n: i32,
    k: i32,
    out_stride: i32,
    finish: i32,
    eps: f32,
    scale: f32,
    activation: i32,
    alpha: f32,
    limit: f32,
}

const _: () = assert!(size_of::<FewArgs>() == 96);

// SAFETY: repr(C), numbers and addresses only, as in linear_few.cuh.
unsafe impl KernelArg for FewArgs {}

/// Destination of a product's result.
#[derive(Clone, Copy, Debug)]
pub(super) enum Finish {
    Write(Float),
    /// Added to f32 values, times this.
    Add(f32),
    /// Outputs `[gate | up]` become half as many bf16.
    Gate(Activation),
}

/// Rows to multiply and the destination of the result; addresses are on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct FewCall {
    pub out: u64,
    pub finish: Finish,
    /// Address of the input, `[m, k]` of bf16; of f32 if it is normalized.
    pub x: u64,
    /// Weights `[k]` of f32, and the constant added to the mean of squares.
    pub norm: Option<(u64, f32)>,
    /// Address of the bias, `[n]` f32, or 0.
    pub bias: u64,
    pub m: usize,
}

/// Kernels and geometry for a run.
pub(super) struct Few {
    kernel: Kernel,
    /// For weights with one half of gates and one of ups.
    gated: Option<Kernel>,
    warps: usize,
    tiles: usize,
    /// By the number of rows, from one on: shared memory of a block, and blocks that run at a time
    /// on the device.
    geometry: Vec<(u32, u32)>,
}

impl Few {
    /// None for weights that these kernels cannot multiply.
    pub fn new(device: &Device, form: &Form, outputs: usize, inputs: usize) -> Option<Self> {
        let shape = Shape::of(form, outputs, inputs)?;
        let kernel = device.kernel(&format!("few_{}", form.stream_stem()));
        let gated = shape.gated.then(|| device.kernel(&format!("few_{}_gated", form.stream_stem())));
        let geometry = (1..=FUSED_ROWS).map_while(|rows| {
            let shared_bytes = u32::try_from(shape.shared_bytes(rows)).ok()?;
            if shared_bytes > device.info().shared_bytes {
                return None;
            }
            let threads = 32 * shape.warps as u32;
            let kernels = gated.iter().chain([&kernel]);
            let blocks = kernels.map(|kernel| kernel.blocks_per_multiprocessor(device, threads, shared_bytes)).min()?;
            let wanted = blocks.min(shape.wanted);
            (wanted > 0).then_some((shared_bytes, wanted * device.info().multiprocessors))
        });
        let geometry = geometry.collect();
        Some(Self { kernel, gated, warps: shape.warps, tiles: shape.tiles, geometry })
    }
}

/// Properties of a run that decide its geometry; constants as in linear_few.cuh.
#[derive(Debug, PartialEq, Eq)]
struct Shape {
    tiles: usize,
    /// Inputs of a chunk, and the number of chunks.
    chunk: usize,
    chunks: usize,
    slot_bytes: usize,
    /// Chunks that a warp has in flight.
    stages: usize,
    warps: usize,
    /// Wanted number of blocks per multiprocessor.
    wanted: u32,
    /// The halves of the outputs are aligned so that they can be gated.
    gated: bool,
}

impl Shape {
    fn of(form: &Form, outputs: usize, inputs: usize) -> Option<Self> {
        if outputs == 0 || inputs == 0 || !inputs.is_multiple_of(8) {
            return None;
        }
        // Stages as in linear_few.cu; blocks as measured on an H200.
        let (chunk, lane_bytes, stages, wanted) = match form {
            Form::Plain(Float::Bf16) => (CHUNK / 2, 0, 4, 1),
            Form::Float8 { .. } => (CHUNK, 4, 2, 2),
            _ => return None,
        };
        let gated = *form != Form::Float8 { blocks: true } && outputs.is_multiple_of(2);
        let (tiles, chunks) = (outputs.div_ceil(ROWS), inputs.div_ceil(chunk));
        // The number of warps with the fewest idle in the last turn.
        let idle = |warps: &usize| (chunks.next_multiple_of(*warps) * 1000 / chunks, usize::MAX - warps);
        let warps = (FEWEST_WARPS..=MOST_WARPS).min_by_key(idle)?;
        let slot_bytes = CHUNK_BYTES + 32 * lane_bytes;
        Some(Self { tiles, chunk, chunks, slot_bytes, stages, warps, wanted, gated })
    }

    /// Shared memory of a block: the ring, rows of x, sums, and sums of squares.
    fn shared_bytes(&self, m: usize) -> usize {
        let (ring, x) = (self.warps * self.stages * self.slot_bytes, self.chunks * m * self.chunk * 2);
        let sums = 2 * self.warps * ROWS * m.next_multiple_of(2) * 4;
        ring + x + sums + m * MOST_WARPS * 4
    }
}

impl Run {
    fn multiply_few(&self, device: &Device, few: &Few, weight: &Weight, call: &FewCall) {
        let (shared_bytes, resident) = few.geometry[call.m - 1];
        let mut arguments = FewArgs {
            x: call.x,
            weights: self.buffer.ptr(),
            scales: self.scales(),
            factors: self.factors(),
            bias: if call.bias == 0 { 0 } else { call.bias + 4 * self.first as u64 },
            m: call.m as i32,
            n: self.outputs as i32,
            k: weight.k as i32,
            out_stride: weight.n as i32,
            ..FewArgs::default()
        };
        if let Some((norm, eps)) = call.norm {
            (arguments.norm, arguments.eps) = (norm, eps);
        }
        let (mut kernel, mut value_bytes) = (&few.kernel, 4);
        match call.finish {
            Finish::Write(float) => {
                (arguments.finish, value_bytes) = (i32::from(float == Float::F32), float.bytes());
            }
            Finish::Add(scale) => (arguments.finish, arguments.scale) = (2, scale),
            Finish::Gate(activation) => {
                kernel = few.gated.as_ref().expect("only what can be gated is");
                (arguments.activation, arguments.alpha, arguments.limit) = activation_number(activation);
                arguments.out_stride /= 2;
            }
        }
        arguments.out = call.out + (self.first * value_bytes) as u64;
        let grid = [resident.min(few.tiles as u32), 1, 1];
        let launch = Launch { grid, threads: 32 * few.warps as u32, shared_bytes, overlap: true };
        device.launch(kernel, launch, args![arguments]);
    }
}

/// Computes the product by the kernels of few rows; false if they cannot, and nothing was queued.
pub(super) fn multiply_few(device: &Device, weight: &Weight, call: &FewCall) -> bool {
    let runs = weight.runs();
    let takes = |run: &Run| run.few.as_ref().is_some_and(|few| (1..=few.geometry.len()).contains(&call.m));
    let gates = match call.finish {
        // The error function is left to the separate gate kernel.
        Finish::Gate(Activation::Gelu) => false,
        Finish::Gate(_) => matches!(runs, [Run { few: Some(Few { gated: Some(_), .. }), .. }]),
        _ => true,
    };
    if weight.float != Float::Bf16 || !gates || !runs.iter().all(takes) {
        return false;
    }
    for run in runs {
        run.multiply_few(device, run.few.as_ref().expect("checked"), weight, call);
    }
    true
}

impl Cuda {
    /// A product of normalized rows of the residual stream, written or gated; false if no kernel
    /// does both.
    pub(super) fn multiply_normed(
        &mut self,
        (out, finish): (&Tensor, Finish),
        x: &Tensor,
        (norm, eps): (&Vector, f32),
        (weight, bias): (&Weight, Option<&Vector>),
        rows: usize,
    ) -> bool {
        assert_eq!(norm.len(), weight.k, "a norm's weights, and what is read");
        x.check("a product's input", rows, weight.k);
        out.check("a product's output", rows, if matches!(finish, Finish::Gate(_)) { weight.n / 2 } else { weight.n });
        if x.float() != Float::F32 {
            return false;
        }
        let case = self.case(weight, Fusion::Norm, rows, out.float());
        let (out, bias, norm) = (out.ptr(), optional(bias), Some((norm.ptr(), eps)));
        let call = FewCall { out, finish, x: x.ptr(), norm, bias, m: rows };
        case.paths().any(|path| match path {
            Path::Fused => multiply_few(&self.device, weight, &call),
            other => unreachable!("{other:?} norms nothing"),
        })
    }

    /// A product that is added to the residual stream; false if no kernel does both.
    pub(super) fn multiply_added(
        &mut self,
        residual: &Tensor,
        x: &Tensor,
        (weight, bias): (&Weight, Option<&Vector>),
        scale: f32,
        rows: usize,
    ) -> bool {
        x.check("a product's input", rows, weight.k);
        residual.check("the residual", rows, weight.n);
        if x.float() != Float::Bf16 || residual.float() != Float::F32 {
            return false;
        }
        let case = self.case(weight, Fusion::Add, rows, Float::F32);
        let (out, bias, finish) = (residual.ptr(), optional(bias), Finish::Add(scale));
        let call = Call { out, out_float: Float::F32, x: x.ptr(), bias, m: rows };
        case.paths().any(|path| match path {
            Path::Fused => {
                multiply_few(&self.device, weight, &FewCall { out, finish, x: x.ptr(), norm: None, bias, m: rows })
            }
            Path::Streamed => stream_and(&self.device, weight, &call, finish),
            other => unreachable!("{other:?} adds nothing"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::weight::{Code, Coded};
    use super::*;

    #[test]
    fn warps_share_the_chunks_evenly_where_they_can() {
        let warps = |form: &Form, inputs| Shape::of(form, 4096, inputs).unwrap().warps;
        let (plain, float8) = (Form::Plain(Float::Bf16), Form::Float8 { blocks: false });
        assert_eq!([4096, 14336, 5120].map(|inputs| warps(&plain, inputs)), [16, 16, 16]);
        assert_eq!([4096, 14336, 5120, 128].map(|inputs| warps(&float8, inputs)), [16, 16, 10, 8]);
    }

    #[test]
    fn what_is_not_taken() {
        let bytes = Form::Coded(Coded { code: Code::Byte, affine: false, group: 128 });
        for form in [bytes, Form::Plain(Float::F32)] {
            assert_eq!(Shape::of(&form, 64, 256), None, "{form:?}");
        }
        assert_eq!(Shape::of(&Form::Plain(Float::Bf16), 64, 252), None);
        assert!(!Shape::of(&Form::Float8 { blocks: true }, 256, 256).unwrap().gated);
        assert!(!Shape::of(&Form::Plain(Float::Bf16), 15, 256).unwrap().gated);
    }
}
