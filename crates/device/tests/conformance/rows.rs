//! Operations on independent rows: each case can compute any selection of its rows in any order.

use folio_device::TensorKind::{Activation, Scores, Stream};
use folio_device::{self as device, Backend, ExpertsSource, RouterScore, Routing, TensorKind};
use folio_formats::Format;

use crate::coded::{Coded, coded_cases};
use crate::data::{Random, batch, deviation, download, embedded, f32_matrix, inputs, matrix, round_to_bf16, tensor};
use crate::fused::{Fused, fused_cases};

pub const ROWS: usize = 33;
pub const FORMATS: [Format; 16] = [
    Format::F32,
    Format::F16,
    Format::BF16,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q8_0,
    Format::Q2_K,
    Format::Q3_K,
    Format::Q4_K,
    Format::Q5_K,
    Format::Q6_K,
    Format::IQ4_NL,
    Format::IQ4_XS,
    Format::MXFP4,
];

/// F32 sums in another order, and transcendental functions accurate to a few units in the last
/// place.
const TIGHT: f32 = 1e-5;
/// Activations rounded to bf16 (2^-9 of each) on their way into a product, or weights decoded to
/// bf16. The error of a sum of `n` such products is 2^-9 / sqrt(3) of its deviation; four
/// deviations of that are 2^-8, doubled for margin.
const BF16_ROUNDED: f32 = 1.0 / 128.0;
/// A quantized weight's product rounds activations to 127ths of the largest in a group, or in a
/// row. The largest is about three deviations, so the error is 3 / 127 / sqrt(12) of a value's
/// deviation; the bound is four times that, and some margin.
const QUANTIZED: f32 = 1.0 / 32.0;

#[derive(Clone, Copy, Debug)]
pub enum Case {
    Embed {
        format: Format,
        width: usize,
        scale: f32,
    },
    Norm {
        width: usize,
    },
    Add {
        width: usize,
    },
    AddNorm {
        width: usize,
    },
    /// `rounded`: the activations are bf16 values already, so that a product that rounds them loses
    /// nothing.
    Linear {
        format: Format,
        inputs: usize,
        outputs: usize,
        bias: bool,
        rounded: bool,
    },
    /// A product with a weight of codes in a format outside GGUF.
    Coded(Coded),
    /// A product with the operations before and behind it.
    Fused(Fused),
    Gate {
        activation: device::Activation,
        width: usize,
    },
    Experts {
        format: Format,
        score: RouterScore,
        hidden: usize,
        inter: usize,
        grouped: bool,
        bias: bool,
        activation: device::Activation,
    },
    AddGated {
        width: usize,
    },
    Copy {
        width: usize,
    },
    Gather {
        width: usize,
    },
    Finish {
        cap: Option<f32>,
        width: usize,
    },
}

const CLAMPED: device::Activation = device::Activation::SwigluClamped { alpha: 1.702, limit: 1.5 };

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for width in [1, 7, 16, 33, 100, 257] {
        cases.extend([Case::Norm { width }, Case::Add { width }, Case::AddNorm { width }, Case::AddGated { width }]);
        cases.extend([
            Case::Copy { width },
            Case::Gather { width },
            Case::Finish { cap: None, width },
            Case::Finish { cap: Some(3.0), width },
        ]);
        for activation in [device::Activation::Silu, device::Activation::Gelu, device::Activation::GeluTanh, CLAMPED] {
            cases.push(Case::Gate { activation, width });
        }
    }
    for format in FORMATS {
        let block = format.block_len();
        let widths: &[usize] = if block == 1 { &[1, 7, 31, 64, 100, 257] } else { &[block, 3 * block] };
        for (index, &inputs) in widths.iter().enumerate() {
            cases.push(Case::Embed { format, width: inputs, scale: [1.0, 12.5][index % 2] });
            for (other, outputs) in [1, 5, 32, 45, 70].into_iter().enumerate() {
                let (bias, rounded) = ((index + other) % 2 == 0, (index + other) % 3 != 0);
                cases.push(Case::Linear { format, inputs, outputs, bias, rounded });
            }
        }
    }
    for format in [Format::F32, Format::F16, Format::BF16, Format::Q8_0, Format::MXFP4] {
        let block = format.block_len();
        // Widths that fill no vector or tile; plain values also in some that kernels copy in pieces
        // of sixteen bytes.
        let widths = if block == 1 { vec![[37, 45], [200, 136], [64, 1088]] } else { vec![[block, 2 * block]] };
        for [hidden, inter] in widths {
            let case = |score, grouped, bias, activation| Case::Experts {
                format,
                score,
                hidden,
                inter,
                grouped,
                bias,
                activation,
            };
            cases.extend([
                case(RouterScore::Softmax, false, false, device::Activation::Silu),
                case(RouterScore::SoftmaxOfBest, false, true, CLAMPED),
                case(RouterScore::Sigmoid, true, false, device::Activation::GeluTanh),
            ]);
        }
    }
    cases.extend(coded_cases().into_iter().map(Case::Coded));
    cases.extend(fused_cases().into_iter().map(Case::Fused));
    cases
}

