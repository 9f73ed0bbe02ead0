//! Weights on the device (provisional: values alone, no codes).

use folio_formats::Matrix;

use super::driver::{Buffer, Device};
use super::tensor::Float;
use crate::cuda::Precision;
use crate::{ExpertsSource, Result};

pub struct Weight {
    pub(super) buffer: Buffer,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) float: Float,
    pub(super) hopper: Option<super::gemm90::Weight90>,
}

impl Weight {
    pub(super) fn new(
        device: &Device,
        gemm: Option<&super::gemm90::Gemm90>,
        matrix: &Matrix<'_>,
        float: Float,
        random: Option<u64>,
    ) -> Result<Self> {
        let (n, k) = (matrix.num_rows(), matrix.cols());
        let buffer = match random {
            Some(seed) => super::experts::random_matrix(device, n, k, float, seed)?,
            None => super::experts::upload(device, std::slice::from_ref(matrix), float)?,
        };
        let fits = float == Float::Bf16 && super::gemm90::Gemm90::fits(k, 1);
        let hopper = gemm.filter(|_| fits).map(|gemm| gemm.weight(device, buffer.ptr(), n, k)).transpose()?;
        Ok(Self { buffer, n, k, float, hopper })
    }

    pub fn bytes(&self) -> u64 {
        self.buffer.bytes() as u64
    }
}

/// Bytes that a matrix will take.
pub fn packed_bytes(matrix: &Matrix<'_>, precision: Precision) -> u64 {
    let value = match precision {
        Precision::BF16 => 2,
        Precision::F32 => 4,
    };
    (matrix.num_rows() * matrix.cols() * value) as u64
}

/// Bytes that a layer's experts will take, biases included.
pub fn packed_experts_bytes(source: &ExpertsSource<'_>, precision: Precision) -> u64 {
    let matrices: u64 = source.gate_up.iter().chain(&source.down).map(|matrix| packed_bytes(matrix, precision)).sum();
    let biases = source.gate_up_bias.iter().chain(&source.down_bias).flatten();
    matrices + biases.map(|bias| 4 * bias.len() as u64).sum::<u64>()
}
