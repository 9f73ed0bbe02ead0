//! Products with bf16 weights on Hopper, by Folio's own kernels (`kernels/gemm_sm90.cu`): dense and
//! by expert.
//!
//! A row's bits depend on that row and the weight alone. k is cut into slices by the weight's
//! shape, every slice is summed separately and slices are added in ascending order; the number of
//! rows decides only which kernel runs.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::driver::{Device, Element, Kernel, KernelArg, Launch, Matrix2d, Swizzle, TensorMap, args};
use super::rows::activation_number;
use super::tensor::Float;
use crate::{Activation, Result};

mod plan;
mod wide;
use plan::{
    GROUP_ROWS, Kind, MAX_EXPERTS, Plan, STEP, TOKEN_GROUP, VARIANTS, Variant, dense_plan, grouped_variant, slices,
};
use wide::{LOADED_ROWS, Wide90};

/// Mirrors `Gemm90Args`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Gemm90Args {
    out: u64,
    bias: u64,
    offsets: u64,
    w_scales: u64,
    x_scales: u64,
    rows: i32,
    n: i32,
    k: i32,
    slices: i32,
    experts: i32,
    out_is_f32: i32,
    token_group: i32,
    block_scales: i32,
    height: i32,
    activation: i32,
    alpha: f32,
    limit: f32,
}

const _: () = assert!(size_of::<Gemm90Args>() == 88);

// SAFETY: repr(C), numbers and addresses only, as in gemm_sm90.cuh.
unsafe impl KernelArg for Gemm90Args {}

/// A matrix `[n, k]` of bf16 or e4m3 on the device, or `experts` of them one after the other.
#[derive(Clone, Debug)]
pub struct Weight90 {
    map: TensorMap,
    n: u32,
    k: u32,
    slices: u32,
    experts: u32,
    float8: Option<Scales90>,
}

/// Scales of e4m3 weights, f32 on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scales90 {
    pub ptr: u64,
    /// Whether there is one for 128 outputs and 128 inputs; otherwise one per output.
    pub blocks: bool,
}

/// Rows on the device, in the weight's type. `rows` is the tensor's number; a product may use
/// fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Input90 {
    pub ptr: u64,
    pub rows: usize,
    pub cols: usize,
}

/// Address and form of a product's result.
#[derive(Clone, Copy, Debug)]
pub struct Output90 {
    pub ptr: u64,
    pub form: Form90,
}

#[derive(Clone, Copy, Debug)]
pub enum Form90 {
    /// The plain product, `[rows, n]`.
    Whole(Float),
    /// `[rows, n / 2]` of bf16: the first half of n are gates, the second ups; only if
    /// [`Gemm90::gates`] allows it.
    Gated(Activation),
}

impl Form90 {
    fn is_f32(self) -> bool {
        matches!(self, Form90::Whole(Float::F32))
    }
}

/// [`activation_number`]'s values for a product without a gate.
const NOT_GATED: (i32, f32, f32) = (-1, 0.0, 0.0);

/// The kernels, and the tensor maps of their inputs.
pub struct Gemm90 {
    kernels: Vec<Kernel>,
    float8_kernels: Vec<Kernel>,
    /// The kernel for prompts, if these kernels compute them.
    wide: Option<Wide90>,
    multiprocessors: u32,
    inputs: Mutex<HashMap<(Input90, Element, u32), TensorMap>>,
}

impl Gemm90 {
    /// Device memory that it takes if it computes prompts.
    pub const PROMPT_BYTES: usize = Wide90::BYTES;

    /// None on other architectures. `prompts`: it also computes products of thousands of rows.
    pub fn open(device: &Device, prompts: bool) -> Result<Option<Gemm90>> {
        if device.info().capability != (9, 0) {
            return Ok(None);
        }
        let load = |name: &str, variant: &Variant| {
            let kernel = device.kernel(name);
            kernel.allow_shared(device, variant.shared_bytes());
            kernel
        };
        Ok(Some(Gemm90 {
            kernels: VARIANTS.iter().map(|variant| load(variant.name, variant)).collect(),
            float8_kernels: VARIANTS.iter().map(|variant| load(&variant.float8_name(), variant)).collect(),
            wide: prompts.then(|| Wide90::open(device)).transpose()?,
            multiprocessors: device.info().multiprocessors,
            inputs: Mutex::default(),
        }))
    }