impl Case {
    /// Largest difference allowed, relative to the row's largest value or to [`Case::floor`].
    pub fn tolerance(&self) -> f32 {
        let product = |format: Format, exact_inputs: bool| match format {
            Format::F32 | Format::F16 => TIGHT,
            Format::BF16 if exact_inputs => TIGHT,
            Format::BF16 => BF16_ROUNDED,
            _ => QUANTIZED,
        };
        match *self {
            Case::Linear { format, rounded, .. } => product(format, rounded),
            // The values between the two products of an expert are not bf16 values.
            Case::Experts { format, .. } => 2.0 * product(format, false),
            Case::Coded(_) => QUANTIZED,
            // Gates and ups both have errors, and are multiplied.
            Case::Fused(fused) => 3.0 * if fused.is_plain() { BF16_ROUNDED } else { QUANTIZED },
            Case::Embed { format, .. } if format.is_quantized() => BF16_ROUNDED,
            _ => TIGHT,
        }
    }

    /// The same for a device that holds activations and plain weights in bf16, given inputs that
    /// are bf16 values. Its outputs are rounded by 2^-9 of each value, and so are the values
    /// between the two products of an expert; weights of 32 and of other 16 bits, and scales of
    /// codes, are rounded once more.
    pub fn bf16_tolerance(&self) -> f32 {
        match *self {
            Case::Add { .. } | Case::Copy { .. } | Case::Gather { .. } | Case::Finish { .. } => TIGHT,
            Case::Embed { format: Format::BF16, .. } => TIGHT,
            Case::Embed { .. } | Case::Norm { .. } | Case::AddNorm { .. } | Case::Gate { .. } => 1.0 / 256.0,
            Case::AddGated { .. } => 1.0 / 200.0,
            Case::Linear { format: Format::BF16, bias: false, .. } => 1.0 / 256.0,
            // Libraries need biases in the type of their outputs.
            Case::Linear { format: Format::BF16, .. } => 1.0 / 128.0,
            // For many rows activations are rounded to eight bits too, by a sixteenth of each, and
            // weights with all exponents leave few terms to average over.
            Case::Coded(coded) if coded.is_float8() => 1.0 / 12.0,
            Case::Fused(fused) => {
                if fused.is_float8() {
                    1.0 / 6.0
                } else {
                    1.0 / 50.0
                }
            }
            Case::Linear { .. } | Case::Coded(_) => 1.0 / 100.0,
            Case::Experts { .. } => 1.0 / 40.0,
        }
    }

    /// Whether it is a matrix product. Its bits may depend on the number of rows unless the backend
    /// promises otherwise.
    pub fn is_product(&self) -> bool {
        matches!(self, Case::Linear { .. } | Case::Coded(_) | Case::Fused(_) | Case::Experts { .. })
    }

