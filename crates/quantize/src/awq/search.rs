//! The search for one input's scales.

use std::borrow::Cow;

use folio_device::{Backend, TensorKind};
use folio_formats::{Format, Matrix};

use super::Input;
use super::fold::{FoldedMatrix, Weights};
use crate::{Hessian, Options, Result, rtn};

/// Rows of errors that are multiplied at a time.
const ROWS: usize = 512;

/// One scale per value of the input; ones if no other scales are better.
pub(super) fn scales<B: Backend>(
    backend: &mut B,
    weights: &Weights,
    hessians: &[Hessian],
    input: &Input,
    options: &Options,
) -> Result<Vec<f32>> {
    let width = hessians[input.sites[0]].size;
    let mut readers = Vec::new();
    for site in &input.sites {
        let matrices: Vec<&FoldedMatrix> = weights.of_site(*site).filter(|matrix| matrix.coded).collect();
        if !matrices.is_empty() {
            readers.push(Reader { matrices, loss: Loss::new(backend, &hessians[*site])? });
        }
    }
    let mut best = vec![1.0; width];
    if readers.is_empty() {
        return Ok(best);
    }
    let sizes = tied(&mean_abs(hessians, input), input);
    let columns = tied(&column_sizes(&readers, width), input);
    let mut best_loss = total_loss(backend, &mut readers, &best, options)?;
    for step in 1..=options.awq.steps {
        let power = step as f32 / options.awq.steps as f32;
        for rest in [0.0, 1.0 - power] {
            let tried: Vec<f32> = sizes.iter().zip(&columns).map(|(x, w)| x.powf(power) / w.powf(rest)).collect();
            let tried = centred(tried);
            let loss = total_loss(backend, &mut readers, &tried, options)?;
            if loss < best_loss {
                (best, best_loss) = (tried, loss);
            }
            // At full power both are the same.
            if rest == 0.0 && power == 1.0 {
                break;
            }
        }
    }
    Ok(best)
}

/// The matrices of one site and the cost of their errors.
struct Reader<'a, B: Backend> {
    matrices: Vec<&'a FoldedMatrix>,
    loss: Loss<B>,
}

fn total_loss<B: Backend>(
    backend: &mut B,
    readers: &mut [Reader<'_, B>],
    scales: &[f32],
    options: &Options,
) -> Result<f64> {
    let mut sum = 0.0;
    for reader in readers {
        for matrix in &reader.matrices {
            let mut scaled = matrix.values.clone();
            for row in scaled.chunks_exact_mut(matrix.cols) {
                row.iter_mut().zip(scales).for_each(|(value, scale)| *value *= scale);
            }
            let coded = rtn::quantize(options.target, &scaled, matrix.cols, options.threads);
            for (row, errors) in scaled.chunks_exact_mut(matrix.cols).enumerate() {
                let mut rounded = vec![0.0; matrix.cols];
                coded.read_row(row, &mut rounded);
                for ((error, rounded), scale) in errors.iter_mut().zip(rounded).zip(scales) {
                    *error = (*error - rounded) / scale;
                }
            }
            sum += reader.loss.of(backend, &scaled)?;
        }
    }
    Ok(sum)
}

/// `tr(E H E^T)` on the backend: `E H` is a linear whose weight is `H`.
struct Loss<B: Backend> {
    size: usize,
    weight: B::Weight,
    errors: B::Tensor,
    product: B::Tensor,
    values: Vec<f32>,
}

impl<B: Backend> Loss<B> {
    fn new(backend: &mut B, hessian: &Hessian) -> Result<Self> {
        let size = hessian.size;
        let rows = hessian.values.chunks_exact(size.max(1));
        let bytes = |row: &[f32]| row.iter().flat_map(|value| value.to_le_bytes()).collect();
        let matrix = Matrix::from_rows(Format::F32, size, rows.map(|row| Cow::Owned(bytes(row))).collect())?;
        Ok(Self {
            size,
            weight: backend.weight(&matrix)?,
            errors: backend.tensor(ROWS, size, TensorKind::Activation)?,
            product: backend.tensor(ROWS, size, TensorKind::Activation)?,
            values: Vec::new(),
        })
    }

    fn of(&mut self, backend: &mut B, errors: &[f32]) -> Result<f64> {
        let mut sum = 0.0;
        for errors in errors.chunks(ROWS * self.size) {
            let rows = errors.len() / self.size;
            backend.upload_rows(&mut self.errors, errors);
            backend.linear(&mut self.product, &self.errors, &self.weight, None, rows);
            backend.download(&self.product, rows, &mut self.values);
            let rows = errors.chunks_exact(self.size).zip(self.values.chunks_exact(self.size));
            sum += rows.map(|(errors, product)| f64::from(dot(errors, product))).sum::<f64>();
        }
        Ok(sum)
    }
}

/// Mean `|x|` over all rows of the input's readers.
fn mean_abs(hessians: &[Hessian], input: &Input) -> Vec<f32> {
    let rows: u64 = input.sites.iter().map(|site| hessians[*site].rows).sum();
    let mut sums = vec![0.0f64; hessians[input.sites[0]].size];
    for site in &input.sites {
        sums.iter_mut().zip(&hessians[*site].sum_abs).for_each(|(sum, value)| *sum += value);
    }
    sums.iter().map(|sum| (sum / rows.max(1) as f64) as f32).collect()
}

/// The size of each column's weights relative to others of their row.
fn column_sizes<B: Backend>(readers: &[Reader<'_, B>], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; width];
    for matrix in readers.iter().flat_map(|reader| &reader.matrices) {
        for row in matrix.values.chunks_exact(width) {
            let largest = row.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            if largest > 0.0 {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(value.abs() / largest));
            }
        }
    }
    let rows: usize = readers.iter().flat_map(|reader| &reader.matrices).map(|matrix| matrix.rows).sum();
    sums.iter().map(|sum| (sum / rows.max(1) as f64) as f32).collect()
}

/// The mean over values that must be scaled alike, bounded from below so that its powers are
/// meaningful.
fn tied(values: &[f32], input: &Input) -> Vec<f32> {
    let least = |value: f32| value.max(1e-6);
    if input.ties.is_empty() {
        return values.iter().copied().map(least).collect();
    }
    let count = input.ties.iter().max().map_or(0, |last| *last as usize + 1);
    let mut sums = vec![(0.0f32, 0.0f32); count];
    for (tie, value) in input.ties.iter().zip(values) {
        sums[*tie as usize].0 += value;
        sums[*tie as usize].1 += 1.0;
    }
    input.ties.iter().map(|tie| sums[*tie as usize]).map(|(sum, members)| least(sum / members)).collect()
}

/// Scales centred around one, within bounds.
fn centred(mut scales: Vec<f32>) -> Vec<f32> {
    let least = scales.iter().copied().fold(f32::INFINITY, f32::min);
    let most = scales.iter().copied().fold(0.0, f32::max);
    let middle = (least * most).sqrt();
    scales.iter_mut().for_each(|scale| *scale = (*scale / middle).clamp(1e-4, 1e4));
    scales
}

/// Several sums side by side, always in the same order.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..16 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
