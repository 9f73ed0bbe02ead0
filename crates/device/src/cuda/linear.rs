//! Matrix products on the device, each by the first path of `products.rs` that takes it.

use super::blas::{Blas, Operands, Product};
use super::driver::{Device, KernelArg, args};
use super::gemm90::{Form90, Gemm90, Input90, Output90, Weight90};
use super::linear_few::{FewCall, Finish, multiply_few};
use super::linear_stream::{Call, dequantize, stream, stream_and, tile, wide};
use super::products::{Case, Fusion, Kind, Path, fused_rows};
use super::scratch::Scratch;
use super::tensor::{Float, Tensor, Vector, optional};
use super::weight::{Form, Run, Weight};
use super::{Cuda, launch, linear_coded};
use crate::Activation;

/// Mirrors `PlainArgs`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct PlainArgs {
    pub out: u64,
    pub x: u64,
    pub w: u64,
    pub bias: u64,
    /// Address of the experts' row offsets; 0 for dense weights.
    pub offsets: u64,
    pub m: i32,
    pub n: i32,
    pub k: i32,
    pub experts: i32,
    pub out_is_f32: i32,
    pub padding: i32,
}

const _: () = assert!(size_of::<PlainArgs>() == 64);

// SAFETY: repr(C), numbers and addresses only, as in linear_plain.cu.
unsafe impl KernelArg for PlainArgs {}

/// A product on plain cores: slow, and the same bits for any number of rows.
pub(super) fn plain_product(device: &Device, float: Float, call: PlainArgs) {
    let tiles = |count: i32| (count as u32).div_ceil(64);
    let extra = if call.offsets == 0 { 0 } else { call.experts as u32 };
    let grid = [tiles(call.n), tiles(call.m) + extra, 1];
    launch(device, &format!("linear_plain_{}", float.name()), grid, 256, args![call]);
}

impl Cuda {
    /// The rows' address in the type that products read; rows of the residual stream are narrowed
    /// first.
    pub(super) fn as_operand(&mut self, x: &Tensor, rows: usize, float: Float) -> Option<u64> {
        if x.float() == float {
            return Some(x.ptr());
        }
        assert_eq!((x.float(), float), (Float::F32, Float::Bf16), "activations are not widened");
        let count = rows * x.cols();
        let narrow = self.room(Scratch::ROWS, self.most_rows.max(rows) * x.cols() * 2)?;
        let grid = [count.div_ceil(1024) as u32, 1, 1];
        launch(&self.device, "narrow_rows", grid, 256, args![narrow, x.ptr(), count as i64]);
        Some(narrow)
    }
}

/// A product that a path is tried for.
struct Attempt<'a> {
    weight: &'a Weight,
    bias: Option<&'a Vector>,
    call: Call,
    /// Rows that x has room for.
    most: usize,
}

/// The bf16 values of a weight, `[n, k]`, as they are stored or after widening.
#[derive(Clone, Copy)]
struct Values<'a> {
    ptr: u64,
    hopper: Option<&'a Weight90>,
}

impl Cuda {
    /// The facts that the table of paths asks about a product.
    pub(super) fn case(&self, weight: &Weight, fusion: Fusion, rows: usize, out: Float) -> Case {
        let kind = match (weight.plain(), weight.runs()) {
            (Some(_), _) if weight.float == Float::Bf16 => Kind::Bf16,
            (Some(_), _) => Kind::Float32,
            (None, [Run { form: Form::Float8 { blocks }, .. }]) => Kind::Float8 { blocks: *blocks },
            (None, _) => Kind::Coded { in_tiles: linear_coded::has_kernels(weight) },
        };
        Case {
            kind,
            fusion,
            rows,
            outputs: weight.n,
            inputs: weight.k,
            out_is_f32: out == Float::F32,
            batch_invariant: self.config.batch_invariant,
            float32: self.float() == Float::F32,
            library: self.blas.is_some(),
            library_scales: self.blas.as_ref().is_some_and(Blas::has_scale_vectors),
            hopper: self.gemm90.is_some() && weight.hopper.is_some(),
            on_hopper: self.gemm90.is_some(),
        }
    }