    /// Smallest magnitude for the relative error of a row: the expected one of a product of random
    /// rows, so that a single output near zero is not compared with more digits than its terms
    /// have.
    pub fn floor(&self) -> f32 {
        match *self {
            Case::Linear { format, inputs, outputs, .. } => {
                (inputs as f32).sqrt() * deviation(&matrix(format, outputs, inputs, WEIGHTS))
            }
            Case::Coded(coded) => (coded.inputs as f32).sqrt() * deviation(&coded.matrix()),
            Case::Fused(_) => 1.0,
            _ => 1e-3,
        }
    }

    pub fn width(&self) -> usize {
        match *self {
            Case::Embed { width, .. }
            | Case::Add { width }
            | Case::Gate { width, .. }
            | Case::AddGated { width }
            | Case::Gather { width }
            | Case::Finish { width, .. } => width,
            Case::Norm { width } | Case::AddNorm { width } => 2 * width,
            Case::Copy { width } => 3 * width + width % 2,
            Case::Linear { outputs, .. } => outputs,
            Case::Coded(coded) => coded.width(),
            Case::Fused(fused) => fused.width(),
            Case::Experts { hidden, .. } => hidden,
        }
    }

    /// The outputs of the given rows, in that order.
    pub fn run<B: Backend>(&self, backend: &mut B, rows: &[usize]) -> Vec<f32> {
        match *self {
            Case::Embed { format, width, scale } => embed(backend, rows, format, width, scale),
            Case::Norm { width } => norm(backend, rows, width),
            Case::Add { width } => add(backend, rows, width),
            Case::AddNorm { width } => add_norm(backend, rows, width),
            Case::Linear { .. } => linear(backend, rows, self),
            Case::Coded(coded) => coded.run(backend, &values(rows, coded.inputs, 1)),
            Case::Fused(fused) => fused.run(backend, |width, salt| values(rows, width, salt), rows.len()),
            Case::Gate { activation, width } => gate(backend, rows, activation, width),
            Case::Experts { .. } => experts(backend, rows, self),
            Case::AddGated { width } => add_gated(backend, rows, width),
            Case::Copy { width } => copy(backend, rows, width),
            Case::Gather { width } => gather(backend, rows, width),
            Case::Finish { cap, width } => finish(backend, rows, cap, width),
        }
    }
}

const WEIGHTS: u64 = 1_000_000;

/// The values of some rows: a row's depend on its number and `salt` alone.
fn values(rows: &[usize], width: usize, salt: u64) -> Vec<f32> {
    rows.iter().flat_map(|&row| Random::new(salt * 1000 + row as u64).values(width)).collect()
}

fn filled<B: Backend>(backend: &mut B, rows: &[usize], width: usize, salt: u64, kind: TensorKind) -> B::Tensor {
    tensor(backend, width, &values(rows, width, salt), kind)
}

fn embed<B: Backend>(backend: &mut B, rows: &[usize], format: Format, width: usize, scale: f32) -> Vec<f32> {
    let table = backend.weight(&matrix(format, 50, width, WEIGHTS)).unwrap();
    let ids: Vec<u32> = rows.iter().map(|&row| (row * 7 % 50) as u32).collect();
    let inputs = inputs(backend, &batch(&ids, Vec::new()));
    let mut out = backend.tensor(rows.len(), width, Stream).unwrap();
    backend.embed(&mut out, &table, &inputs, scale);
    download(backend, &out, rows.len())
}

/// Each row of the result: the norm of the stream, then that of a branch.
fn norm<B: Backend>(backend: &mut B, rows: &[usize], width: usize) -> Vec<f32> {
    let weight = backend.vector(&Random::new(WEIGHTS).values(width)).unwrap();
    let mut normed = |kind, salt| {
        let x = filled(backend, rows, width, salt, kind);
        let mut out = backend.tensor(rows.len(), width, Activation).unwrap();
        backend.rms_norm(&mut out, &x, &weight, 1e-5, rows.len());
        download(backend, &out, rows.len())
    };
    let (stream, branch) = (normed(Stream, 1), normed(Activation, 2));
    beside(&stream, &branch, width)
}