    /// Whether these kernels can multiply with a matrix of this shape.
    pub fn fits(k: usize, experts: usize) -> bool {
        k >= 8 && k.is_multiple_of(8) && experts <= MAX_EXPERTS as usize
    }

    /// A weight of `n` rows with row-major bf16 values at `ptr`.
    pub fn weight(&self, device: &Device, ptr: u64, n: usize, k: usize) -> Result<Weight90> {
        let (map, slices) = (map(device, ptr, (n, k), Element::Bf16, GROUP_ROWS)?, slices(n as u32, k as u32, STEP));
        Ok(Weight90 { map, n: n as u32, k: k as u32, slices, experts: 1, float8: None })
    }

    /// Like [`Gemm90::weight`], with e4m3 codes; k is a multiple of 16.
    pub fn float8_weight(&self, device: &Device, ptr: u64, n: usize, k: usize, scales: Scales90) -> Result<Weight90> {
        let (map, slices) = (map(device, ptr, (n, k), Element::U8, GROUP_ROWS)?, slices(n as u32, k as u32, 2 * STEP));
        Ok(Weight90 { map, n: n as u32, k: k as u32, slices, experts: 1, float8: Some(scales) })
    }

    /// `experts` matrices `[n, k]`, one after the other at `ptr`; a row uses `chosen` of them.
    pub fn experts(
        &self,
        device: &Device,
        ptr: u64,
        experts: usize,
        n: usize,
        k: usize,
        chosen: usize,
    ) -> Result<Weight90> {
        assert!(experts <= MAX_EXPERTS as usize, "{experts} experts; the kernels take {MAX_EXPERTS}");
        // Even one row's experts have tiles for most multiprocessors; a single expert per row does
        // not.
        let slices = if chosen > 1 { 1 } else { slices(n as u32, k as u32, STEP) };
        let map = map(device, ptr, (experts * n, k), Element::Bf16, GROUP_ROWS)?;
        Ok(Weight90 { map, n: n as u32, k: k as u32, slices, experts: experts as u32, float8: None })
    }

    /// `out[rows, n] = x[rows, k] * weight^T (+ bias)`.
    pub fn linear(
        &self,
        device: &Device,
        out: Output90,
        x: Input90,
        weight: &Weight90,
        bias: Option<u64>,
        rows: usize,
    ) {
        assert!(weight.float8.is_none(), "e4m3 weights take rows of e4m3");
        if let Some(wide) = self.wide.as_ref().filter(|wide| wide.serves(weight, rows, out.form)) {
            let x_map = self.input(device, x, Element::Bf16, LOADED_ROWS);
            return wide.launch(device, out, (x, x_map), weight, bias, rows);
        }
        let plan = dense_plan(weight.n, weight.slices, rows as u32, self.multiprocessors);
        self.launch(device, plan, out, (x, 0), weight, bias, 0, rows);
    }

    /// Whether the gate can be applied when a product is stored: a block has a gate and its up,
    /// each in one slice.
    pub fn gates(&self, weight: &Weight90, rows: usize, activation: Activation) -> bool {
        // The error function is left to the separate gate kernel.
        let plain = weight.float8.is_none() && !matches!(activation, Activation::Gelu);
        plain && weight.slices == 1 && dense_plan(weight.n, 1, rows as u32, self.multiprocessors).pairs(weight.n)
    }

    /// Like [`Gemm90::linear`], with e4m3 on both sides; `x_scales`: one f32 per row of x.
    #[expect(clippy::too_many_arguments)]
    pub fn float8_linear(
        &self,
        device: &Device,
        out: Output90,
        x: Input90,
        x_scales: u64,
        weight: &Weight90,
        bias: Option<u64>,
        rows: usize,
    ) {
        assert!(weight.float8.is_some(), "rows of e4m3 take e4m3 weights");
        let plan = dense_plan(weight.n, weight.slices, rows as u32, self.multiprocessors);
        self.launch(device, plan, out, (x, x_scales), weight, bias, 0, rows);
    }