    /// Most rows of a step whose products are fused with their surroundings.
    pub(super) fn few_rows(&self) -> usize {
        fused_rows(self.config.batch_invariant, self.float() == Float::F32)
    }

    pub(super) fn multiply(&mut self, out: &Tensor, x: &Tensor, weight: &Weight, bias: Option<&Vector>, rows: usize) {
        let (n, k) = (weight.n, weight.k);
        x.check("a product's input", rows, k);
        out.check("a product's output", rows, n);
        let Some(from) = self.as_operand(x, rows, weight.float) else { return };
        let call = Call { out: out.ptr(), out_float: out.float(), x: from, bias: optional(bias), m: rows };
        let most = if from == x.ptr() { x.rows() } else { self.most_rows.max(rows) };
        let case = self.case(weight, Fusion::None, rows, out.float());
        if case.has_coded_tiles() && self.room_for_coded_tiles(k).is_none() {
            return;
        }
        let attempt = Attempt { weight, bias, call, most };
        let values = weight.plain().map(|ptr| Values { ptr, hopper: weight.hopper.as_ref() });
        // A product fails on all paths only where there is no memory, which `check` reports.
        let _ = case.paths().any(|path| self.multiply_by(path, &attempt, values));
    }

    /// The product by these kernels. False where they do not take it, and nothing was written.
    fn multiply_by(&mut self, path: Path, attempt: &Attempt<'_>, values: Option<Values<'_>>) -> bool {
        let Attempt { weight, call, most, .. } = attempt;
        let shape = (weight.n, weight.k);
        let values = || values.expect("a weight of plain values");
        match path {
            Path::Fused => {
                let &Call { out, out_float, x, bias, m } = call;
                let finish = Finish::Write(out_float);
                return multiply_few(&self.device, weight, &FewCall { out, finish, x, norm: None, bias, m });
            }
            Path::Streamed => return stream(&self.device, weight, call),
            Path::CodedTiles => return self.multiply_in_tiles(weight, call),
            Path::RoundedByLibrary | Path::RoundedByHopper => return self.multiply_rounded(path, attempt),
            Path::Widened => return self.multiply_widened(attempt),
            Path::Library => return self.multiply_by_library(attempt, values().ptr),
            Path::Hopper => {
                let (Some(gemm), Some(hopper)) = (&self.gemm90, values().hopper) else { return false };
                hopper_product(gemm, &self.device, hopper, call, (*most, weight.k));
            }
            Path::Tiled => tile(&self.device, values().ptr, shape, call),
            Path::Float32 => wide(&self.device, values().ptr, shape, call),
            Path::Plain => plain_product(&self.device, weight.float, plain_args(values().ptr, shape, call)),
        }
        true
    }

    /// A gated product of `[gate | up]`; false if no kernel does both, and nothing was queued.
    pub(super) fn multiply_gated(
        &self,
        out: &Tensor,
        x: &Tensor,
        (weight, bias): (&Weight, Option<&Vector>),
        activation: Activation,
        rows: usize,
    ) -> bool {
        x.check("a product's input", rows, weight.k);
        out.check("a gated product's output", rows, weight.n / 2);
        if x.float() != Float::Bf16 {
            return false;
        }
        let call = Call { out: out.ptr(), out_float: Float::Bf16, x: x.ptr(), bias: optional(bias), m: rows };
        self.case(weight, Fusion::Gate, rows, Float::Bf16).paths().any(|path| match path {
            Path::Streamed => stream_and(&self.device, weight, &call, Finish::Gate(activation)),
            Path::Hopper => {
                let (Some(gemm), Some(hopper)) = (&self.gemm90, &weight.hopper) else { return false };
                if !gemm.gates(hopper, rows, activation) {
                    return false;
                }
                let out = Output90 { ptr: call.out, form: Form90::Gated(activation) };
                let x = Input90 { ptr: call.x, rows: x.rows(), cols: weight.k };
                gemm.linear(&self.device, out, x, hopper, (call.bias != 0).then_some(call.bias), rows);
                true
            }
            other => unreachable!("{other:?} gates nothing"),
        })
    }

