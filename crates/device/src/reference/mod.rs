//! Every operation in plain loops: other backends are compared with it, and it runs any model in
//! f32.
//!
//! Weights are decoded to f32, activations are f32, sums are f64, keys and values are bytes of
//! their storage format. The code is plain on purpose, and slow.

mod attention;
mod blocks;
pub(crate) mod codes;
mod experts;
mod math;

pub use experts::route;

use folio_formats::Matrix;

use crate::{
    Activation, Attention, Batch, BlockCopies, Error, ExpertsSource, Handles, InputLimits, KvShape, Memory, Operations,
    PrepareQkv, Result, Routing, Sampling, StepSize, Steps, TensorKind, tree,
};

#[derive(Clone, Copy, Debug, Default)]
pub struct Reference {
    fused_rows: usize,
}

impl Reference {
    pub fn new() -> Self {
        Self::default()
    }

    /// Has callers ask for fused products in steps of up to `rows` rows, as a GPU does. They are
    /// computed by their parts.
    pub fn with_fused_rows(rows: usize) -> Self {
        Self { fused_rows: rows }
    }
}

/// `[rows, cols]`, row by row.
#[derive(Clone, Debug)]
pub struct Tensor {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

#[derive(Clone, Debug)]
pub struct Vector(Vec<f32>);

/// `[rows, cols]` = `[outputs, inputs]`.
#[derive(Clone, Debug)]
pub struct Weight {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

#[derive(Clone, Debug)]
pub struct Experts {
    gate_up: Vec<Weight>,
    down: Vec<Weight>,
    gate_up_bias: Option<Vec<Vector>>,
    down_bias: Option<Vec<Vector>>,
}

/// Keys and values, each `[layers, slots, kv_heads]` heads as bytes of the storage format.
#[derive(Clone, Debug)]
pub struct Kv {
    shape: KvShape,
    keys: Vec<u8>,
    values: Vec<u8>,
}

#[derive(Clone, Debug)]
pub struct Inputs {
    limits: InputLimits,
    batch: Batch,
    ropes: Vec<Rope>,
}

/// Cosines and sines `[rows, pairs]` of the step's positions.
#[derive(Clone, Debug, Default)]
struct Rope {
    pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Zeros, or an error if there is not enough memory.
fn zeros<T: Clone + Default>(what: &'static str, len: usize) -> Result<Vec<T>> {
    let out_of_memory = |_| Error::OutOfMemory { what, bytes: (size_of::<T>() as u64).saturating_mul(len as u64) };
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(out_of_memory)?;
    values.resize(len, T::default());
    Ok(values)
}

impl Tensor {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.cols..(row + 1) * self.cols]
    }

    fn check(&self, what: &str, rows: usize, cols: usize) {
        assert!(rows <= self.rows, "{what} has {} rows, the operation {rows}", self.rows);
        assert_eq!(self.cols, cols, "width of {what}");
    }
}

impl Weight {
    fn new(matrix: &Matrix<'_>) -> Result<Self> {
        let (rows, cols) = (matrix.num_rows(), matrix.cols());
        let mut values = zeros("weight", rows * cols)?;
        for (row, values) in values.chunks_exact_mut(cols.max(1)).enumerate() {
            matrix.read_row(row, values);
        }
        Ok(Self { rows, cols, values })
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    /// One output of `x * weight^T (+ bias)`.
    fn output(&self, output: usize, x: &[f32], bias: Option<&Vector>) -> f32 {
        (math::dot(x, self.row(output)) + bias.map_or(0.0, |bias| f64::from(bias.0[output]))) as f32
    }

    /// One row of outputs.
    fn apply(&self, x: &[f32], bias: Option<&Vector>) -> Vec<f32> {
        self.check_bias(bias);
        (0..self.rows).map(|output| self.output(output, x, bias)).collect()
    }

    fn check_bias(&self, bias: Option<&Vector>) {
        if let Some(bias) = bias {
            assert_eq!(bias.0.len(), self.rows, "one bias an output");
        }
    }
}

impl Inputs {
    fn rope(&self, rope: usize) -> &Rope {
        let angles = &self.ropes[rope];
        assert_eq!(angles.cos.len(), self.batch.num_rows() * angles.pairs, "angles of rope {rope} are of this step");
        angles
    }

