//! Matrix products of many rows by cuBLASLt, which is loaded when the backend starts and may be
//! missing.
//!
//! `out[m, n] = x[m, k] . w[n, k]^T`: in the library's columns, `n x m = (k x n)^T . (k x m)`.
//! Calls of one shape share a description, into which the changing values (addresses, the number of
//! rows) are written. The algorithm is the library's own first choice for a rounded-up number of
//! rows, so that the same call has the same bits in every process.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use super::driver::{Buffer, CudaError, Device, Library, Stream};
use super::tensor::Float;
use crate::Result;

pub(super) const WORKSPACE: usize = 32 << 20;
const ADVICE: &str = "prompts take longer without it";
const FILES: &[&str] = &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

/// Element types of a product's two inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Operands {
    Bf16,
    /// e4m3 with one f32 scale a row of x and one a row of w.
    Float8 {
        x_scales: u64,
        w_scales: u64,
    },
}

/// One product; addresses are on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub out: u64,
    pub x: u64,
    pub w: u64,
    /// Address of the bias, in the type of the output's values.
    pub bias: u64,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub operands: Operands,
    pub out_float: Float,
}

/// Properties of a product that share one description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    n: usize,
    k: usize,
    /// Kind of the operands, without their addresses.
    operands: u8,
    out_float: Float,
    bias: bool,
}

type Handle = *mut c_void;
type Status = c_int;

/// Descriptions for a call, made once per shape.
struct Plan {
    description: Handle,
    w: Handle,
    x: Handle,
    out: Handle,
    algorithm: Algorithm,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Algorithm([u64; 8]);

#[derive(Clone, Copy)]
#[repr(C)]
struct Heuristic {
    algorithm: Algorithm,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// The functions of cublasLt.h that are used.
struct Functions {
    description_create: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Status,
    description_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    layout_create: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Status,
    layout_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    preference_create: unsafe extern "C" fn(*mut Handle) -> Status,
    preference_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status,
    preference_destroy: unsafe extern "C" fn(Handle) -> Status,
    heuristic: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Heuristic,
        *mut c_int,
    ) -> Status,
    matmul: unsafe extern "C" fn(
        Handle,
        Handle,
        *const f32,
        u64,
        Handle,
        u64,
        Handle,
        *const f32,
        u64,
        Handle,
        u64,
        Handle,
        *const Algorithm,
        u64,
        usize,
        *mut c_void,
    ) -> Status,
    message: unsafe extern "C" fn(Status) -> *const std::ffi::c_char,
}

mod constant {
    use std::ffi::c_int;

    pub const COMPUTE_32F: c_int = 68;
    pub const R_32F: c_int = 0;
    pub const R_16BF: c_int = 14;
    pub const R_8F_E4M3: c_int = 28;
    pub const DESC_TRANSA: c_int = 3;
    pub const DESC_EPILOGUE: c_int = 7;
    pub const DESC_BIAS_POINTER: c_int = 8;
    pub const DESC_A_SCALE_POINTER: c_int = 17;
    pub const DESC_B_SCALE_POINTER: c_int = 18;
    pub const DESC_FAST_ACCUM: c_int = 25;
    pub const DESC_A_SCALE_MODE: c_int = 31;
    pub const DESC_B_SCALE_MODE: c_int = 32;
    pub const SCALE_OUTER_VEC_32F: c_int = 3;
    pub const EPILOGUE_BIAS: c_int = 4;
    pub const TRANSPOSE: c_int = 1;
    pub const LAYOUT_COLS: c_int = 3;
    pub const PREF_MAX_WORKSPACE: c_int = 1;
    /// The first version with vectors as scales.
    pub const OUTER_VECTORS_SINCE: usize = 120_900;
}
use constant as c;

pub(super) struct Blas {
    functions: Functions,
    handle: Handle,
    device: Arc<Device>,
    workspace: Buffer,
    plans: HashMap<Shape, Option<Plan>>,
    version: usize,
}

// SAFETY: handles of a library that may be used from any thread, one at a time.
unsafe impl Send for Blas {}

impl Blas {
    /// An error if the library is missing or unusable.
    pub fn open(device: &Arc<Device>) -> Result<Blas> {
        let library = Library::open("cuBLASLt", FILES, ADVICE)?;
        // SAFETY: the types are those of cublasLt.h, the same since CUDA 11.
        let functions = unsafe {
            Functions {
                description_create: library.function("cublasLtMatmulDescCreate")?,
                description_set: library.function("cublasLtMatmulDescSetAttribute")?,
                layout_create: library.function("cublasLtMatrixLayoutCreate")?,
                layout_set: library.function("cublasLtMatrixLayoutSetAttribute")?,
                preference_create: library.function("cublasLtMatmulPreferenceCreate")?,
                preference_set: library.function("cublasLtMatmulPreferenceSetAttribute")?,
                preference_destroy: library.function("cublasLtMatmulPreferenceDestroy")?,
                heuristic: library.function("cublasLtMatmulAlgoGetHeuristic")?,
                matmul: library.function("cublasLtMatmul")?,
                message: library.function("cublasLtGetStatusString")?,
            }
        };
        // SAFETY: as above.
        let create: unsafe extern "C" fn(*mut Handle) -> Status = unsafe { library.function("cublasLtCreate")? };
        // SAFETY: as above.
        let version: unsafe extern "C" fn() -> usize = unsafe { library.function("cublasLtGetVersion")? };
        device.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the device is current; writes one handle.
        functions.check(unsafe { create(&mut handle) }, "cublasLtCreate")?;
        let workspace = device.alloc("the workspace of matrix products", WORKSPACE)?;
        // SAFETY: no preconditions.
        let version = unsafe { version() };
        Ok(Blas { functions, handle, device: Arc::clone(device), workspace, plans: HashMap::new(), version })
    }

