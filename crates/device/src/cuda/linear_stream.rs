//! Products with weights in any form by Folio's own kernels: few rows at the speed of memory
//! (`kernels/linear_stream.cuh`), many rows without a library (`kernels/linear_tile.cu`), f32
//! (`kernels/linear_f32.cu`), and quantized weights made plain (`kernels/dequantize.cu`).
//!
//! A streamed product's bits depend on the row and the weight alone: k is cut into slices by the
//! weight's shape, and the number of rows decides only how many columns of the matrix instruction
//! are used.

use half::bf16;

use super::driver::{Device, Kernel, KernelArg, Launch, args};
use super::launch;
use super::linear_few::Finish;
use super::rows::activation_number;
use super::tensor::Float;
use super::weight::{CHUNK, CHUNK_BYTES, Code, Coded, Form, Run, Weight};
use crate::Activation;

/// Slices are chosen for this number of multiprocessors on any device: the bits are the same
/// everywhere.
const MULTIPROCESSORS: usize = 132;
/// Warps of the narrowest kernels that a multiprocessor holds.
const WARPS: usize = 24;
/// Most rows that streaming pays for; beyond 16 the weight is read twice.
pub(super) const STREAMED_ROWS: usize = 32;

/// Mirrors `Levels` of linear.cuh.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Levels {
    low: [u32; 4],
    high: [u32; 4],
}

const _: () = assert!(size_of::<Levels>() == 32);

/// Mirrors `StreamArgs` of linear_stream.cuh.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct StreamArgs {
    out: u64,
    x: u64,
    weights: u64,
    scales: u64,
    factors: u64,
    bias: u64,
    m: i32,
    n: i32,
    k: i32,
    out_stride: i32,
    finish: i32,
    slices: i32,
    group_quarters: i32,
    offset: u32,
    levels: Levels,
    scale: f32,
    activation: i32,
    alpha: f32,
    limit: f32,
}

const _: () = assert!(size_of::<StreamArgs>() == 128);

// SAFETY: repr(C), numbers and addresses only, as in linear_stream.cuh.
unsafe impl KernelArg for StreamArgs {}

/// Rows to multiply and the destination of the result; addresses are on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    /// Address of the output, `[m, n]` for the whole weight.
    pub out: u64,
    pub out_float: Float,
    /// Address of the input, `[m, k]` in the type that the weight is multiplied with.
    pub x: u64,
    /// Address of the bias, `[n]` f32, or 0.
    pub bias: u64,
    pub m: usize,
}

/// Kernels and geometry for a streamed run.
pub(super) struct Streamed {
    slices: usize,
    tiles: usize,
    /// Kernels by ascending number of columns.
    variants: Vec<Variant>,
    /// The gating kernel of eight columns, if there is one.
    gated: Option<Variant>,
}

/// One kernel with its geometry.
struct Variant {
    kernel: Kernel,
    /// Rows of x that a block takes.
    tokens: usize,
    warps: usize,
    shared_bytes: u32,
    /// Blocks that run at a time on the whole device.
    resident: usize,
}

impl Streamed {
    /// None for weights that cannot be streamed: f32, and rows that 16-byte copies do not fit.
    pub fn new(device: &Device, form: &Form, outputs: usize, inputs: usize) -> Option<Self> {
        if *form == Form::Plain(Float::F32) || !inputs.is_multiple_of(8) || outputs == 0 || inputs == 0 {
            return None;
        }
        let shape = Shape::of(form, outputs, inputs);
        let variants = [1, 2]
            .into_iter()
            .filter_map(|columns| shape.variant(device, &format!("stream_{}_{columns}", form.stream_stem()), columns));
        let variants = variants.collect();
        // The gating kernel selects halves of packed tiles.
        let gates = matches!(form, Form::Coded(Coded { code: Code::Nibble { .. }, .. }))
            && matches!(form.stream_stem(), "int4" | "int4_by128")
            && outputs.is_multiple_of(64);
        let gated =
            gates.then(|| shape.variant(device, &format!("stream_{}_1_gated", form.stream_stem()), 1)).flatten();
        Some(Self { slices: shape.slices, tiles: shape.tiles, variants, gated })
    }

    fn variant(&self, m: usize) -> &Variant {
        let fits = self.variants.iter().find(|variant| variant.tokens >= m);
        fits.or(self.variants.last()).expect("every device holds a kernel of eight columns")
    }
}

