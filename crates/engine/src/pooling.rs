//! Pools a prompt's hidden states to one vector, an embedding.
//!
//! Rows come in order of position, in any number of steps, and are added one after the other to one
//! sum. The vector therefore does not depend on the chunks of the prompt.

/// Computes one vector from the hidden states after the last norm; the vector is not normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over all tokens.
    Mean,
    /// The state of the last token.
    Last,
}

impl Pooling {
    /// Whether all rows of the prompt are needed, and not only the last.
    pub(crate) fn needs_all_rows(self) -> bool {
        self == Pooling::Mean
    }
}

/// The sum of a prompt's rows between steps.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    /// Number of rows that the vector needs.
    rows_total: usize,
    rows: usize,
    sum: Vec<f32>,
}

/// Reason why there is no vector.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub(crate) enum NoVector {
    #[error("value {index} of a hidden state is {value}, but must be a finite number")]
    NotFinite { index: usize, value: f32 },
    #[error("{found} hidden states were computed, but {expected} are needed")]
    Rows { found: usize, expected: usize },
}

impl Pool {
    pub fn new(pooling: Pooling, prompt_len: usize) -> Self {
        let rows_total = if pooling.needs_all_rows() { prompt_len } else { 1 };
        Self { rows_total, rows: 0, sum: Vec::new() }
    }

    /// Adds the next row.
    pub fn add(&mut self, state: &[f32]) {
        self.rows += 1;
        if self.sum.is_empty() {
            self.sum.extend_from_slice(state);
        } else {
            self.sum.iter_mut().zip(state).for_each(|(sum, value)| *sum += value);
        }
    }

    /// The vector, after the last row.
    pub fn finish(&mut self) -> Result<Vec<f32>, NoVector> {
        let (found, expected) = (self.rows, self.rows_total);
        if found != expected {
            return Err(NoVector::Rows { found, expected });
        }
        let mut mean = std::mem::take(&mut self.sum);
        mean.iter_mut().for_each(|value| *value /= expected as f32);
        match mean.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(NoVector::NotFinite { index, value: mean[index] }),
            None => Ok(mean),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_by_hand() {
        let mut pool = Pool::new(Pooling::Mean, 3);
        [[1.0, 4.0], [2.0, 0.0], [6.0, -1.0]].iter().for_each(|row| pool.add(row));
        assert_eq!(pool.finish(), Ok(vec![3.0, 1.0]));
        let mut pool = Pool::new(Pooling::Last, 3);
        pool.add(&[6.0, -1.0]);
        assert_eq!(pool.finish(), Ok(vec![6.0, -1.0]));
    }

    #[test]
    fn what_is_not_whole_or_not_a_number_is_an_error() {
        let mut pool = Pool::new(Pooling::Mean, 3);
        pool.add(&[1.0]);
        assert_eq!(pool.finish(), Err(NoVector::Rows { found: 1, expected: 3 }));
        let mut pool = Pool::new(Pooling::Mean, 2);
        [[f32::MAX], [f32::MAX]].iter().for_each(|row| pool.add(row));
        let error = pool.finish().map_err(|error| error.to_string());
        assert_eq!(error, Err("value 0 of a hidden state is inf, but must be a finite number".to_owned()));
    }
}