    /// In the library's notation: 10000 * major + 100 * minor + patch.
    pub fn version(&self) -> usize {
        self.version
    }

    pub fn has_scale_vectors(&self) -> bool {
        self.version >= c::OUTER_VECTORS_SINCE && self.device.info().capability >= (9, 0)
    }

    /// Queues the product; false if the library has no algorithm for it, and nothing was queued.
    pub fn multiply(&mut self, product: &Product) -> bool {
        let shape = Shape {
            rows: bucket(product.m),
            n: product.n,
            k: product.k,
            operands: match product.operands {
                Operands::Bf16 => 0,
                Operands::Float8 { .. } => 2,
            },
            out_float: product.out_float,
            bias: product.bias != 0,
        };
        if !self.plans.contains_key(&shape) {
            let plan = self.plan(&shape, product);
            self.plans.insert(shape, plan.ok());
        }
        let Some(Some(plan)) = self.plans.get(&shape) else { return false };
        self.run(plan, product).is_ok()
    }

    fn plan(&self, shape: &Shape, product: &Product) -> Result<Plan> {
        let f = &self.functions;
        let element = match product.operands {
            Operands::Bf16 => c::R_16BF,
            Operands::Float8 { .. } => c::R_8F_E4M3,
        };
        let out_element = if shape.out_float == Float::Bf16 { c::R_16BF } else { c::R_32F };
        let mut plan = Plan {
            description: ptr::null_mut(),
            w: ptr::null_mut(),
            x: ptr::null_mut(),
            out: ptr::null_mut(),
            algorithm: Algorithm([0; 8]),
        };
        // SAFETY: each call writes one handle, which lives as long as the library. A plan is made
        // once per shape, so a failure leaks a few handles and no more.
        unsafe {
            f.check(
                (f.description_create)(&mut plan.description, c::COMPUTE_32F, c::R_32F),
                "cublasLtMatmulDescCreate",
            )?;
            let (n, k, m) = (shape.n as u64, shape.k as u64, shape.rows as u64);
            for (layout, element, rows, cols) in
                [(&mut plan.w, element, k, n), (&mut plan.x, element, k, m), (&mut plan.out, out_element, n, m)]
            {
                f.check((f.layout_create)(layout, element, rows, cols, rows as i64), "cublasLtMatrixLayoutCreate")?;
            }
        }
        f.describe(&plan, c::DESC_TRANSA, &c::TRANSPOSE)?;
        if shape.bias {
            f.describe(&plan, c::DESC_EPILOGUE, &c::EPILOGUE_BIAS)?;
        }
        if let Operands::Float8 { .. } = product.operands {
            f.describe(&plan, c::DESC_A_SCALE_MODE, &c::SCALE_OUTER_VEC_32F)?;
            f.describe(&plan, c::DESC_B_SCALE_MODE, &c::SCALE_OUTER_VEC_32F)?;
            f.describe(&plan, c::DESC_FAST_ACCUM, &1i8)?;
        }
        self.address(&plan, product)?;
        plan.algorithm = self.choose(&plan)?;
        Ok(plan)
    }

