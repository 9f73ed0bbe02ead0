//! Activations and constant vectors in device memory.

use half::bf16;

use super::driver::{Buffer, Device};
use crate::{Error, Result, TensorKind};

/// Type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    Bf16,
    F32,
}

impl Float {
    pub fn bytes(self) -> usize {
        match self {
            Float::Bf16 => 2,
            Float::F32 => 4,
        }
    }

    /// Its spelling in kernels' names.
    pub fn name(self) -> &'static str {
        match self {
            Float::Bf16 => "bf16",
            Float::F32 => "f32",
        }
    }
}

/// A matrix `[rows, cols]` on the device, row by row without gaps.
pub struct Tensor {
    buffer: Buffer,
    rows: usize,
    cols: usize,
    float: Float,
}

impl Tensor {
    /// `activations`: type of tensors that may be narrow.
    pub(super) fn new(device: &Device, rows: usize, cols: usize, kind: TensorKind, activations: Float) -> Result<Self> {
        let float = match kind {
            TensorKind::Activation => activations,
            TensorKind::Stream | TensorKind::Scores => Float::F32,
        };
        let bytes = rows.checked_mul(cols).and_then(|count| count.checked_mul(float.bytes()));
        let bytes = bytes.ok_or(Error::OutOfMemory { what: "a tensor", bytes: u64::MAX })?;
        Ok(Self { buffer: device.alloc_zeroed("a tensor", bytes)?, rows, cols, float })
    }

    pub fn ptr(&self) -> u64 {
        self.buffer.ptr()
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn float(&self) -> Float {
        self.float
    }

    /// Asserts that it has this many rows of this width.
    pub(super) fn check(&self, what: &str, rows: usize, cols: usize) {
        assert!(
            rows <= self.rows && cols == self.cols,
            "{what} is [{}, {}], but [{rows}, {cols}] is asked for",
            self.rows,
            self.cols
        );
    }

    /// Copies the values to the host, and waits for them.
    pub(super) fn download(&self, device: &Device, rows: usize, out: &mut Vec<f32>) -> Result<()> {
        self.check("downloaded", rows, self.cols);
        let count = rows * self.cols;
        out.clear();
        match self.float {
            Float::F32 => {
                out.resize(count, 0.0);
                device.download(&self.buffer, 0, out)
            }
            Float::Bf16 => {
                let mut narrow = vec![bf16::ZERO; count];
                device.download(&self.buffer, 0, &mut narrow)?;
                out.extend(narrow.iter().map(|value| value.to_f32()));
                Ok(())
            }
        }
    }

    pub(super) fn upload(&self, device: &Device, values: &[f32]) -> Result<()> {
        let cols = self.cols.max(1);
        assert!(values.len().is_multiple_of(cols), "{} values in rows of {cols}", values.len());
        self.check("uploaded", values.len() / cols, self.cols);
        match self.float {
            Float::F32 => device.upload(&self.buffer, 0, values),
            Float::Bf16 => {
                let narrow: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
                device.upload(&self.buffer, 0, &narrow)
            }
        }
    }
}

/// Constant f32 values, and the same in bf16 for libraries that need them in their results' type.
pub struct Vector {
    buffer: Buffer,
    narrow: Buffer,
    len: usize,
}

impl Vector {
    pub(super) fn new(device: &Device, values: &[f32]) -> Result<Self> {
        let narrow: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
        let (buffer, narrow) = (device.alloc_from("a vector", values)?, device.alloc_from("a vector", &narrow)?);
        Ok(Self { buffer, narrow, len: values.len() })
    }

    /// Bytes of a vector of this length.
    pub fn bytes_of(len: usize) -> u64 {
        (len * (Float::F32.bytes() + Float::Bf16.bytes())) as u64
    }

    pub fn ptr_as(&self, float: Float) -> u64 {
        match float {
            Float::F32 => self.buffer.ptr(),
            Float::Bf16 => self.narrow.ptr(),
        }
    }

    pub fn ptr(&self) -> u64 {
        self.buffer.ptr()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// The vector's address, or null.
pub(super) fn optional(vector: Option<&Vector>) -> u64 {
    vector.map_or(0, Vector::ptr)
}
