//! Products with quantized weights of some dozens to hundreds of rows on Hopper
//! (`kernels/gemm_coded_sm90.cu`): codes become bf16 on their way into the tensor cores, and the
//! values are never written to memory.

use std::ops::RangeInclusive;

use super::driver::{Launch, args};
use super::gemm90::Input90;
use super::linear_stream::Call;
use super::scratch::Scratch;
use super::weight::{Code, Form, Weight};
use super::{Cuda, launch};

/// Fewer rows are streamed; with more, these kernels cost more than writing out the values.
pub(super) const ROWS: RangeInclusive<usize> = 33..=MOST_ROWS;
pub(super) const MOST_ROWS: usize = 256;
/// Weight rows of a block.
const BLOCK_ROWS: usize = 128;

/// Tokens of a tile, blocks of a multiprocessor, and most slices of k.
struct Tile {
    tokens: usize,
    blocks: usize,
    most_slices: usize,
}

fn tile_for(rows: usize) -> Tile {
    match rows {
        0..=64 => Tile { tokens: 64, blocks: 2, most_slices: 4 },
        _ => Tile { tokens: 128, blocks: 1, most_slices: 2 },
    }
}

impl Tile {
    /// The most slices with which all blocks run at once.
    fn slices(&self, outputs: usize, inputs: usize, rows: usize, multiprocessors: usize) -> usize {
        let blocks = outputs.div_ceil(BLOCK_ROWS) * rows.div_ceil(self.tokens);
        let fits = |slices: &usize| {
            *slices <= self.most_slices
                && blocks * slices <= self.blocks * multiprocessors
                && 2 * slices <= inputs.div_ceil(128)
        };
        [8, 4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// As in gemm_coded_sm90.cu: bytes of codes leave room for fewer stages.
    fn shared_bytes(&self, form: &Form) -> u32 {
        let bytes = matches!(form, Form::Coded(coded) if coded.code == Code::Byte);
        let stages = if self.tokens == 64 { 4 } else { 5 } - usize::from(bytes);
        let weights = if bytes { 16_384 } else { 8_192 };
        (1024 + stages * (self.tokens * 256 + weights + 2048 + 16)) as u32
    }
}

/// First part of the kernels' names for this form; none if there are none.
fn stem(form: &Form) -> Option<&'static str> {
    match form {
        Form::Coded(coded) if !coded.by_16() => Some(form.stem()),
        _ => None,
    }
}

/// Whether there are kernels for all runs of this weight.
pub(super) fn has_kernels(weight: &Weight) -> bool {
    weight.runs().iter().all(|run| stem(&run.form).is_some()) && weight.k.is_multiple_of(32)
}

impl Cuda {
    /// Scratch memory for the rows of such a product. The first step allocates it, with any number
    /// of rows.
    pub(super) fn room_for_coded_tiles(&mut self, inputs: usize) -> Option<u64> {
        self.room(Scratch::TURNED, MOST_ROWS * inputs * 2)
    }

    /// The product of a weight that [`has_kernels`], with [`ROWS`] rows. False if there is no
    /// memory.
    pub(super) fn multiply_in_tiles(&mut self, weight: &Weight, call: &Call) -> bool {
        let (k, rows) = (weight.k, call.m);
        let Some(turned) = self.room_for_coded_tiles(k) else { return false };
        let Some(gemm) = &self.gemm90 else { return false };
        let (count, device) = (rows * k / 32, &self.device);
        launch(device, "turn_rows", [count.div_ceil(256) as u32, 1, 1], 256, args![turned, call.x, count as i64]);
        let (tile, multiprocessors) = (tile_for(rows), device.info().multiprocessors as usize);
        let x = Input90 { ptr: turned, rows: MOST_ROWS, cols: k };
        let x_map = gemm.input_map(device, x, tile.tokens as u32);
        for run in weight.runs() {
            let slices = tile.slices(run.outputs, k, rows, multiprocessors);
            let arguments = run.product_arguments(weight, call, slices);
            let kernel = device.kernel(&format!("gemm90_{}_n{}", stem(&run.form).expect("checked"), tile.tokens));
            let blocks = run.outputs.div_ceil(BLOCK_ROWS) * slices;
            let shape = Launch {
                grid: [blocks as u32, rows.div_ceil(tile.tokens) as u32, 1],
                threads: 288,
                shared_bytes: tile.shared_bytes(&run.form),
                overlap: true,
            };
            device.launch_in_clusters(&kernel, shape, slices as u32, args![x_map, arguments]);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_fill_the_device_once() {
        let cases = [
            ((4096, 4096, 64), 4),
            ((6144, 4096, 64), 4),
            ((28672, 4096, 64), 1),
            ((4096, 4096, 100), 2),
            ((4096, 14336, 256), 2),
            ((6144, 4096, 256), 1),
            ((128, 256, 40), 1),
        ];
        for ((outputs, inputs, rows), expected) in cases {
            let slices = tile_for(rows).slices(outputs, inputs, rows, 132);
            assert_eq!(slices, expected, "{rows} rows of [{outputs}, {inputs}]");
        }
    }
}