    /// Eight-bit floats on both sides, x rounded row by row.
    fn multiply_rounded(&mut self, path: Path, attempt: &Attempt<'_>) -> bool {
        let &Attempt { weight, bias, ref call, most } = attempt;
        let (n, k, m) = (weight.n, weight.k, call.m);
        let Some(x) = self.room(Scratch::ROUNDED, most * k) else { return false };
        let Some(x_scales) = self.room(Scratch::SCALES, most * 4) else { return false };
        launch(&self.device, "round_rows_e4m3", [m as u32, 1, 1], 256, args![x, x_scales, call.x, k as i32]);
        let &Call { out, out_float, .. } = call;
        if path == Path::RoundedByLibrary {
            let (Some(blas), [run]) = (&mut self.blas, weight.runs()) else { return false };
            let bias = bias.map_or(0, |bias| bias.ptr_as(out_float));
            let operands = Operands::Float8 { x_scales, w_scales: run.factors() };
            return blas.multiply(&Product { out, x, w: run.buffer.ptr(), bias, m, n, k, operands, out_float });
        }
        let (Some(gemm), Some(hopper)) = (&self.gemm90, &weight.hopper) else { return false };
        let to = Output90 { ptr: out, form: Form90::Whole(Float::Bf16) };
        let from = Input90 { ptr: x, rows: most, cols: k };
        gemm.float8_linear(&self.device, to, from, x_scales, hopper, (call.bias != 0).then_some(call.bias), m);
        true
    }

    /// The weight's values are written as bf16, then multiplied.
    fn multiply_widened(&mut self, attempt: &Attempt<'_>) -> bool {
        let weight = attempt.weight;
        let (n, k) = (weight.n, weight.k);
        let Some(ptr) = self.room(Scratch::WEIGHTS, n * k * 2) else { return false };
        dequantize(&self.device, weight, ptr);
        let gemm = self.gemm90.as_ref().filter(|_| self.blas.is_none() && Gemm90::fits(k, 1));
        let hopper = gemm.and_then(|gemm| gemm.weight(&self.device, ptr, n, k).ok());
        let case = self.case(weight, Fusion::None, attempt.call.m, attempt.call.out_float);
        let case = Case { kind: Kind::Widened, hopper: hopper.is_some(), ..case };
        let values = Some(Values { ptr, hopper: hopper.as_ref() });
        case.paths().any(|path| self.multiply_by(path, attempt, values))
    }

    fn multiply_by_library(&mut self, attempt: &Attempt<'_>, w: u64) -> bool {
        let (weight, Some(blas)) = (attempt.weight, &mut self.blas) else { return false };
        let Call { out, out_float, x, m, .. } = attempt.call;
        let bias = attempt.bias.map_or(0, |bias| bias.ptr_as(out_float));
        let (n, k) = (weight.n, weight.k);
        blas.multiply(&Product { out, x, w, bias, m, n, k, operands: Operands::Bf16, out_float })
    }
}

/// `(most, k)`: number of rows that x has room for, and its width.
fn hopper_product(gemm: &Gemm90, device: &Device, weight: &Weight90, call: &Call, (most, k): (usize, usize)) {
    let out = Output90 { ptr: call.out, form: Form90::Whole(call.out_float) };
    let x = Input90 { ptr: call.x, rows: most, cols: k };
    gemm.linear(device, out, x, weight, (call.bias != 0).then_some(call.bias), call.m);
}

fn plain_args(w: u64, (n, k): (usize, usize), call: &Call) -> PlainArgs {
    PlainArgs {
        out: call.out,
        x: call.x,
        w,
        bias: call.bias,
        offsets: 0,
        m: call.m as i32,
        n: n as i32,
        k: k as i32,
        experts: 0,
        out_is_f32: i32::from(call.out_float == Float::F32),
        padding: 0,
    }
}