/// Properties of a run that decide its geometry; constants as in linear_stream.cuh.
struct Shape {
    /// Outputs of a tile.
    rows: usize,
    tiles: usize,
    slices: usize,
    stage_bytes: usize,
    stages: usize,
    /// Blocks of a multiprocessor, as far as there is work for them.
    wanted: usize,
}

impl Shape {
    fn of(form: &Form, outputs: usize, inputs: usize) -> Self {
        let (rows, chunk, lane_bytes, stages) = match form {
            Form::Plain(_) => (16, CHUNK / 2, 0, 4),
            Form::Float8 { .. } => (16, CHUNK, 4, 2),
            Form::Coded(coded) => (coded.rows(), CHUNK, coded.lane_bytes(), 2),
        };
        let (tiles, chunks) = (outputs.div_ceil(rows), inputs.div_ceil(chunk));
        // Measured on an H200: more blocks help only for codes of bytes.
        let most = if chunk == CHUNK && rows == 16 { 3 } else { 2 };
        let wanted = tiles.div_ceil(MULTIPROCESSORS).clamp(1, most);
        // At most the number of chunks, but the same few for all short rows.
        let slices = (WARPS / wanted).min(if chunks >= 24 {
            24
        } else if chunks >= 12 {
            12
        } else {
            8
        });
        Self { rows, tiles, slices, stage_bytes: CHUNK_BYTES + 32 * lane_bytes, stages, wanted }
    }

    fn shared_bytes(&self, columns: usize, warps: usize) -> usize {
        warps * self.stages * self.stage_bytes + 2 * self.slices * self.rows * (8 * columns + 2) * 4
    }

    /// The geometry with the most active warps; none if no block fits.
    fn variant(&self, device: &Device, name: &str, columns: usize) -> Option<Variant> {
        let kernel = device.kernel(name);
        let most = if columns == 1 { WARPS } else { 16 };
        let candidates = (1..=self.slices).map(|parts| self.slices.div_ceil(parts)).filter(|warps| *warps <= most);
        let geometry = |warps: usize| {
            let shared_bytes = u32::try_from(self.shared_bytes(columns, warps)).ok()?;
            if shared_bytes > device.info().shared_bytes {
                return None;
            }
            let blocks = kernel.blocks_per_multiprocessor(device, 32 * warps as u32, shared_bytes) as usize;
            let busy = blocks.min(self.wanted);
            (blocks > 0).then_some((busy * warps, busy, warps, blocks, shared_bytes))
        };
        let (_, _, warps, blocks, shared_bytes) = candidates.filter_map(geometry).max()?;
        let resident = blocks * device.info().multiprocessors as usize;
        Some(Variant { kernel, tokens: 8 * columns, warps, shared_bytes, resident })
    }
}

impl Run {
    /// Arguments that all kernels of a run share.
    fn arguments(&self, inputs: usize) -> StreamArgs {
        let mut call = StreamArgs {
            weights: self.buffer.ptr(),
            scales: self.scales(),
            factors: self.factors(),
            n: self.outputs as i32,
            k: inputs as i32,
            group_quarters: 4,
            ..StreamArgs::default()
        };
        if let Form::Coded(coded) = &self.form {
            call.group_quarters = coded.quarters() as i32;
            match coded.code {
                Code::Byte => {}
                Code::Nibble { least } => {
                    let offset = u32::from(bf16::from_f32(f32::from(least) - 128.0).to_bits());
                    call.offset = offset | offset << 16;
                }
                Code::Table(levels) => {
                    for (code, level) in levels.iter().enumerate() {
                        let [low, high] = level.to_le_bytes();
                        call.levels.low[code / 4] |= u32::from(low) << (8 * (code % 4));
                        call.levels.high[code / 4] |= u32::from(high) << (8 * (code % 4));
                    }
                }
            }
        }
        call
    }

    /// Arguments for a product of all of `weight`; this run computes its own outputs.
    pub fn product_arguments(&self, weight: &Weight, call: &Call, slices: usize) -> StreamArgs {
        StreamArgs {
            out: call.out + (self.first * call.out_float.bytes()) as u64,
            x: call.x,
            bias: if call.bias == 0 { 0 } else { call.bias + 4 * self.first as u64 },
            m: call.m as i32,
            out_stride: weight.n as i32,
            finish: i32::from(call.out_float == Float::F32),
            slices: slices as i32,
            ..self.arguments(weight.k)
        }
    }

