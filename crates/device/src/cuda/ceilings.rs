//! Measured peaks of a GPU: bytes read and copied, and operations of its matrix units, per second.
//! Benches compare their rates with them.

use std::sync::Arc;

use super::blas::{Blas, Operands, Product};
use super::driver::{self, Buffer, Device, args};
use super::launch;
use super::tensor::Float;
use crate::Result;

/// Rows, columns and inner dimension of the product whose rate counts as the peak.
const SIDE: usize = 8192;
/// The best of this number of repetitions counts.
const REPEATS: usize = 5;

/// Rates per second; 0 if this build or device cannot measure one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub read_bytes: f64,
    /// Bytes copied, counted once as read and once as written.
    pub copy_bytes: f64,
    pub bf16_flops: f64,
    pub fp8_flops: f64,
}

pub struct Ceilings {
    // This field is first, because it must be dropped before the device.
    blas: Option<Blas>,
    /// Two buffers of the same size, for copies from one to the other.
    buffers: [Buffer; 2],
    /// Operands and the result of a product.
    operands: [Buffer; 3],
    scales: Buffer,
    device: Arc<Device>,
}

impl Ceilings {
    /// `bytes` should be many times the size of the device's cache.
    pub fn new(ordinal: usize, bytes: usize) -> Result<Self> {
        let device = Arc::new(Device::open(&driver::CudaConfig { ordinal, cache_folder: None })?);
        let half = bytes / 2;
        let buffers = [device.alloc("a buffer to read", half)?, device.alloc("a buffer to write", half)?];
        let matrix = || device.alloc("a matrix of a measurement", SIDE * SIDE * 2);
        let operands = [matrix()?, matrix()?, matrix()?];
        let scales = device.alloc_from("scales of a measurement", &vec![1.0f32; SIDE])?;
        let blas = Blas::open(&device).ok();
        Ok(Self { blas, buffers, operands, scales, device })
    }

    pub fn measure(&mut self) -> Result<Rates> {
        let mut best = Rates::default();
        for _ in 0..REPEATS {
            let (bytes, device) = (self.buffers[0].bytes(), &self.device);
            let (count, grid) = ((bytes / 16) as i64, [8 * device.info().multiprocessors, 1, 1]);
            let [from, to] = self.buffers.each_ref().map(Buffer::ptr);
            let read = timed(device, || launch(device, "read_bytes", grid, 512, args![from, to, count]))?;
            let copy = timed(device, || launch(device, "copy_bytes", grid, 512, args![to, from, count]))?;
            best.read_bytes = best.read_bytes.max(bytes as f64 / read);
            best.copy_bytes = best.copy_bytes.max(2.0 * bytes as f64 / copy);
        }
        best.bf16_flops = self.product(Operands::Bf16)?;
        let scales = self.scales.ptr();
        if self.device.info().capability >= (8, 9) {
            best.fp8_flops = self.product(Operands::Float8 { x_scales: scales, w_scales: scales })?;
        }
        Ok(best)
    }

    /// On random values: zeros take less power and run faster than any real data.
    fn product(&mut self, operands: Operands) -> Result<f64> {
        let (device, Some(blas)) = (&self.device, &mut self.blas) else { return Ok(0.0) };
        let [x, w, out] = self.operands.each_ref().map(Buffer::ptr);
        let (count, grid) = ((SIDE * SIDE) as i64, [16 * device.info().multiprocessors, 1, 1]);
        for (seed, operand) in [(1u64, x), (2, w)] {
            match operands {
                Operands::Bf16 => launch(device, "random_bf16", grid, 256, args![operand, count, seed, 1.0f32]),
                _ => launch(device, "random_e4m3", grid, 256, args![operand, count, seed]),
            }
        }
        let (m, n, k) = (SIDE, SIDE, SIDE);
        let product = Product { out, x, w, bias: 0, m, n, k, operands, out_float: Float::Bf16 };
        let mut best = 0.0f64;
        for _ in 0..REPEATS {
            let mut done = true;
            let seconds = timed(device, || done = blas.multiply(&product))?;
            if done {
                best = best.max(2.0 * (SIDE as f64).powi(3) / seconds);
            }
        }
        Ok(best)
    }
}

/// Seconds that the device takes for the queued work.
fn timed(device: &Device, queue: impl FnOnce()) -> Result<f64> {
    let (begin, end) = (device.timing_event()?, device.timing_event()?);
    device.record(&begin, driver::Stream::Compute);
    queue();
    device.record(&end, driver::Stream::Compute);
    end.synchronize()?;
    device.check()?;
    Ok(f64::from(begin.elapsed_ms(&end)?) / 1e3)
}