fn beside(left: &[f32], right: &[f32], width: usize) -> Vec<f32> {
    left.chunks_exact(width).zip(right.chunks_exact(width)).flat_map(|(left, right)| [left, right].concat()).collect()
}

fn add<B: Backend>(backend: &mut B, rows: &[usize], width: usize) -> Vec<f32> {
    let mut residual = filled(backend, rows, width, 1, Stream);
    let x = filled(backend, rows, width, 2, Activation);
    backend.add(&mut residual, &x, 0.22, rows.len());
    download(backend, &residual, rows.len())
}

/// Each row of the result: the residual, then its norm.
fn add_norm<B: Backend>(backend: &mut B, rows: &[usize], width: usize) -> Vec<f32> {
    let mut residual = filled(backend, rows, width, 1, Stream);
    let x = filled(backend, rows, width, 2, Activation);
    let weight = backend.vector(&Random::new(WEIGHTS).values(width)).unwrap();
    let mut out = backend.tensor(rows.len(), width, Activation).unwrap();
    backend.add_rms_norm(&mut out, &mut residual, &x, -1.5, &weight, 1e-6, rows.len());
    let (residual, out) = (download(backend, &residual, rows.len()), download(backend, &out, rows.len()));
    beside(&residual, &out, width)
}

fn linear<B: Backend>(backend: &mut B, rows: &[usize], case: &Case) -> Vec<f32> {
    let &Case::Linear { format, inputs, outputs, bias, rounded } = case else { unreachable!() };
    let mut x = values(rows, inputs, 1);
    if rounded {
        round_to_bf16(&mut x);
    }
    let x = tensor(backend, inputs, &x, Activation);
    let weight = backend.weight(&matrix(format, outputs, inputs, WEIGHTS)).unwrap();
    assert!(backend.weight_bytes(&weight) > 0);
    let bias = bias.then(|| backend.vector(&Random::new(3).values(outputs)).unwrap());
    // One row more than requested: it must not change.
    let kind = if bias.is_some() { Activation } else { Scores };
    let mut out = tensor(backend, outputs, &vec![5.0; (rows.len() + 1) * outputs], kind);
    backend.linear(&mut out, &x, &weight, bias.as_ref(), rows.len());
    let mut out = download(backend, &out, rows.len() + 1);
    assert!(out.split_off(rows.len() * outputs).iter().all(|&value| value == 5.0), "wrote beyond its rows");
    out
}

fn gate<B: Backend>(backend: &mut B, rows: &[usize], activation: device::Activation, width: usize) -> Vec<f32> {
    let gate_up = filled(backend, rows, 2 * width, 1, Activation);
    let mut out = backend.tensor(rows.len(), width, Activation).unwrap();
    backend.gate(&mut out, &gate_up, activation, rows.len());
    download(backend, &out, rows.len())
}

fn experts<B: Backend>(backend: &mut B, rows: &[usize], case: &Case) -> Vec<f32> {
    let &Case::Experts { format, score, hidden, inter, grouped, bias, activation } = case else { unreachable!() };
    const EXPERTS: usize = 12;
    let all = |rows, cols, seed| (0..EXPERTS as u64).map(|expert| matrix(format, rows, cols, seed + expert)).collect();
    let biases = |width| (0..EXPERTS as u64).map(|expert| Random::new(500 + expert).values(width)).collect();
    let source = ExpertsSource {
        gate_up: all(2 * inter, hidden, WEIGHTS),
        down: all(hidden, inter, WEIGHTS + 100),
        gate_up_bias: bias.then(|| biases(2 * inter)),
        down_bias: bias.then(|| biases(hidden)),
    };
    let experts = backend.experts(source).unwrap();
    let choice_bias = backend.vector(&Random::new(77).values(EXPERTS)).unwrap();
    let x: Vec<f32> = values(rows, hidden, 1).iter().map(|value| value * 0.2).collect();
    let x = tensor(backend, hidden, &x, Activation);
    let logits = filled(backend, rows, EXPERTS, 2, Scores);
    let op = Routing {
        score,
        top_k: if grouped { 4 } else { 2 },
        normalize: grouped,
        scale: if grouped { 2.5 } else { 1.0 },
        choice_bias: grouped.then_some(&choice_bias),
        groups: if grouped { 4 } else { 1 },
        groups_kept: if grouped { 2 } else { 1 },
        activation,
    };
    let mut out = tensor(backend, hidden, &vec![5.0; rows.len() * hidden], Activation);
    backend.experts_forward(&mut out, &x, &logits, &experts, op, rows.len());
    download(backend, &out, rows.len())
}