    /// `out[r] = x[r] * weight[e]^T (+ bias[e])` for the rows `offsets[e]..offsets[e + 1]` of every
    /// expert e; `offsets` are u32 on the device. `rows`: the sum over all experts.
    #[expect(clippy::too_many_arguments)]
    pub fn grouped(
        &self,
        device: &Device,
        out: Output90,
        x: Input90,
        weight: &Weight90,
        bias: Option<u64>,
        offsets: u64,
        rows: usize,
    ) {
        let which = grouped_variant(rows as u32, weight.experts);
        let plan = Plan { which, height: 0, grid: [self.multiprocessors, 1] };
        self.launch(device, plan, out, (x, 0), weight, bias, offsets, rows);
    }

    #[expect(clippy::too_many_arguments)]
    fn launch(
        &self,
        device: &Device,
        Plan { which, height, grid: [x_blocks, y_blocks] }: Plan,
        out: Output90,
        (x, x_scales): (Input90, u64),
        weight: &Weight90,
        bias: Option<u64>,
        offsets: u64,
        rows: usize,
    ) {
        assert_eq!(x.cols, weight.k as usize, "columns of x and of the weight");
        assert!(rows <= x.rows, "{rows} rows of {}", x.rows);
        if rows == 0 {
            return;
        }
        let variant = &VARIANTS[which];
        let (activation, alpha, limit) = match out.form {
            Form90::Whole(_) => NOT_GATED,
            Form90::Gated(activation) => activation_number(activation),
        };
        let cluster = if variant.kind == Kind::Slices { weight.slices } else { 1 };
        let values = Gemm90Args {
            out: out.ptr,
            bias: bias.unwrap_or(0),
            offsets,
            w_scales: weight.float8.map_or(0, |scales| scales.ptr),
            x_scales,
            rows: rows as i32,
            n: weight.n as i32,
            k: weight.k as i32,
            slices: weight.slices as i32,
            experts: weight.experts as i32,
            out_is_f32: i32::from(out.form.is_f32()),
            token_group: TOKEN_GROUP,
            block_scales: i32::from(weight.float8.is_some_and(|scales| scales.blocks)),
            height: height as i32,
            activation,
            alpha,
            limit,
        };
        let shape = Launch {
            grid: [x_blocks, y_blocks, 1],
            threads: variant.threads(),
            shared_bytes: variant.shared_bytes(),
            overlap: true,
        };
        let shape = if x_blocks * y_blocks <= self.multiprocessors { shape.at_most(1, device.info()) } else { shape };
        let (kernels, element) = match weight.float8 {
            None => (&self.kernels, Element::Bf16),
            Some(_) => (&self.float8_kernels, Element::U8),
        };
        let x = self.input(device, x, element, variant.tokens);
        device.launch_in_clusters(&kernels[which], shape, cluster, args![weight.map, x, values]);
    }

    /// The map of rows of bf16, in boxes of `box_rows` by 64.
    pub fn input_map(&self, device: &Device, x: Input90, box_rows: u32) -> TensorMap {
        self.input(device, x, Element::Bf16, box_rows)
    }

    /// Tensors keep their addresses, so each map is made once.
    fn input(&self, device: &Device, x: Input90, element: Element, box_rows: u32) -> TensorMap {
        let mut inputs = self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
        *inputs.entry((x, element, box_rows)).or_insert_with(|| {
            map(device, x.ptr, (x.rows, x.cols), element, box_rows).expect("a tensor of rows of a multiple of 16 bytes")
        })
    }
}

/// Boxes are 128 bytes wide, the width of the swizzle.
fn map(device: &Device, ptr: u64, (rows, cols): (usize, usize), element: Element, box_rows: u32) -> Result<TensorMap> {
    let bytes = if element == Element::U8 { 1 } else { 2 };
    device.tensor_map_2d(&Matrix2d {
        ptr,
        rows: rows as u64,
        cols: cols as u64,
        stride_bytes: (cols * bytes) as u64,
        box_rows,
        box_cols: 128 / bytes as u32,
        element,
        swizzle: Swizzle::Bytes128,
    })
}
