//! Products that normalize their input, gate their output or add it to the residual stream,
//! compared with the separate operations, which the reference uses.

use folio_device::TensorKind::{Activation, Stream};
use folio_device::{self as device, Backend, Norm, Product};
use folio_formats::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix};

use crate::data::{Random, deviation, download, matrix, tensor};

#[derive(Clone, Copy, Debug)]
pub struct Fused {
    kind: Kind,
    inputs: usize,
    /// Outputs of a gate; there are twice as many in all.
    outputs: usize,
    activation: device::Activation,
    bias: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Blocks(Format),
    /// Nibbles from -8 on, in groups of this size.
    Nibbles(usize),
    /// One scale per row.
    Float8,
    /// Gates and ups have different forms.
    Unlike,
}

pub fn fused_cases() -> Vec<Fused> {
    let kinds = [
        Kind::Blocks(Format::BF16),
        Kind::Nibbles(128),
        Kind::Float8,
        Kind::Blocks(Format::Q4_0),
        Kind::Nibbles(64),
        Kind::Blocks(Format::Q8_0),
        Kind::Unlike,
    ];
    let activations = [device::Activation::Silu, device::Activation::GeluTanh, device::Activation::Gelu];
    let mut cases = Vec::new();
    for (at, kind) in kinds.into_iter().enumerate() {
        for (index, (inputs, outputs)) in [(128, 32), (512, 96), (1408, 45), (4224, 160)].into_iter().enumerate() {
            let activation = activations[(at + index) % 3];
            cases.push(Fused { kind, inputs, outputs, activation, bias: (at + index) % 2 == 0 });
        }
    }
    cases
}

impl Fused {
    pub fn is_float8(&self) -> bool {
        matches!(self.kind, Kind::Float8 | Kind::Unlike)
    }

    pub fn is_plain(&self) -> bool {
        self.kind == Kind::Blocks(Format::BF16)
    }

    pub fn width(&self) -> usize {
        5 * self.outputs
    }

    fn matrix(&self) -> Matrix<'static> {
        let (inputs, outputs) = (self.inputs, self.outputs);
        match self.kind {
            Kind::Blocks(format) => matrix(format, 2 * outputs, inputs, 5),
            Kind::Nibbles(group) => {
                grouped(GroupedLevels::Nibbles(std::array::from_fn(|code| code as f32 - 8.0)), group, self)
            }
            Kind::Float8 => grouped(GroupedLevels::Float8, inputs, self),
            Kind::Unlike => {
                let above = grouped(GroupedLevels::Float8, inputs, self);
                let halves = [above.pick_rows(0..outputs), matrix(Format::BF16, outputs, inputs, 6)];
                Matrix::stack(halves.into()).unwrap()
            }
        }
    }

    /// Each row of the result: a product of the normalized stream, the same gated, and the stream
    /// with a product added.
    pub fn run<B: Backend>(&self, backend: &mut B, values: impl Fn(usize, u64) -> Vec<f32>, rows: usize) -> Vec<f32> {
        let (inputs, outputs) = (self.inputs, 2 * self.outputs);
        let matrix = self.matrix();
        // Scales results to about one.
        let unit = 1.0 / ((inputs as f32).sqrt() * deviation(&matrix));
        let scaled = |values: Vec<f32>| values.into_iter().map(|value| value * unit).collect::<Vec<_>>();
        let weight = backend.weight(&matrix).unwrap();
        let bias = self.bias.then(|| backend.vector(&Random::new(3).values(outputs)).unwrap());
        let by = backend.vector(&scaled(Random::new(4).values(inputs))).unwrap();
        let product = || Product { weight: &weight, bias: bias.as_ref() };
        let norm = || Norm { weight: &by, eps: 1e-5 };
        let stream = tensor(backend, inputs, &values(inputs, 1).iter().map(|x| x * 30.0).collect::<Vec<_>>(), Stream);
        let mut empty = |cols, kind| backend.tensor(rows, cols, kind).unwrap();
        let (mut normed, mut gate_up) = (empty(inputs, Activation), empty(outputs, Activation));
        let (mut out, mut gated) = (empty(outputs, Activation), empty(self.outputs, Activation));
        backend.norm_linear(&mut out, &mut normed, &stream, norm(), product(), rows);
        let act = self.activation;
        backend.norm_linear_gated(&mut gated, &mut gate_up, &mut normed, &stream, norm(), product(), act, rows);
        let x = tensor(backend, inputs, &scaled(values(inputs, 2)), Activation);
        let mut residual = tensor(backend, outputs, &values(outputs, 7), Stream);
        backend.linear_add(&mut residual, &mut gate_up, &x, product(), 0.7, rows);
        let mut part = |tensor, cols: usize| -> Vec<Vec<f32>> {
            download(backend, tensor, rows).chunks_exact(cols).map(<[f32]>::to_vec).collect()
        };
        let (out, gated, residual) = (part(&out, outputs), part(&gated, self.outputs), part(&residual, outputs));
        (0..rows).flat_map(|row| [&out[row][..], &gated[row], &residual[row]].concat()).collect()
    }
}

fn grouped(levels: GroupedLevels, group: usize, case: &Fused) -> Matrix<'static> {
    let mut random = Random::new(group as u64 + case.outputs as u64);
    let groups = case.inputs.div_ceil(group);
    let mut row = || GroupedRow {
        codes: (0..case.inputs)
            .map(|_| match levels {
                // Any code but the two NaNs; small values are frequent.
                GroupedLevels::Float8 => (random.below(127) >> random.below(4) | random.below(2) << 7) as u8,
                _ => random.below(16) as u8,
            })
            .collect(),
        scales: (0..groups).map(|_| 0.1 * (1.0 + 0.3 * random.value())).collect(),
        ..GroupedRow::default()
    };
    let rows = (0..2 * case.outputs).map(|_| row()).collect();
    let form = Grouped { group, levels, activations: ActivationScale::Group, order: None, outliers: None };
    Matrix::from_grouped(case.inputs, form, rows).unwrap()
}