    fn check(&self, batch: &Batch) {
        batch.check(&self.limits);
        // Spans with trees were checked before.
        for span in batch.spans.iter().filter(|span| tree::of_span(&batch.ancestors, span).is_none()) {
            for index in 0..span.num_rows {
                let (found, expected) =
                    (batch.positions[(span.first_row + index) as usize], span.context - span.num_rows + index);
                assert_eq!(found, expected, "position of row {}", span.first_row + index);
            }
        }
    }
}

impl Handles for Reference {
    type Tensor = Tensor;
    type Vector = Vector;
    type Weight = Weight;
    type Experts = Experts;
    type Kv = Kv;
    type Inputs = Inputs;
}

impl Memory for Reference {
    fn tensor(&mut self, rows: usize, cols: usize, _: TensorKind) -> Result<Tensor> {
        Ok(Tensor { rows, cols, values: zeros("tensor", rows * cols)? })
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector> {
        Ok(Vector(values.to_vec()))
    }

    fn weight(&mut self, matrix: &Matrix<'_>) -> Result<Weight> {
        Weight::new(matrix)
    }

    fn experts(&mut self, source: ExpertsSource<'_>) -> Result<Experts> {
        Experts::new(source)
    }

    fn kv(&mut self, shape: KvShape) -> Result<Kv> {
        // Half of a block is keys; an impossible size is refused like missing memory.
        let bytes = (shape.block_bytes() / 2).saturating_mul(shape.blocks as u64);
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        Ok(Kv { shape, keys: zeros("keys", len)?, values: zeros("values", len)? })
    }

    fn inputs(&mut self, limits: InputLimits) -> Result<Inputs> {
        Ok(Inputs { limits, batch: Batch::default(), ropes: vec![Rope::default(); limits.ropes] })
    }

    fn weight_bytes(&self, weight: &Weight) -> u64 {
        4 * weight.values.len() as u64
    }

    fn experts_bytes(&self, experts: &Experts) -> u64 {
        experts.bytes()
    }
}

impl Steps for Reference {
    fn numerics(&self) -> String {
        format!("reference {}", std::env::consts::ARCH)
    }

    fn fused_rows(&self) -> usize {
        self.fused_rows
    }

    fn upload(&mut self, inputs: &mut Inputs, batch: &Batch) -> StepSize {
        inputs.check(batch);
        inputs.batch.clone_from(batch);
        inputs.ropes.fill(Rope::default());
        StepSize::of(batch)
    }
}

impl Operations for Reference {
    fn rope_angles(&mut self, inputs: &mut Inputs, rope: usize, inv_freq: &Vector, magnitude: f32) {
        let pairs = inv_freq.0.len();
        assert!(pairs <= inputs.limits.rope_pairs, "{pairs} pairs of at most {}", inputs.limits.rope_pairs);
        let positions = inputs.batch.positions.iter();
        let angles: Vec<f64> = positions
            .flat_map(|&position| inv_freq.0.iter().map(move |&freq| f64::from(position as f32 * freq)))
            .collect();
        let cos = angles.iter().map(|angle| angle.cos() as f32 * magnitude).collect();
        let sin = angles.iter().map(|angle| angle.sin() as f32 * magnitude).collect();
        inputs.ropes[rope] = Rope { pairs, cos, sin };
    }

    fn embed(&mut self, out: &mut Tensor, table: &Weight, inputs: &Inputs, scale: f32) {
        out.check("embeddings", inputs.batch.num_rows(), table.cols);
        for (row, &token) in inputs.batch.tokens.iter().enumerate() {
            for (out, value) in out.row_mut(row).iter_mut().zip(table.row(token as usize)) {
                *out = value * scale;
            }
        }
    }

    fn rms_norm(&mut self, out: &mut Tensor, x: &Tensor, weight: &Vector, eps: f32, rows: usize) {
        x.check("norm input", rows, weight.0.len());
        out.check("norm output", rows, weight.0.len());
        for row in 0..rows {
            out.row_mut(row).copy_from_slice(x.row(row));
            math::rms_norm(out.row_mut(row), &weight.0, eps);
        }
    }

    fn add(&mut self, residual: &mut Tensor, x: &Tensor, scale: f32, rows: usize) {
        residual.check("residual", rows, x.cols);
        x.check("addend", rows, x.cols);
        for row in 0..rows {
            for (residual, value) in residual.row_mut(row).iter_mut().zip(x.row(row)) {
                *residual += value * scale;
            }
        }
    }

    fn add_rms_norm(
        &mut self,
        out: &mut Tensor,
        residual: &mut Tensor,
        x: &Tensor,
        scale: f32,
        weight: &Vector,
        eps: f32,
        rows: usize,
    ) {
        self.add(residual, x, scale, rows);
        self.rms_norm(out, residual, weight, eps, rows);
    }

