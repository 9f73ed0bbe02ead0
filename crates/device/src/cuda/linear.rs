//! Chooses the kernel of a product: by the weight's form, the number of rows and the promise about
//! bits.

use super::blas::{Blas, Operands, Product};
use super::driver::{Device, KernelArg, args};
use super::gemm90::{Form90, Gemm90, Input90, Output90, Weight90};
use super::linear_few::{FewCall, Finish, multiply_few};
use super::linear_stream::{Call, STREAMED_ROWS, dequantize, stream, stream_and, tile, wide};
use super::scratch::Scratch;
use super::tensor::{Float, Tensor, Vector, optional};
use super::weight::{Form, Run, Weight};
use super::{Cuda, launch};
use crate::Activation;

/// Quantized weights that are larger than this when widened are streamed for any number of rows:
/// the scratch memory for widened weights is allocated once, for all of them.
pub(super) const WIDENED_BYTES: usize = 512 << 20;

/// Up to this number of rows quantized weights are streamed if Hopper's kernels do not take them:
/// reading them once for every 16 rows costs less than writing their values.
const CODED_ROWS: usize = 48;

/// Up to this number of rows plain weights are streamed even if there is a library or a Hopper
/// kernel: measured on an H200, one row takes 0.85 of the library's time, eight the same, sixteen
/// more.
const FEWEST_ROWS: usize = 8;
/// Up to this number of rows Folio's Hopper kernels are faster than cuBLASLt with bf16: by 13% of a
/// step of 16 sequences of shape 8b, 9% of one of 64, 5% of one of 80, 1% of one of 96. The library
/// is faster by 1% of one of 128.
const OWN_ROWS: usize = 96;

/// Up to this number of rows weights in eight-bit floats are streamed and multiplied with unrounded
/// rows.
const ROUNDED_ROWS: usize = 16;

/// Mirrors `PlainArgs`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct PlainArgs {
    pub out: u64,
    pub x: u64,
    pub w: u64,
    pub bias: u64,
    /// 0 for dense weights.
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

impl Cuda {
    pub(super) fn multiply(&mut self, out: &Tensor, x: &Tensor, weight: &Weight, bias: Option<&Vector>, rows: usize) {
        let (n, k) = (weight.n, weight.k);
        x.check("a product's input", rows, k);
        out.check("a product's output", rows, n);
        let Some(from) = self.as_operand(x, rows, weight.float) else { return };
        let call = Call { out: out.ptr(), out_float: out.float(), x: from, bias: optional(bias), m: rows };
        if self.takes_few(rows) {
            let Call { out, out_float, x, bias, m } = call;
            let few = FewCall { out, finish: Finish::Write(out_float), x, norm: None, bias, m };
            if multiply_few(&self.device, weight, &few) {
                return;
            }
        }
        let most = if from == x.ptr() { x.rows() } else { self.most_rows.max(rows) };
        match weight.plain() {
            Some(values) if weight.float == Float::Bf16 => {
                let others = self.blas.is_some() || weight.hopper.is_some();
                let few = if others { FEWEST_ROWS } else { STREAMED_ROWS };
                let streamed = rows <= few || self.config.batch_invariant;
                match self.hopper_for(weight, rows) {
                    Some((gemm, hopper)) => hopper_product(gemm, &self.device, hopper, &call, (most, k)),
                    None if streamed && stream(&self.device, weight, &call) => {}
                    None => self.multiply_plain(values, (n, k), &call, bias),
                }
            }
            Some(values) if k.is_multiple_of(4) && call.out_float == Float::F32 => {
                wide(&self.device, values, (n, k), &call);
            }
            Some(values) => plain_product(&self.device, weight.float, plain_args(values, (n, k), &call)),
            None => self.multiply_coded(weight, &call, bias, most),
        }
    }