fn add_gated<B: Backend>(backend: &mut B, rows: &[usize], width: usize) -> Vec<f32> {
    let mut out = filled(backend, rows, width, 1, Activation);
    let x = filled(backend, rows, width, 2, Activation);
    let gate = filled(backend, rows, 1, 3, Scores);
    backend.add_gated(&mut out, &x, &gate, rows.len());
    download(backend, &out, rows.len())
}

/// Copies columns to the right of others, in reversed rows and back, over earlier contents; from
/// and to tensors of either kind. Values of activations are rounded already.
fn copy<B: Backend>(backend: &mut B, rows: &[usize], width: usize) -> Vec<f32> {
    let twice = 2 * width + width % 2;
    let x = filled(backend, rows, width, 1, Activation);
    let mut wide = filled(backend, rows, twice, 2, Activation);
    backend.copy_columns(&mut wide, width, &x, rows.len());
    let mut turned = filled(backend, rows, twice, 3, Stream);
    let mut back = filled(backend, rows, twice, 4, Activation);
    let pairs: Vec<(u32, u32)> = (0..rows.len() as u32).rev().zip(0..).collect();
    backend.copy_rows(&mut turned, &wide, &pairs);
    backend.copy_rows(&mut back, &turned, &pairs);
    let mut widest = filled(backend, rows, width + twice, 5, Stream);
    backend.copy_columns(&mut widest, width, &back, rows.len());
    let mut out = filled(backend, rows, width + twice, 6, Stream);
    let pairs: Vec<(u32, u32)> = (0..rows.len() as u32).map(|row| (row, row)).collect();
    backend.copy_rows(&mut out, &widest, &pairs);
    download(backend, &out, rows.len())
}

/// Every row has a neighbour above it that is not requested.
fn gather<B: Backend>(backend: &mut B, rows: &[usize], width: usize) -> Vec<f32> {
    let doubled: Vec<usize> = rows.iter().flat_map(|&row| [row + 100, row]).collect();
    let x = filled(backend, &doubled, width, 1, Stream);
    let outputs = (0..rows.len() as u32).map(|index| 2 * index + 1).collect();
    let inputs = inputs(backend, &batch(&vec![0; doubled.len()], outputs));
    let mut out = backend.tensor(rows.len(), width, Stream).unwrap();
    backend.gather_outputs(&mut out, &x, &inputs);
    download(backend, &out, rows.len())
}

fn finish<B: Backend>(backend: &mut B, rows: &[usize], cap: Option<f32>, width: usize) -> Vec<f32> {
    let logits: Vec<f32> = values(rows, width, 1).iter().map(|value| value * 4.0).collect();
    let mut logits = tensor(backend, width, &logits, Scores);
    backend.finish_logits(&mut logits, 0.7, cap, rows.len());
    download(backend, &logits, rows.len())
}

/// Checks the helpers: values from the host or through `embed` come out of `download` unchanged.
pub fn round_trip<B: Backend>(backend: &mut B) {
    let mut values = Random::new(1).values(5 * 13);
    round_to_bf16(&mut values);
    let kinds = [Stream, Activation, Scores].map(|kind| tensor(backend, 13, &values, kind));
    for filled in kinds.into_iter().chain([embedded(backend, 13, &values)]) {
        assert_eq!(download(backend, &filled, 5), values);
        assert_eq!(download(backend, &filled, 2), values[..26]);
    }
    assert_eq!(f32_matrix(13, &values).num_rows(), 5);
}