    fn linear(&mut self, out: &mut Tensor, x: &Tensor, weight: &Weight, bias: Option<&Vector>, rows: usize) {
        x.check("linear input", rows, weight.cols);
        out.check("linear output", rows, weight.rows);
        weight.check_bias(bias);
        // A few rows at a time, so that weights are read from memory once for all of them.
        for first in (0..rows).step_by(8) {
            for output in 0..weight.rows {
                for row in first..rows.min(first + 8) {
                    out.row_mut(row)[output] = weight.output(output, x.row(row), bias);
                }
            }
        }
    }

    fn prepare_qkv(&mut self, qkv: &mut Tensor, kv: &mut Kv, layer: usize, op: PrepareQkv<'_, Self>, inputs: &Inputs) {
        attention::prepare_qkv(qkv, kv, layer, &op, inputs);
    }

    fn attention(
        &mut self,
        out: &mut Tensor,
        qkv: &Tensor,
        kv: &Kv,
        layer: usize,
        op: Attention<'_, Self>,
        inputs: &Inputs,
    ) {
        attention::attention(out, qkv, kv, layer, &op, inputs);
    }

    fn gate(&mut self, out: &mut Tensor, gate_up: &Tensor, activation: Activation, rows: usize) {
        gate_up.check("gate and up", rows, 2 * out.cols);
        out.check("gated", rows, out.cols);
        for row in 0..rows {
            let (gate, up) = gate_up.row(row).split_at(out.cols);
            for ((out, &gate), &up) in out.row_mut(row).iter_mut().zip(gate).zip(up) {
                *out = math::gated(activation, gate, up);
            }
        }
    }

    fn experts_forward(
        &mut self,
        out: &mut Tensor,
        x: &Tensor,
        router_logits: &Tensor,
        experts: &Experts,
        op: Routing<'_, Self>,
        rows: usize,
    ) {
        experts::forward(out, x, router_logits, experts, &op, rows);
    }

    fn add_gated(&mut self, out: &mut Tensor, x: &Tensor, gate: &Tensor, rows: usize) {
        out.check("gated sum", rows, x.cols);
        x.check("gated addend", rows, x.cols);
        gate.check("gate", rows, 1);
        for row in 0..rows {
            let share = math::sigmoid(f64::from(gate.row(row)[0]));
            for (out, &value) in out.row_mut(row).iter_mut().zip(x.row(row)) {
                *out = (f64::from(*out) + f64::from(value) * share) as f32;
            }
        }
    }

    fn gather_outputs(&mut self, out: &mut Tensor, x: &Tensor, inputs: &Inputs) {
        out.check("gathered rows", inputs.batch.outputs.len(), x.cols);
        for (index, &row) in inputs.batch.outputs.iter().enumerate() {
            out.row_mut(index).copy_from_slice(x.row(row as usize));
        }
    }

    fn finish_logits(&mut self, logits: &mut Tensor, scale: f32, soft_cap: Option<f32>, rows: usize) {
        logits.check("logits", rows, logits.cols);
        for value in &mut logits.values[..rows * logits.cols] {
            let scaled = f64::from(*value) * f64::from(scale);
            *value = soft_cap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh()) as f32;
        }
    }

    fn copy_blocks(&mut self, kv: &mut Kv, pairs: &[(u32, u32)]) {
        for &(from, to) in pairs {
            blocks::copy(kv, from, to);
        }
    }

    fn move_tokens(&mut self, kv: &mut Kv, pairs: &[(u32, u32)]) {
        for &(from, to) in pairs {
            attention::move_token(kv, from as usize, to as usize);
        }
    }

    fn upload_rows(&mut self, tensor: &mut Tensor, values: &[f32]) {
        tensor.check("uploaded", values.len() / tensor.cols.max(1), tensor.cols);
        tensor.values[..values.len()].copy_from_slice(values);
    }

    fn download(&mut self, tensor: &Tensor, rows: usize, out: &mut Vec<f32>) {
        tensor.check("downloaded", rows, tensor.cols);
        out.clear();
        out.extend_from_slice(&tensor.values[..rows * tensor.cols]);
    }

    fn save_block(&mut self, kv: &Kv, block: u32, out: &mut [u8]) {
        blocks::save(kv, block, out);
    }

    fn load_block(&mut self, kv: &mut Kv, block: u32, bytes: &[u8]) {
        blocks::load(kv, block, bytes);
    }
}

impl Sampling for Reference {}

impl BlockCopies for Reference {}