    /// Hopper's kernels, if they multiply this number of rows: any number if bits must not depend
    /// on it.
    fn hopper_for<'a>(&'a self, weight: &'a Weight, rows: usize) -> Option<(&'a Gemm90, &'a Weight90)> {
        let theirs = rows > FEWEST_ROWS && (rows <= OWN_ROWS || self.blas.is_none());
        self.gemm90.as_ref().zip(weight.hopper.as_ref()).filter(|_| theirs || self.config.batch_invariant)
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
        if self.takes_few(rows) {
            return stream_and(&self.device, weight, &call, Finish::Gate(activation));
        }
        match self.hopper_for(weight, rows) {
            Some((gemm, hopper)) if weight.plain().is_some() && gemm.gates(hopper, rows, activation) => {
                let out = Output90 { ptr: call.out, form: Form90::Gated(activation) };
                let x = Input90 { ptr: call.x, rows: x.rows(), cols: weight.k };
                gemm.linear(&self.device, out, x, hopper, (call.bias != 0).then_some(call.bias), rows);
                true
            }
            _ => false,
        }
    }

    /// Eight-bit floats on both sides, x rounded row by row: for many rows, and for any number if
    /// bits must not depend on it. The library multiplies, or Hopper's kernels if it is missing,
    /// has no such scales or may not be used. False if neither can, and nothing but the rounding
    /// was queued.
    fn multiply_rounded(&mut self, weight: &Weight, call: &Call, bias: Option<&Vector>, most: usize) -> bool {
        let (n, k, m) = (weight.n, weight.k, call.m);
        let [Run { form: Form::Float8 { blocks }, buffer, .. }] = weight.runs() else { return false };
        let (invariant, hopper) = (self.config.batch_invariant, self.gemm90.is_some() && weight.hopper.is_some());
        let library = !invariant && !blocks && n.is_multiple_of(16);
        let library = library && self.blas.as_ref().is_some_and(Blas::has_scale_vectors);
        let wanted = m > ROUNDED_ROWS || (invariant && hopper);
        if !wanted || !(library || hopper) || call.out_float != Float::Bf16 {
            return false;
        }
        let Some(x) = self.room(Scratch::ROUNDED, most * k) else { return false };
        let Some(x_scales) = self.room(Scratch::SCALES, most * 4) else { return false };
        launch(&self.device, "round_rows_e4m3", [m as u32, 1, 1], 256, args![x, x_scales, call.x, k as i32]);
        let Call { out, out_float, .. } = *call;
        if let (true, Some(blas)) = (library, &mut self.blas) {
            let bias = bias.map_or(0, |bias| bias.ptr_as(call.out_float));
            let operands = Operands::Float8 { x_scales, w_scales: weight.runs()[0].factors() };
            if blas.multiply(&Product { out, x, w: buffer.ptr(), bias, m, n, k, operands, out_float }) {
                return true;
            }
        }
        let (Some(gemm), Some(hopper)) = (&self.gemm90, &weight.hopper) else { return false };
        let (to, from) =
            (Output90 { ptr: out, form: Form90::Whole(Float::Bf16) }, Input90 { ptr: x, rows: most, cols: k });
        gemm.float8_linear(&self.device, to, from, x_scales, hopper, (call.bias != 0).then_some(call.bias), m);
        true
    }

    /// Quantized weights: few rows are streamed; for many the values are written out first, if
    /// there is room.
    fn multiply_coded(&mut self, weight: &Weight, call: &Call, bias: Option<&Vector>, most: usize) {
        let (n, k) = (weight.n, weight.k);
        let bytes = n * k * 2;
        if self.multiply_rounded(weight, call, bias, most) {
            return;
        }
        if self.multiply_in_tiles(weight, call) {
            return;
        }
        let streamed = call.m <= CODED_ROWS || self.config.batch_invariant || bytes > WIDENED_BYTES;
        if streamed && stream(&self.device, weight, call) {
            return;
        }
        let Some(values) = self.room(Scratch::WEIGHTS, bytes) else { return };
        dequantize(&self.device, weight, values);
        let hopper = match &self.gemm90 {
            Some(gemm) if self.blas.is_none() && Gemm90::fits(k, 1) => gemm.weight(&self.device, values, n, k).ok(),
            _ => None,
        };
        match (&self.gemm90, hopper) {
            (Some(gemm), Some(hopper)) => hopper_product(gemm, &self.device, &hopper, call, (most, k)),
            _ => self.multiply_plain(values, (n, k), call, bias),
        }
    }

    /// Many rows with bf16 values, by the library if it may be used.
    fn multiply_plain(&mut self, w: u64, (n, k): (usize, usize), call: &Call, bias: Option<&Vector>) {
        if let Some(blas) = &mut self.blas
            && !self.config.batch_invariant
        {
            let bias = bias.map_or(0, |bias| bias.ptr_as(call.out_float));
            let Call { out, out_float, x, m, .. } = *call;
            if blas.multiply(&Product { out, x, w, bias, m, n, k, operands: Operands::Bf16, out_float }) {
                return;
            }
        }
        if k.is_multiple_of(8) {
            tile(&self.device, w, (n, k), call);
        } else {
            plain_product(&self.device, Float::Bf16, plain_args(w, (n, k), call));
        }
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
