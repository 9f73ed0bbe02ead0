//! Adds rows to a Hessian: `H += X^T X`, as matrix products on the backend that runs the model.
//!
//! `X^T` is both the activations and, a strip of its rows at a time, the weight of a linear; of
//! each strip only the elements on and above the diagonal are computed. Values are rounded to bf16
//! first, as in the linears that read them, and summed in f32.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use folio_device::{Backend, TensorKind};
use folio_formats::{Format, Matrix};
use half::bf16;

use crate::{Hessian, Result};

/// Columns of `H` computed by one product.
const STRIP: usize = 256;
/// Tokens are padded to a multiple of this, so that few sizes of tensors are made.
const TOKENS: usize = 256;

/// Adds to Hessians, and reuses its tensors for each size.
pub(crate) struct Gram<B: Backend> {
    /// `X^T` and a strip of the product, by (size, tokens).
    tensors: HashMap<(usize, usize), (B::Tensor, B::Tensor)>,
    turned: Vec<f32>,
    product: Vec<f32>,
}

impl<B: Backend> Default for Gram<B> {
    fn default() -> Self {
        Self { tensors: HashMap::new(), turned: Vec::new(), product: Vec::new() }
    }
}

impl<B: Backend> Gram<B> {
    /// Adds `rows`, each as wide as the Hessian. Only the upper triangle is valid until [`finish`].
    pub fn add(&mut self, backend: &mut B, hessian: &mut Hessian, rows: &[f32]) -> Result<()> {
        let size = hessian.size;
        if rows.is_empty() {
            return Ok(());
        }
        hessian.note_sizes(rows);
        let tokens = (rows.len() / size).next_multiple_of(TOKENS);
        self.turn(rows, size, tokens);
        let kind = TensorKind::Activation;
        let (turned, product) = match self.tensors.entry((size, tokens)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                entry.insert((backend.tensor(size, tokens, kind)?, backend.tensor(size, STRIP.min(size), kind)?))
            }
        };
        backend.upload_rows(turned, &self.turned);
        for first in (0..size).step_by(STRIP.min(size)) {
            let width = STRIP.min(size - first);
            let strip = &self.turned[first * tokens..(first + width) * tokens];
            let weight = backend.weight(&bf16_rows(strip, tokens)?)?;
            if width < STRIP.min(size) {
                // The last strip of a size that is no multiple.
                let mut narrow = backend.tensor(size, width, kind)?;
                backend.linear(&mut narrow, turned, &weight, None, first + width);
                backend.download(&narrow, first + width, &mut self.product);
            } else {
                backend.linear(product, turned, &weight, None, first + width);
                backend.download(product, first + width, &mut self.product);
            }
            for (row, sums) in self.product.chunks_exact(width).enumerate() {
                let target = &mut hessian.values[row * size + first..][..width];
                target.iter_mut().zip(sums).for_each(|(value, sum)| *value += sum);
            }
        }
        Ok(())
    }

    fn turn(&mut self, rows: &[f32], size: usize, tokens: usize) {
        self.turned.clear();
        self.turned.resize(size * tokens, 0.0);
        // Blocks of rows and columns that stay in cache.
        const SIDE: usize = 32;
        for (block, rows) in rows.chunks(SIDE * size).enumerate() {
            for first in (0..size).step_by(SIDE) {
                for (token, row) in rows.chunks_exact(size).enumerate() {
                    for (column, value) in row[first..(first + SIDE).min(size)].iter().enumerate() {
                        self.turned[(first + column) * tokens + block * SIDE + token] = *value;
                    }
                }
            }
        }
    }
}

/// Mirrors the upper triangle into the lower.
pub(crate) fn finish(hessian: &mut Hessian) {
    let size = hessian.size;
    for row in 0..size {
        for column in 0..row {
            hessian.values[row * size + column] = hessian.values[column * size + row];
        }
    }
}

fn bf16_rows(values: &[f32], cols: usize) -> Result<Matrix<'static>> {
    let rows = values.chunks_exact(cols).map(|row| {
        let mut bytes = vec![0u8; 2 * cols];
        for (bytes, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(row) {
            *bytes = bf16::from_f32(*value).to_le_bytes();
        }
        Cow::Owned(bytes)
    });
    Ok(Matrix::from_rows(Format::BF16, cols, rows.collect())?)
}

#[cfg(test)]
mod tests {
    use folio_device::reference::Reference;
    use folio_testing::Rng;

    use super::*;

    #[test]
    fn sums_are_those_of_the_book() {
        let mut rng = Rng::new(5);
        for (size, tokens) in [(3, 5), (300, 40), (256, 260)] {
            let rows: Vec<f32> = (0..tokens * size).map(|_| bf16::from_f32(rng.normal()).to_f32()).collect();
            let expected = Hessian::of_rows(&rows, size);
            let mut found = Hessian::new(size);
            let mut gram = Gram::default();
            let (first, second) = rows.split_at(tokens / 2 * size);
            gram.add(&mut Reference::new(), &mut found, first).unwrap();
            gram.add(&mut Reference::new(), &mut found, second).unwrap();
            gram.add(&mut Reference::new(), &mut found, &[]).unwrap();
            finish(&mut found);
            assert_eq!((found.rows, &found.max_abs), (expected.rows, &expected.max_abs));
            for (found, expected) in found.values.iter().zip(&expected.values) {
                assert!((found - expected).abs() < 1e-3, "{found} for {expected}");
            }
        }
    }
}
