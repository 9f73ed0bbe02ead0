//! Products and embeddings of weights that are codes with scales beside them, as checkpoints of
//! other tools hold them: every kind of level, with and without minimums, with reordered columns,
//! with outlier columns, and parts of different kinds in one matrix.

use std::sync::Arc;

use folio_device::{Backend, TensorKind};
use folio_formats::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix};
use half::bf16;

use crate::data::{Random, batch, download, inputs, matrix, tensor};

/// One weight of codes.
#[derive(Clone, Copy, Debug)]
pub struct Coded {
    levels: Kind,
    group: usize,
    affine: bool,
    extra: Extra,
    activations: ActivationScale,
    pub inputs: usize,
    outputs: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Unsigned4,
    Float4,
    /// Levels that small integers do not represent exactly.
    Uneven4,
    Signed8,
    Float8,
}

/// Additional properties of the weight.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Extra {
    Nothing,
    /// Columns in an order of their own.
    Order,
    /// Columns beside the codes; their activations are fifty times as large.
    Outliers,
    /// Rows of GGUF blocks, plain values and other codes below.
    Parts,
}

pub fn coded_cases() -> Vec<Coded> {
    let kinds = [Kind::Unsigned4, Kind::Float4, Kind::Uneven4, Kind::Signed8, Kind::Float8];
    let extras = [Extra::Nothing, Extra::Order, Extra::Outliers, Extra::Parts];
    let mut cases = Vec::new();
    for (at, levels) in kinds.into_iter().enumerate() {
        for (index, group) in [16, 32, 64, 128, 256, 48, 1000].into_iter().enumerate() {
            for (place, extra) in extras.into_iter().enumerate() {
                // Half of all cases; the kernels' own tests go through every kind and group.
                if (at + index + place) % 2 == 1 {
                    continue;
                }
                let affine = (index + place) % 2 == 0 && levels != Kind::Float8;
                let row = (at + index + place) % 3 == 0;
                let activations = if row { ActivationScale::Row } else { ActivationScale::Group };
                let inputs = if extra == Extra::Parts { 320 } else { [77, 256, 300][(index + place) % 3] };
                let outputs = [5, 45, 64][(at + index) % 3];
                cases.push(Coded { levels, group, affine, extra, activations, inputs, outputs });
            }
        }
    }
    cases
}

const OUTLIERS: [u32; 3] = [3, 40, 76];

impl Coded {
    pub fn is_float8(&self) -> bool {
        self.levels == Kind::Float8
    }

    pub fn width(&self) -> usize {
        self.matrix().num_rows()
    }

    pub fn matrix(&self) -> Matrix<'static> {
        let own = self.grouped();
        if self.extra != Extra::Parts {
            return own;
        }
        let other = Coded { levels: Kind::Signed8, group: 32, affine: false, extra: Extra::Order, ..*self }.grouped();
        let blocks = |format| matrix(format, 35, self.inputs, 9);
        Matrix::stack(vec![own, blocks(Format::Q8_0), blocks(Format::BF16), other, blocks(Format::Q5_1)]).unwrap()
    }

    fn grouped(&self) -> Matrix<'static> {
        let mut random = Random::new(self.group as u64 + self.levels as u64);
        let levels = match self.levels {
            Kind::Unsigned4 => GroupedLevels::UNSIGNED4,
            Kind::Float4 => GroupedLevels::E2M1,
            Kind::Uneven4 => GroupedLevels::Nibbles(std::array::from_fn(|code| (code as f32 - 7.3).powi(3) / 400.0)),
            Kind::Signed8 => GroupedLevels::Signed8,
            Kind::Float8 => GroupedLevels::Float8,
        };
        let groups = self.inputs.div_ceil(self.group);
        let outliers: &[u32] = if self.extra == Extra::Outliers { &OUTLIERS } else { &[] };
        // The factor from levels to values of about one.
        let unit = match self.levels {
            Kind::Unsigned4 => 0.13,
            Kind::Float4 => 0.33,
            Kind::Uneven4 => 2.0,
            Kind::Signed8 => 0.016,
            Kind::Float8 => 0.01,
        };
        let mut row = || GroupedRow {
            codes: (0..self.inputs)
                .map(|_| match self.levels {
                    Kind::Unsigned4 | Kind::Float4 | Kind::Uneven4 => random.below(16) as u8,
                    Kind::Signed8 => random.below(256) as u8,
                    // Any code but the two NaNs.
                    Kind::Float8 => (random.below(127) | random.below(2) << 7) as u8,
                })
                .collect(),
            scales: (0..groups).map(|_| unit * (1.0 + 0.3 * random.value())).collect(),
            minimums: (0..if self.affine { groups } else { 0 }).map(|_| random.value() - 1.0).collect(),
            outliers: outliers.iter().map(|_| bf16::from_f32(random.value())).collect(),
        };
        let rows = (0..self.outputs).map(|_| row()).collect();
        let form = Grouped {
            group: self.group,
            levels,
            activations: self.activations,
            order: (self.extra == Extra::Order).then(|| self.order()),
            outliers: (!outliers.is_empty()).then(|| outliers.into()),
        };
        Matrix::from_grouped(self.inputs, form, rows).unwrap()
    }

    fn order(&self) -> Arc<[u32]> {
        let mut order: Vec<u32> = (0..self.inputs as u32).collect();
        Random::new(11).shuffle(&mut order);
        order.into()
    }

    /// The product of rows of values; for a first weight's rows, the embedding is checked too.
    pub fn run<B: Backend>(&self, backend: &mut B, values: &[f32]) -> Vec<f32> {
        let mut values = values.to_vec();
        if self.extra == Extra::Outliers {
            for row in values.chunks_exact_mut(self.inputs) {
                // Rounded like in a bf16 product: these have the largest weight.
                OUTLIERS.iter().for_each(|&col| row[col as usize] = bf16::from_f32(row[col as usize] * 50.0).to_f32());
            }
        }
        let rows = values.len() / self.inputs;
        let x = tensor(backend, self.inputs, &values, TensorKind::Activation);
        let matrix = self.matrix();
        let weight = backend.weight(&matrix).unwrap();
        assert!(backend.weight_bytes(&weight) > 0);
        self.check_embedding(backend, &matrix, &weight);
        let bias = backend.vector(&Random::new(3).values(self.width())).unwrap();
        let mut out = backend.tensor(rows, self.width(), TensorKind::Activation).unwrap();
        backend.linear(&mut out, &x, &weight, Some(&bias), rows);
        download(backend, &out, rows)
    }

    /// Rows come back as they decode, except that scales are rounded to 16 bits, levels to 127ths
    /// and eight-bit floats to eight-bit integers.
    fn check_embedding<B: Backend>(&self, backend: &mut B, matrix: &Matrix<'_>, weight: &B::Weight) {
        let ids: Vec<u32> = (0..matrix.num_rows() as u32).step_by(17).collect();
        let inputs = inputs(backend, &batch(&ids, Vec::new()));
        let mut out = backend.tensor(ids.len(), self.inputs, TensorKind::Stream).unwrap();
        backend.embed(&mut out, weight, &inputs, 1.0);
        let found = download(backend, &out, ids.len());
        let mut expected = vec![0.0; self.inputs];
        for (found, &id) in found.chunks_exact(self.inputs).zip(&ids) {
            matrix.read_row(id as usize, &mut expected);
            let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() <= largest / 100.0, "{self:?} row {id}: {found} for {expected}");
            }
        }
    }
}
