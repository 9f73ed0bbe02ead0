//! Panels of F32, F16 and BF16.

use folio_formats::Format;
use half::{bf16, f16};

use super::LANES;
use super::packing::Packing;
use super::runs::Run;

/// Packs outputs `first .. first + 32` of the run, as far as they exist.
pub fn pack_panel(run: &Run<'_, '_>, first: usize, target: &mut [u8]) {
    let lanes = LANES.min(run.outputs - first);
    let as_stored = |lane: usize| {
        let (part, row) = run.locate(first + lane);
        part.row(row)
    };
    match run.packing {
        Packing::F32 => interleave::<4>(lanes, as_stored, target),
        Packing::F16 => interleave::<2>(lanes, as_stored, target),
        Packing::BF16 if run.parts.iter().all(|part| part.format() == Some(Format::BF16)) => {
            interleave::<4>(lanes, as_stored, target);
        }
        Packing::BF16 => {
            let (decoded, row_bytes) = decode_rows(run, first, lanes);
            interleave::<4>(lanes, |lane| &decoded[lane * row_bytes..(lane + 1) * row_bytes], target);
        }
        Packing::Coded(_) => unreachable!("codes are packed by groups"),
    }
}

/// The rows as bf16 bytes, one after the other, and the bytes of each.
fn decode_rows(run: &Run<'_, '_>, first: usize, lanes: usize) -> (Vec<u8>, usize) {
    let row_bytes = 2 * run.inputs;
    let mut values = vec![0.0f32; run.inputs];
    let mut decoded = Vec::with_capacity(lanes * row_bytes);
    for lane in 0..lanes {
        let (part, row) = run.locate(first + lane);
        part.read_row(row, &mut values);
        decoded.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()));
    }
    (decoded, row_bytes)
}

/// Writes unit `i` of lane `l` (units of `N` bytes) to index `i * 32 + l`. A row that ends inside a
/// unit is padded by the zeros already there.
pub fn interleave<'a, const N: usize>(lanes: usize, row: impl Fn(usize) -> &'a [u8], target: &mut [u8]) {
    /// Units taken from a lane before the next lane's turn: a cache line of source, a few KiB of
    /// target.
    const RUN: usize = 16;
    let rows: Vec<&[u8]> = (0..lanes).map(row).collect();
    let (steps, _) = target.as_chunks_mut::<N>().0.as_chunks_mut::<LANES>();
    for (block, steps) in steps.chunks_mut(RUN).enumerate() {
        for (lane, row) in rows.iter().enumerate() {
            let row = &row[(block * RUN * N).min(row.len())..];
            let (units, rest) = row[..row.len().min(RUN * N)].as_chunks::<N>();
            // Nearly all data comes in whole runs.
            if let (Some(steps), Some(units)) = (steps.as_mut_array::<RUN>(), units.as_array::<RUN>()) {
                for (step, unit) in steps.iter_mut().zip(units) {
                    step[lane] = *unit;
                }
                continue;
            }
            for (step, unit) in steps.iter_mut().zip(units) {
                step[lane] = *unit;
            }
            if !rest.is_empty() {
                steps[units.len()][lane][..rest.len()].copy_from_slice(rest);
            }
        }
    }
}

/// Packs the outlier columns of outputs `first .. first + 32` as BF16.
pub fn pack_outliers(run: &Run<'_, '_>, first: usize, target: &mut [u8]) {
    let lanes = LANES.min(run.outputs - first);
    let rows: Vec<Vec<u8>> = (first..first + lanes)
        .map(|output| {
            let (part, row) = run.locate(output);
            part.outliers(row).iter().flat_map(|value| value.to_le_bytes()).collect()
        })
        .collect();
    interleave::<4>(lanes, |lane| &rows[lane], target);
}

/// Reads one output's values from a panel.
pub fn read_lane(packing: Packing, panel: &[u8], lane: usize, out: &mut [f32]) {
    match packing {
        Packing::F32 => {
            let (values, _) = panel.as_chunks::<4>();
            for (out, value) in out.iter_mut().zip(values[lane..].iter().step_by(LANES)) {
                *out = f32::from_le_bytes(*value);
            }
        }
        Packing::F16 => {
            let (values, _) = panel.as_chunks::<2>();
            for (out, value) in out.iter_mut().zip(values[lane..].iter().step_by(LANES)) {
                *out = f16::from_le_bytes(*value).to_f32();
            }
        }
        Packing::BF16 => {
            let (pairs, _) = panel.as_chunks::<4>();
            for (out, pair) in out.chunks_mut(2).zip(pairs[lane..].iter().step_by(LANES)) {
                let values = [bf16::from_le_bytes([pair[0], pair[1]]), bf16::from_le_bytes([pair[2], pair[3]])];
                for (out, value) in out.iter_mut().zip(values) {
                    *out = value.to_f32();
                }
            }
        }
        Packing::Coded(_) => unreachable!("codes are read by groups"),
    }
}
