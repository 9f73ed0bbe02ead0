//! A layer's matrices as numbers, and scales folded into them: the readers' columns are multiplied
//! by a scale, the producer's rows or norm are divided by it.

use std::collections::HashMap;

use folio_model::{LayerSites, OpenModel};

use super::Input;
use crate::layer::{self, read_view, store};
use crate::overlay::Stored;
use crate::{Options, Result};

/// The tensors that compute a vector, which can absorb its scales.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Producer {
    /// The norm of that name.
    Norm(String),
    /// Outputs from `first_row` on of a site's matrices, stacked.
    Rows { site: usize, first_row: usize },
}

pub(crate) struct FoldedMatrix {
    pub site: usize,
    /// Full name of the tensor, with `.weight`.
    pub name: String,
    stem: String,
    pub rows: usize,
    pub cols: usize,
    pub coded: bool,
    pub values: Vec<f32>,
    touched: bool,
}

/// All matrices of a layer, in the order of its sites.
pub(crate) struct Weights {
    pub matrices: Vec<FoldedMatrix>,
    /// Norms and biases that were scaled, as stored values.
    vectors: HashMap<String, Vec<f32>>,
}

impl Weights {
    pub fn read(model: &OpenModel, sites: &LayerSites, options: &Options) -> Result<Self> {
        let mut matrices = Vec::new();
        for (site, of) in sites.sites.iter().enumerate() {
            for linear in &of.linears {
                matrices.push(FoldedMatrix {
                    site,
                    name: layer::weight_name(linear),
                    stem: linear.stem.clone(),
                    rows: linear.rows,
                    cols: linear.cols,
                    coded: layer::is_coded(options, of, linear),
                    values: layer::read(model, linear)?,
                    touched: false,
                });
            }
        }
        Ok(Self { matrices, vectors: HashMap::new() })
    }

    pub fn of_site(&self, site: usize) -> impl Iterator<Item = &FoldedMatrix> {
        self.matrices.iter().filter(move |matrix| matrix.site == site)
    }

    /// Folds `scales` (one per value of the input) and returns the applied scales: a stored norm
    /// rounds, and the readers get exactly the rounded scales.
    pub fn fold(&mut self, model: &OpenModel, input: &Input, mut scales: Vec<f32>) -> Result<Vec<f32>> {
        if scales.iter().all(|scale| *scale == 1.0) {
            return Ok(scales);
        }
        match &input.producer {
            Producer::Norm(name) => self.fold_norm(model, name, &mut scales)?,
            Producer::Rows { site, first_row } => self.fold_rows(model, input, *site, *first_row, &scales)?,
        }
        for matrix in self.matrices.iter_mut().filter(|matrix| input.sites.contains(&matrix.site)) {
            matrix.touched = true;
            for row in matrix.values.chunks_exact_mut(matrix.cols) {
                row.iter_mut().zip(&scales).for_each(|(value, scale)| *value *= scale);
            }
        }
        Ok(scales)
    }

    fn fold_norm(&mut self, model: &OpenModel, name: &str, scales: &mut [f32]) -> Result<()> {
        let view = model.weights.require(name)?;
        let offset = model.spec.norm_offset;
        let before = read_view(&view)?;
        let wanted: Vec<f32> =
            before.iter().zip(&*scales).map(|(weight, scale)| (weight + offset) / scale - offset).collect();
        let stored = store(&view, &wanted)?;
        let mut after = vec![0.0; wanted.len()];
        stored.format.decode(&stored.bytes, &mut after);
        for (((scale, before), after), wanted) in scales.iter_mut().zip(&before).zip(&mut after).zip(&wanted) {
            let (whole, part) = (before + offset, *after + offset);
            if part != 0.0 && whole != 0.0 && wanted.is_finite() {
                *scale = whole / part;
            } else {
                (*scale, *after) = (1.0, *before);
            }
        }
        self.vectors.insert(name.to_owned(), after);
        Ok(())
    }

    fn fold_rows(
        &mut self,
        model: &OpenModel,
        input: &Input,
        site: usize,
        first_row: usize,
        scales: &[f32],
    ) -> Result<()> {
        // One scale per row: of tied values, the first stands for all.
        let by_row: Vec<f32> = match input.ties.is_empty() {
            true => scales.to_vec(),
            false => {
                let rows = input.ties.iter().max().map_or(0, |last| *last as usize + 1);
                let mut by_row = vec![1.0; rows];
                input.ties.iter().zip(scales).for_each(|(tie, scale)| by_row[*tie as usize] = *scale);
                by_row
            }
        };
        let mut top = 0;
        for matrix in self.matrices.iter_mut().filter(|matrix| matrix.site == site) {
            let mut bias = self.vectors.remove(&format!("{}.bias", matrix.stem));
            for (row, values) in matrix.values.chunks_exact_mut(matrix.cols).enumerate() {
                let Some(scale) = (top + row).checked_sub(first_row).and_then(|at| by_row.get(at)) else { continue };
                values.iter_mut().for_each(|value| *value /= scale);
                matrix.touched = true;
                if let Some(bias) = bias_of(model, &matrix.stem, &mut bias)? {
                    bias[row] /= scale;
                }
            }
            if let Some(bias) = bias {
                self.vectors.insert(format!("{}.bias", matrix.stem), bias);
            }
            top += matrix.rows;
        }
        Ok(())
    }

    /// Plain tensors that differ from the source's.
    pub fn changed(&self, model: &OpenModel) -> Result<HashMap<String, Stored>> {
        let plain = self.matrices.iter().filter(|matrix| matrix.touched && !matrix.coded);
        let plain = plain.map(|matrix| (&matrix.name, &matrix.values));
        let mut out = HashMap::new();
        for (name, values) in plain.chain(&self.vectors) {
            out.insert(name.clone(), store(&model.weights.require(name)?, values)?);
        }
        Ok(out)
    }
}

/// The bias of a matrix, read when first requested; none if there is none.
fn bias_of<'a>(model: &OpenModel, stem: &str, bias: &'a mut Option<Vec<f32>>) -> Result<Option<&'a mut Vec<f32>>> {
    if bias.is_none()
        && let Some(view) = model.weights.tensor(&format!("{stem}.bias"))
    {
        *bias = Some(read_view(&view)?);
    }
    Ok(bias.as_mut())
}
