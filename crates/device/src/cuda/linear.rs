//! Which kernel multiplies: by the weight's form, the number of rows and what was promised about bits.

use super::blas::{Operands, Product};
use super::driver::{Device, KernelArg, args};
use super::scratch::Scratch;
use super::tensor::{Float, Tensor, Vector, optional};
use super::weight::Weight;
use super::{Cuda, launch};

/// Mirrors `PlainArgs`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct PlainArgs {
    pub out: u64,
    pub x: u64,
    pub w: u64,
    pub bias: u64,
    /// 0: dense.
    pub offsets: u64,
    pub m: i32,
    pub n: i32,
    pub k: i32,
    pub experts: i32,
    pub out_is_f32: i32,
    pub padding: i32,
}

// SAFETY: repr(C), numbers and addresses only, as in linear_plain.cu.
unsafe impl KernelArg for PlainArgs {}

/// On plain cores: slow, and the same bits for any number of rows.
pub(super) fn plain_product(device: &Device, float: Float, call: PlainArgs) {
    let tiles = |count: i32| (count as u32).div_ceil(64);
    let extra = if call.offsets == 0 { 0 } else { call.experts as u32 };
    let grid = [tiles(call.n), tiles(call.m) + extra, 1];
    launch(device, &format!("linear_plain_{}", float.name()), grid, 256, args![call]);
}

impl Cuda {
    /// The rows' address in the type that products read; rows of the residual stream are narrowed first.
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
        if weight.float == Float::Bf16 {
            if let (Some(gemm), Some(hopper)) = (&self.gemm90, &weight.hopper)
                && (self.config.batch_invariant || self.blas.is_none() || rows <= 32)
            {
                let to = super::gemm90::Output90 { ptr: out.ptr(), is_f32: out.float() == Float::F32 };
                let most = if from == x.ptr() { x.rows() } else { self.most_rows.max(rows) };
                let x = super::gemm90::Input90 { ptr: from, rows: most, cols: k };
                gemm.linear(&self.device, to, x, hopper, bias.map(Vector::ptr), rows);
                return;
            }
            if let Some(blas) = &mut self.blas
                && !self.config.batch_invariant
            {
                let bias = bias.map_or(0, |bias| bias.ptr_as(out.float()));
                let (out, w) = ((out.ptr(), out.float()), weight.buffer.ptr());
                let product =
                    Product { out: out.0, x: from, w, bias, m: rows, n, k, operands: Operands::Bf16, out_float: out.1 };
                if blas.multiply(&product) {
                    return;
                }
            }
        }
        let call = PlainArgs {
            out: out.ptr(),
            x: from,
            w: weight.buffer.ptr(),
            bias: optional(bias),
            offsets: 0,
            m: rows as i32,
            n: n as i32,
            k: k as i32,
            experts: 0,
            out_is_f32: i32::from(out.float() == Float::F32),
            padding: 0,
        };
        plain_product(&self.device, weight.float, call);
    }
}