    fn stream(&self, device: &Device, streamed: &Streamed, weight: &Weight, call: &Call, finish: Finish) {
        let mut variant = streamed.variant(call.m);
        let mut arguments = self.product_arguments(weight, call, streamed.slices);
        match finish {
            Finish::Write(_) => {}
            Finish::Add(scale) => (arguments.finish, arguments.scale) = (2, scale),
            Finish::Gate(activation) => {
                variant = streamed.gated.as_ref().expect("only what can be gated is");
                (arguments.activation, arguments.alpha, arguments.limit) = activation_number(activation);
                arguments.out_stride /= 2;
            }
        }
        let blocks = streamed.tiles.min(variant.resident);
        let grid = [blocks as u32, call.m.div_ceil(variant.tokens) as u32, 1];
        let (threads, shared_bytes) = (32 * variant.warps as u32, variant.shared_bytes);
        device.launch(&variant.kernel, Launch { grid, threads, shared_bytes, overlap: true }, args![arguments]);
    }
}

/// Computes the product by streaming kernels; false if they cannot, and nothing was queued.
pub(super) fn stream(device: &Device, weight: &Weight, call: &Call) -> bool {
    stream_and(device, weight, call, Finish::Write(call.out_float))
}

/// Like [`stream`], with a finishing operation; gated products have eight rows at most.
pub(super) fn stream_and(device: &Device, weight: &Weight, call: &Call, finish: Finish) -> bool {
    let runs = weight.runs();
    let gates = match finish {
        // The error function is left to the separate gate kernel.
        Finish::Gate(Activation::Gelu) => false,
        Finish::Gate(_) => call.m <= 8 && matches!(runs, [Run { streamed: Some(Streamed { gated: Some(_), .. }), .. }]),
        _ => true,
    };
    if !gates || weight.float != Float::Bf16 || runs.iter().any(|run| run.streamed.is_none()) {
        return false;
    }
    for run in runs {
        run.stream(device, run.streamed.as_ref().expect("checked"), weight, call, finish);
    }
    true
}

/// Writes the weight's values to `to`: bf16 `[n, k]`.
pub(super) fn dequantize(device: &Device, weight: &Weight, to: u64) {
    for run in weight.runs() {
        let out = to + (run.first * weight.k * 2) as u64;
        let call = StreamArgs { out, ..run.arguments(weight.k) };
        let grid = [8 * device.info().multiprocessors, 1, 1];
        launch(device, &format!("dequantize_{}", run.form.stem()), grid, 256, args![call]);
    }
}

/// `out[r] = weight[ids[r]] * scale`, f32.
pub(super) fn embed(device: &Device, weight: &Weight, out: u64, ids: u64, scale: f32, rows: usize) {
    for run in weight.runs() {
        let call = StreamArgs { out, ..run.arguments(weight.k) };
        let name = format!("embed_run_{}", run.form.stem());
        launch(device, &name, [rows as u32, 1, 1], 256, args![call, ids, run.first as u32, scale]);
    }
}

/// The product with plain bf16 values at `w`, `[n, k]`; k is a multiple of 8.
pub(super) fn tile(device: &Device, w: u64, (n, k): (usize, usize), call: &Call) {
    // Few tiles of 128 rows would leave multiprocessors idle.
    let tiles = call.m.div_ceil(128) * n.div_ceil(128);
    let rows = if call.m <= 64 || tiles < 2 * device.info().multiprocessors as usize { 64 } else { 128 };
    let kernel = device.kernel(&format!("linear_tile_{rows}"));
    let grid = [call.m.div_ceil(rows) as u32, n.div_ceil(128) as u32, 1];
    let shared_bytes = 4 * (rows as u32 + 128) * 64;
    let (m, n, k, out_f32) = (call.m as i32, n as i32, k as i32, i32::from(call.out_float == Float::F32));
    let arguments = args![call.out, call.x, w, call.bias, m, n, k, n, out_f32];
    device.launch(&kernel, Launch { grid, threads: 256, shared_bytes, overlap: true }, arguments);
}

/// The product in f32 with values at `w`, `[n, k]`; k is a multiple of 4.
pub(super) fn wide(device: &Device, w: u64, (n, k): (usize, usize), call: &Call) {
    let grid = [n.div_ceil(32) as u32, call.m.div_ceil(8) as u32, 1];
    let (m, n, k) = (call.m as i32, n as i32, k as i32);
    launch(device, "linear_f32", grid, 256, args![call.out, call.x, w, call.bias, m, n, k, n]);
}