    /// The library's first choice of an algorithm.
    fn choose(&self, plan: &Plan) -> Result<Algorithm> {
        let f = &self.functions;
        let mut preference = ptr::null_mut();
        let mut found =
            Heuristic { algorithm: Algorithm([0; 8]), workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut count = 0;
        // SAFETY: handles of this library; writes one preference, at most one result and their
        // number.
        let status = unsafe {
            f.check((f.preference_create)(&mut preference), "cublasLtMatmulPreferenceCreate")?;
            let bytes = WORKSPACE;
            (f.preference_set)(preference, c::PREF_MAX_WORKSPACE, (&raw const bytes).cast(), size_of::<usize>());
            let status = (f.heuristic)(
                self.handle,
                plan.description,
                plan.w,
                plan.x,
                plan.out,
                plan.out,
                preference,
                1,
                &mut found,
                &mut count,
            );
            (f.preference_destroy)(preference);
            status
        };
        f.check(status, "cublasLtMatmulAlgoGetHeuristic")?;
        f.check(found.state, "cublasLtMatmulAlgoGetHeuristic")?;
        match count {
            0 => Err(failed("cublasLtMatmulAlgoGetHeuristic", "no algorithm".to_owned())),
            _ => Ok(found.algorithm),
        }
    }

    /// Writes the values that change from call to call.
    fn address(&self, plan: &Plan, product: &Product) -> Result<()> {
        let f = &self.functions;
        if product.bias != 0 {
            f.describe(plan, c::DESC_BIAS_POINTER, &product.bias)?;
        }
        if let Operands::Float8 { x_scales, w_scales } = product.operands {
            f.describe(plan, c::DESC_A_SCALE_POINTER, &w_scales)?;
            f.describe(plan, c::DESC_B_SCALE_POINTER, &x_scales)?;
        }
        Ok(())
    }

    fn run(&self, plan: &Plan, product: &Product) -> Result<()> {
        let f = &self.functions;
        self.address(plan, product)?;
        let m = product.m as u64;
        let (alpha, beta) = (1.0f32, 0.0f32);
        self.device.bind()?;
        // SAFETY: handles of this library; by the callers' checks the addresses are of tensors and
        // weights with at least the described shapes; the workspace has the size in the preference.
        let status = unsafe {
            for layout in [plan.x, plan.out] {
                f.check(
                    (f.layout_set)(layout, c::LAYOUT_COLS, (&raw const m).cast(), 8),
                    "cublasLtMatrixLayoutSetAttribute",
                )?;
            }
            (f.matmul)(
                self.handle,
                plan.description,
                &alpha,
                product.w,
                plan.w,
                product.x,
                plan.x,
                &beta,
                product.out,
                plan.out,
                product.out,
                plan.out,
                &plan.algorithm,
                self.workspace.ptr(),
                WORKSPACE,
                self.device.raw_stream(Stream::Compute).cast(),
            )
        };
        f.check(status, "cublasLtMatmul")
    }
}

impl Functions {
    fn describe<T: Copy>(&self, plan: &Plan, attribute: c_int, value: &T) -> Result<()> {
        // SAFETY: a description of this library, and a value of the attribute's size, which is
        // copied.
        let status =
            unsafe { (self.description_set)(plan.description, attribute, (&raw const *value).cast(), size_of::<T>()) };
        self.check(status, "cublasLtMatmulDescSetAttribute")
    }

    fn check(&self, status: Status, what: &'static str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: a constant string for any status.
        let text = unsafe { std::ffi::CStr::from_ptr((self.message)(status)) };
        Err(failed(what, text.to_string_lossy().into_owned()))
    }
}

fn failed(what: &'static str, message: String) -> crate::Error {
    CudaError::Library { library: "cuBLASLt", what, message }.into()
}

/// Rounds up a number of rows; one algorithm serves each result.
fn bucket(m: usize) -> usize {
    match m {
        0..=256 => m.next_multiple_of(8),
        257..=1024 => m.next_multiple_of(64),
        1025..=4096 => m.next_multiple_of(256),
        _ => m.next_multiple_of(1024),
    }
}
