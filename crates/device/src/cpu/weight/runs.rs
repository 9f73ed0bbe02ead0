//! Packing of a matrix: one packed part for each of its parts, or a single one in BF16.

use std::sync::Arc;

use folio_formats::{Matrix, Part};

use super::packing::Packing;
use super::shape::PartShape;
use crate::Result;

/// Neighbouring parts of a matrix that become one packed part.
pub struct Run<'m, 'a> {
    pub packing: Packing,
    pub first_output: usize,
    pub outputs: usize,
    pub inputs: usize,
    pub parts: &'m [Part<'a>],
}

impl<'m, 'a> Run<'m, 'a> {
    /// Each part in the packing that suits it.
    pub fn each(matrix: &'m Matrix<'a>) -> Result<Vec<Self>> {
        let mut next = 0;
        let run = |part: &'m Part<'a>| {
            let first_output = next;
            next += part.num_rows();
            Ok(Self {
                packing: Packing::for_part(part)?,
                first_output,
                outputs: part.num_rows(),
                inputs: matrix.cols(),
                parts: std::slice::from_ref(part),
            })
        };
        matrix.parts().iter().filter(|part| part.num_rows() > 0).map(run).collect()
    }

    /// The whole matrix as BF16, whatever its formats.
    pub fn decoded(matrix: &'m Matrix<'a>) -> Result<Vec<Self>> {
        // Fails if a part holds no weights.
        Self::each(matrix)?;
        let (outputs, inputs) = (matrix.num_rows(), matrix.cols());
        Ok(vec![Self { packing: Packing::BF16, first_output: 0, outputs, inputs, parts: matrix.parts() }])
    }

    /// The part that holds output `output` of the run, and the row there.
    pub fn locate(&self, output: usize) -> (&'m Part<'a>, usize) {
        let mut row = output;
        for part in self.parts {
            if row < part.num_rows() {
                return (part, row);
            }
            row -= part.num_rows();
        }
        panic!("output {output} of {}", self.outputs);
    }

    /// Stored column `j` is input `order[j]`; none if columns are in order.
    pub fn order(&self) -> Option<&'m Arc<[u32]>> {
        self.coded_part().and_then(Part::column_order)
    }

    /// Inputs with separate weights beside the codes.
    pub fn outlier_columns(&self) -> Option<&'m Arc<[u32]>> {
        self.coded_part().and_then(Part::outlier_columns).filter(|columns| !columns.is_empty())
    }

    /// Codes are packed in their stored order; a decoded part has neither an order nor outliers any
    /// more.
    fn coded_part(&self) -> Option<&'m Part<'a>> {
        match self.packing {
            Packing::Coded(_) => self.parts.first(),
            _ => None,
        }
    }

    /// Shape of the packed run, without outliers.
    pub fn shape(&self) -> PartShape {
        PartShape { packing: self.packing, outputs: self.outputs, inputs: self.inputs }
    }

    /// Shape of its packed outliers, if it has any.
    pub fn outlier_shape(&self) -> Option<PartShape> {
        let columns = self.outlier_columns()?;
        Some(PartShape { packing: Packing::BF16, outputs: self.outputs, inputs: columns.len() })
    }

    /// Shapes of the run and its outliers, in the order in which they are packed.
    pub fn shapes(&self) -> impl Iterator<Item = PartShape> {
        std::iter::once(self.shape()).chain(self.outlier_shape())
    }
}
