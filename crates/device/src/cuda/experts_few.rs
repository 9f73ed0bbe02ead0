//! Experts of few rows on Hopper: two kernels for the whole block (`kernels/experts_few_sm90.cuh`),
//! which route by themselves and read the chosen experts' weights at the speed of memory.

use super::Cuda;
use super::driver::{Buffer, Device, Element, KernelArg, Launch, Matrix2d, Swizzle, TensorMap, args};
use super::experts::{Experts, RoutingArgs};
use super::rows::activation_number;
use super::tensor::{Float, Tensor};
use crate::{Result, Routing};

/// Most rows for these kernels, which could take eight: with so few, a step spends most of its time
/// on starting kernels.
const MOST_ROWS: usize = 2;
/// Most pairs of a row and an expert, and most experts of a row.
const MOST_PAIRS: usize = 64;
const MOST_CHOSEN: usize = 32;
/// Widest rows: a warp of the first kernel holds a row of x, and several warps of the second work
/// on one.
const MOST_HIDDEN: usize = 4096;
const MOST_INTER: usize = 4096;

/// Most experts that the kernels choose from; for more, another kernel chooses before.
const ROUTED_WITHIN: usize = 128;

/// Values of k in a stage of 16 rows of weights; eight warps have rings of three stages.
const PIECE: usize = 128;
const RING_BYTES: usize = 8 * 3 * 16 * PIECE * 2;
/// Rows of weights in a box: eight of gate and eight of up make a stage, or sixteen of down.
const BOX_ROWS: [u32; 2] = [8, 16];
const THREADS: u32 = 288;
/// Shared memory of the second kernel besides the rings and x.
const FIXED_BYTES: usize = 9600;

/// Mirrors `FewExpertsArgs` of experts_few_sm90.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct FewExpertsArgs {
    routing: RoutingArgs,
    x: u64,
    bias: u64,
    out: u64,
    hidden: i32,
    inter: i32,
    activation: i32,
    alpha: f32,
    limit: f32,
    out_f32: i32,
}

const _: () = assert!(size_of::<FewExpertsArgs>() == 152);

// SAFETY: repr(C), numbers and addresses only, as in experts_few_sm90.cuh.
unsafe impl KernelArg for FewExpertsArgs {}

/// A layer's experts as these kernels read them.
pub(super) struct Few {
    gate_up: TensorMap,
    down: TensorMap,
}

impl Few {
    /// None if the kernels cannot compute these experts, or the device is no Hopper.
    pub fn new(device: &Device, experts: &Experts) -> Result<Option<Self>> {
        let (hidden, inter) = (experts.hidden, experts.inter);
        let fits = hidden <= MOST_HIDDEN && inter <= MOST_INTER && (hidden | inter).is_multiple_of(8);
        if device.info().capability != (9, 0) || experts.float != Float::Bf16 || !fits {
            return Ok(None);
        }
        let map = |buffer: &Buffer, rows: usize, cols: usize, box_rows| {
            device.tensor_map_2d(&Matrix2d {
                ptr: buffer.ptr(),
                rows: (experts.count * rows) as u64,
                cols: cols as u64,
                stride_bytes: (cols * 2) as u64,
                box_rows,
                box_cols: PIECE as u32,
                element: Element::Bf16,
                swizzle: Swizzle::None,
            })
        };
        Ok(Some(Self {
            gate_up: map(&experts.gate_up, 2 * inter, hidden, BOX_ROWS[0])?,
            down: map(&experts.down, hidden, inter, BOX_ROWS[1])?,
        }))
    }
}

/// Shared memory of the second kernel, with x behind the rings.
fn down_bytes(pairs: usize, inter: usize) -> usize {
    RING_BYTES + pairs * (inter.next_multiple_of(PIECE) * 2 + 64)
}

impl Cuda {
    /// Computes the experts with the kernels for few rows; false if they cannot, and nothing was
    /// queued. `gated` is room for `inter` values of every pair; only very many experts need the
    /// lists of `routing`.
    pub(super) fn few_experts(
        &self,
        out: &Tensor,
        x: u64,
        gated: u64,
        experts: &Experts,
        op: &Routing<'_, Cuda>,
        routing: RoutingArgs,
    ) -> bool {
        let Some(few) = &experts.few else { return false };
        let (hidden, inter, rows) = (experts.hidden, experts.inter, routing.rows as usize);
        let (pairs, info) = (rows * op.top_k, self.device.info());
        let fits = down_bytes(pairs, inter) + FIXED_BYTES <= info.shared_bytes as usize;
        // The order of sums differs from that for many rows.
        if self.config.batch_invariant || rows > MOST_ROWS || pairs > MOST_PAIRS || op.top_k > MOST_CHOSEN || !fits {
            return false;
        }
        if rows == 0 {
            return true;
        }
        if experts.count > ROUTED_WITHIN {
            self.route(&routing);
        }
        let (activation, alpha, limit) = activation_number(op.activation);
        let bias = |buffer: &Option<Buffer>| buffer.as_ref().map_or(0, Buffer::ptr);
        let gate_up = FewExpertsArgs {
            routing,
            x,
            bias: bias(&experts.gate_up_bias),
            out: gated,
            hidden: hidden as i32,
            inter: inter as i32,
            activation,
            alpha,
            limit,
            out_f32: 0,
        };
        let down = FewExpertsArgs {
            x: gated,
            bias: bias(&experts.down_bias),
            out: out.ptr(),
            out_f32: i32::from(out.float() == Float::F32),
            ..gate_up
        };
        let first = if hidden <= MOST_HIDDEN / 2 { "few_gate_up_1" } else { "few_gate_up_2" };
        let tiles = (hidden.div_ceil(16) as u32).min(2 * info.multiprocessors);
        // One block a multiprocessor leaves room for the second kernel, which loads its weights
        // meanwhile.
        self.launch_few(first, info.multiprocessors, RING_BYTES, few.gate_up, gate_up);
        self.launch_few("few_down", tiles, down_bytes(pairs, inter), few.down, down);
        true
    }

    fn launch_few(&self, name: &str, blocks: u32, shared_bytes: usize, map: TensorMap, call: FewExpertsArgs) {
        let shared_bytes = shared_bytes as u32;
        let launch = Launch { grid: [blocks, 1, 1], threads: THREADS, shared_bytes, overlap: true };
        self.device.launch(&self.device.kernel(name), launch, args![map, call]);
    }
}
