//! Descriptions of matrices in memory for the bulk copies of Hopper and later, passed to kernels by
//! value.

use cudarc::driver::sys::{
    self, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};

use super::device::Device;
use super::launch::KernelArg;
use crate::Result;

#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

// SAFETY: the driver's own layout, 128 bytes, opaque to both sides.
unsafe impl KernelArg for TensorMap {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    U8,
    U16,
    U32,
    F16,
    Bf16,
    F32,
}

/// Permutation of a box's rows in shared memory, by the bytes of a row that take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

/// A row-major matrix in device memory and the box of it that one copy moves. Elements outside the
/// matrix read as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix2d {
    /// Address of the first element, a multiple of 16.
    pub ptr: u64,
    pub rows: u64,
    pub cols: u64,
    /// Distance from one row to the next, a multiple of 16.
    pub stride_bytes: u64,
    pub box_rows: u32,
    pub box_cols: u32,
    pub element: Element,
    pub swizzle: Swizzle,
}

impl Device {
    /// If the hardware cannot describe the matrix, the error names it.
    pub fn tensor_map_2d(&self, matrix: &Matrix2d) -> Result<TensorMap> {
        self.context.bind()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (dims, strides) = ([matrix.cols, matrix.rows], [matrix.stride_bytes]);
        let (box_dims, steps) = ([matrix.box_cols, matrix.box_rows], [1, 1]);
        // SAFETY: two dimensions, one stride, all arrays alive during the call; the address is only
        // written down.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                data_type(matrix.element),
                2,
                matrix.ptr as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                box_dims.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle(matrix.swizzle),
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        if code != sys::CUresult::CUDA_SUCCESS {
            self.checked(code, &format!("describing {matrix:?} to the GPU"))?;
        }
        Ok(TensorMap(map))
    }
}

fn data_type(element: Element) -> CUtensorMapDataType {
    use CUtensorMapDataType as T;
    match element {
        Element::U8 => T::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        Element::U16 => T::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        Element::U32 => T::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        Element::F16 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Element::Bf16 => T::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Element::F32 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
}

fn swizzle(swizzle: Swizzle) -> CUtensorMapSwizzle {
    use CUtensorMapSwizzle as S;
    match swizzle {
        Swizzle::None => S::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::Bytes32 => S::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::Bytes64 => S::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::Bytes128 => S::CU_TENSOR_MAP_SWIZZLE_128B,
    }
}
