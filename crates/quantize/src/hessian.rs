//! The inputs of a linear, summed over calibration: `H = X^T X`, and the size of each column.

/// Sums over the rows that a linear has read.
#[derive(Clone, Debug, PartialEq)]
pub struct Hessian {
    pub size: usize,
    /// `[size, size]`, symmetric.
    pub values: Vec<f32>,
    pub rows: u64,
    /// Sums of `|x|`, one per column.
    pub sum_abs: Vec<f64>,
    /// The largest `|x|` of each column.
    pub max_abs: Vec<f32>,
}

impl Hessian {
    pub fn new(size: usize) -> Self {
        let values = vec![0.0; size * size];
        Self { size, values, rows: 0, sum_abs: vec![0.0; size], max_abs: vec![0.0; size] }
    }

    pub fn diagonal(&self) -> Vec<f32> {
        self.values.iter().step_by(self.size + 1).copied().collect()
    }

    /// Mean `|x|` of each column.
    pub fn mean_abs(&self) -> Vec<f32> {
        self.sum_abs.iter().map(|sum| (sum / self.rows.max(1) as f64) as f32).collect()
    }

    /// Adds the columns' sizes over some rows.
    pub fn note_sizes(&mut self, rows: &[f32]) {
        for row in rows.chunks_exact(self.size) {
            for ((sum, max), x) in self.sum_abs.iter_mut().zip(&mut self.max_abs).zip(row) {
                *sum += f64::from(x.abs());
                *max = max.max(x.abs());
            }
            self.rows += 1;
        }
    }

    /// The sums as if the inputs had been divided by `scales`, one per column.
    pub fn divide(&mut self, scales: &[f32]) {
        for (row, scale) in self.values.chunks_exact_mut(self.size).zip(scales) {
            row.iter_mut().zip(scales).for_each(|(value, other)| *value /= scale * other);
        }
        self.sum_abs.iter_mut().zip(scales).for_each(|(sum, scale)| *sum /= f64::from(*scale));
        self.max_abs.iter_mut().zip(scales).for_each(|(max, scale)| *max /= scale);
    }

    /// Adds another's sums.
    pub fn merge(&mut self, other: &Self) {
        self.values.iter_mut().zip(&other.values).for_each(|(sum, value)| *sum += value);
        self.sum_abs.iter_mut().zip(&other.sum_abs).for_each(|(sum, value)| *sum += value);
        self.max_abs.iter_mut().zip(&other.max_abs).for_each(|(max, value)| *max = max.max(*value));
        self.rows += other.rows;
    }

    /// Cost of the weight errors `errors` (rows as wide as this) in the linear's output: the trace
    /// of `E H E^T`.
    #[cfg(test)]
    pub fn loss(&self, errors: &[f32]) -> f64 {
        let mut sum = 0.0;
        for row in errors.chunks_exact(self.size) {
            for (i, e) in row.iter().enumerate() {
                let h = &self.values[i * self.size..(i + 1) * self.size];
                let inner: f64 = h.iter().zip(row).map(|(h, other)| f64::from(*h) * f64::from(*other)).sum();
                sum += f64::from(*e) * inner;
            }
        }
        sum
    }
}

#[cfg(test)]
impl Hessian {
    /// The sums over the given rows, by plain loops.
    pub(crate) fn of_rows(rows: &[f32], size: usize) -> Self {
        let mut out = Self::new(size);
        out.note_sizes(rows);
        for row in rows.chunks_exact(size) {
            for (i, x) in row.iter().enumerate() {
                for (j, y) in row.iter().enumerate() {
                    out.values[i * size + j] += x * y;
                }
            }
        }
        out
    }
}
