//! The backend itself: its options, its state, and each operation of the trait in a few lines.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use folio_formats::Matrix;

use super::blas::Blas;
use super::driver::{self, Device, Moving, Stream, args};
use super::experts::Experts;
use super::gemm90::Gemm90;
use super::graphs::{Recordings, StepKind};
use super::inputs::{self, Inputs};
use super::kv::{Begun, Kv};
use super::linear_few::Finish;
use super::products::WIDENED_BYTES;
use super::sampling::Sampler;
use super::scratch::Scratch;
use super::tensor::{Float, Tensor, Vector};
use super::weight::{Loader, Weight};
use super::{attention, copies, launch, linear_stream, moves, rows};
use crate::{
    Activation, Attention, Batch, BlockCopies, Drawn, Draws, Error, ExpertsSource, Handles, HostMemory, InputLimits,
    KvShape, Memory, Norm, Operations, PrepareQkv, Product, Result, Routing, Sampling, StepSize, Steps, TensorKind,
};

/// Type of activations, and of weights that are not quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    #[default]
    BF16,
    /// Everything in f32, for comparison with the CPU: slow.
    F32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    pub ordinal: usize,
    pub activations: Precision,
    /// Whether a row's bits depend on that row alone, with any other rows in the step.
    pub batch_invariant: bool,
    /// Whether cuBLASLt is used if it is found.
    pub use_cublas: bool,
    /// Whether decode steps are recorded and replayed.
    pub graphs: bool,
    /// Folder for kernels compiled on this machine; without it none are stored.
    pub cache_folder: Option<PathBuf>,
    /// Seed of random matrices that are generated on the device instead of read.
    pub random_weights: Option<u64>,
    /// Form of generated matrices of layers.
    pub random_form: RandomForm,
}

/// Form of random weights; matrices as tall as a vocabulary stay plain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RandomForm {
    /// In the matrix's own form.
    #[default]
    Plain,
    /// e4m3 with a scale per output.
    Float8,
    /// Eight-bit integers in groups of 128.
    Int8,
    /// Four-bit integers in groups of 128.
    Int4,
}

impl Default for CudaConfig {
    fn default() -> Self {
        Self {
            ordinal: 0,
            activations: Precision::BF16,
            batch_invariant: false,
            use_cublas: true,
            graphs: true,
            cache_folder: None,
            random_weights: None,
            random_form: RandomForm::Plain,
        }
    }
}

pub struct Cuda {
    // Dropped in this order: recorded steps and libraries before the device.
    steps: Recordings<StepKind>,
    pub(super) blas: Option<Blas>,
    /// The reason why cuBLASLt is missing, if it was requested.
    blas_missing: Option<String>,
    pub(super) gemm90: Option<Gemm90>,
    pub(super) scratch: Scratch,
    loader: Loader,
    /// Created with the inputs.
    sampler: Option<Sampler>,
    most_outputs: usize,
    pub(super) config: CudaConfig,
    /// Rows of the largest step that inputs were made for.
    pub(super) most_rows: usize,
    /// Most KV heads of any layer group.
    most_kv_heads: usize,
    /// Number of matrices made so far, so that no two random ones are the same.
    matrices: u64,
    /// Block copies in flight that have not been collected, oldest first.
    moving: VecDeque<Moving>,
    /// Error of a step besides those that the device remembers.
    fault: Option<Error>,
    /// Address and bytes of the weight that is read after the next attention.
    pub(super) ahead: Option<(u64, usize)>,
    pub(super) device: Arc<Device>,
}

impl Cuda {
    pub fn new(config: CudaConfig) -> Result<Self> {
        let opened = driver::CudaConfig { ordinal: config.ordinal, cache_folder: config.cache_folder.clone() };
        Self::on(Arc::new(Device::open(&opened)?), config)
    }

    /// Uses a device that is open already; the one that the configuration names is ignored.
    pub fn on(device: Arc<Device>, config: CudaConfig) -> Result<Self> {
        let wanted = config.use_cublas && !config.batch_invariant && config.activations == Precision::BF16;
        let (blas, blas_missing) = match wanted.then(|| Blas::open(&device)) {
            Some(Ok(blas)) => (Some(blas), None),
            Some(Err(error)) => (None, Some(error.to_string())),
            None => (None, None),
        };
        let gemm90 = Gemm90::open(&device, blas.is_none())?;
        Ok(Self {
            steps: Recordings::default(),
            blas,
            blas_missing,
            gemm90,
            scratch: Scratch::default(),
            loader: Loader::new(&device),
            sampler: None,
            most_outputs: 0,
            config,
            most_rows: 0,
            most_kv_heads: 0,
            matrices: 0,
            moving: VecDeque::new(),
            fault: None,
            ahead: None,
            device,
        })
    }

    /// Another backend on the same device and its stream, for a model that runs in turn with this
    /// one's.
    pub fn beside(&self) -> Result<Self> {
        Self::on(Arc::clone(&self.device), self.config.clone())
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn config(&self) -> &CudaConfig {
        &self.config
    }

    /// The reason why matrix products of many rows run without cuBLASLt although it was requested.
    pub fn missing_cublas(&self) -> Option<&str> {
        self.blas_missing.as_deref()
    }

    /// Number of sizes of decode steps that are replayed.
    pub fn recorded_steps(&self) -> usize {
        self.steps.recorded()
    }

    /// Number of kinds of draws that are replayed.
    pub fn recorded_draws(&self) -> usize {
        self.sampler.as_ref().map_or(0, Sampler::recorded)
    }

    /// Whether work is recorded. A profile measures kernels one by one instead.
    fn records(&self) -> bool {
        self.config.graphs && !self.device.is_profiled()
    }

    pub(super) fn float(&self) -> Float {
        match self.config.activations {
            Precision::BF16 => Float::Bf16,
            Precision::F32 => Float::F32,
        }
    }

    /// Scratch memory of a step; without it the step is given up.
    pub(super) fn room(&mut self, kind: usize, bytes: usize) -> Option<u64> {
        let found = self.scratch.at_least(&self.device, kind, bytes);
        self.note(found)
    }

    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.fault.get_or_insert(error)).ok()
    }

    fn begun(&mut self, begun: Begun) -> Option<Box<dyn HostMemory>> {
        match begun {
            Ok(moving) => {
                self.moving.push_back(moving);
                None
            }
            Err((memory, error)) => {
                self.fault.get_or_insert(error);
                Some(memory)
            }
        }
    }

    /// A new seed for every matrix, if matrices are generated.
    fn seed(&mut self) -> Option<u64> {
        self.matrices += 1;
        self.config.random_weights.map(|seed| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(4 * self.matrices))
    }
}

impl Handles for Cuda {
    type Tensor = Tensor;
    type Vector = Vector;
    type Weight = Weight;
    type Experts = Experts;
    type Kv = Kv;
    type Inputs = Inputs;
}

impl Memory for Cuda {
    fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<Tensor> {
        Tensor::new(&self.device, rows, cols, kind, self.float())
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector> {
        Vector::new(&self.device, values)
    }

    fn weight(&mut self, matrix: &Matrix<'_>) -> Result<Weight> {
        let (seed, float) = (self.seed(), self.float());
        let weight = match seed {
            Some(seed) => {
                Weight::random(&self.device, self.gemm90.as_ref(), matrix, float, (seed, self.config.random_form))?
            }
            None => Weight::load(&mut self.loader, self.gemm90.as_ref(), matrix, float)?,
        };
        let widened = 2 * weight.n * weight.k;
        if weight.plain().is_none() && widened <= WIDENED_BYTES {
            // Allocated now, because a step allocates nothing.
            self.scratch.at_least(&self.device, Scratch::WEIGHTS, widened)?;
        }
        Ok(weight)
    }

    fn experts(&mut self, source: ExpertsSource<'_>) -> Result<Experts> {
        let (seed, float) = (self.seed(), self.float());
        Experts::new(&mut self.loader, source, float, seed)
    }

    fn reads_matrices(&self) -> bool {
        self.config.random_weights.is_none()
    }

    fn kv(&mut self, shape: KvShape) -> Result<Kv> {
        self.most_kv_heads = self.most_kv_heads.max(shape.kv_heads);
        Kv::new(&self.device, shape)
    }

    fn inputs(&mut self, limits: InputLimits) -> Result<Inputs> {
        attention::check_merges(inputs::most_spans(&limits), self.most_kv_heads)?;
        self.most_rows = self.most_rows.max(limits.rows).max(limits.outputs);
        if limits.outputs > self.most_outputs {
            self.most_outputs = limits.outputs;
            self.sampler = Some(Sampler::new(&self.device, limits.outputs)?);
        }
        Inputs::new(&self.device, limits)
    }

    fn value_bytes(&self, kind: TensorKind) -> usize {
        match kind {
            TensorKind::Activation => self.float().bytes(),
            TensorKind::Stream | TensorKind::Scores => Float::F32.bytes(),
        }
    }

    fn weight_bytes(&self, weight: &Weight) -> u64 {
        weight.bytes()
    }

    fn experts_bytes(&self, experts: &Experts) -> u64 {
        experts.bytes()
    }
}

impl Steps for Cuda {
    fn numerics(&self) -> String {
        let info = self.device.info();
        let precision = match self.config.activations {
            Precision::BF16 => "bf16",
            Precision::F32 => "f32",
        };
        let mode = if self.config.batch_invariant { " batch-invariant" } else { "" };
        let blas = self.blas.as_ref().map_or(String::new(), |blas| format!(" cublaslt {}", blas.version()));
        let (major, minor) = info.capability;
        format!("cuda {} {major}.{minor} {precision}{mode}{blas} kernels {}", info.name, driver::kernels_hash())
    }

    fn fused_rows(&self) -> usize {
        self.few_rows()
    }

    fn upload(&mut self, inputs: &mut Inputs, batch: &Batch) -> StepSize {
        self.steps.abandon(&self.device);
        let sampler = self.sampler.as_ref();
        let (drawn, awaited) = (sampler.map_or((0, &[][..]), Sampler::latest), sampler.is_none_or(Sampler::is_idle));
        let size = inputs.upload(batch, drawn, awaited);
        self.device.step_begins(inputs.size().rows, inputs.decodes());
        self.note(size).unwrap_or(StepSize::of(batch))
    }

    fn begin(&mut self, inputs: &Inputs, num_logits: usize) -> bool {
        match StepKind::of(inputs, num_logits).filter(|_| self.records()) {
            Some(kind) => self.steps.begin(&self.device, kind),
            None => true,
        }
    }

    fn end(&mut self, _: &Inputs) {
        let ended = self.steps.end(&self.device);
        self.note(ended);
    }

    fn records_copies(&self) -> bool {
        true
    }

    fn forget_steps(&mut self) {
        // The work in flight may be a replay.
        let done = self.device.synchronize(Stream::Compute);
        self.note(done);
        self.steps = Recordings::default();
    }

    fn check(&mut self) -> Result<()> {
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => self.device.check(),
        }
    }
}

impl Sampling for Cuda {
    fn draws_tokens(&self) -> bool {
        true
    }

    fn draw(&mut self, logits: &mut Tensor, draws: &Draws) {
        let records = self.records();
        let sampler = self.sampler.as_mut().expect("inputs were made, and of them the logits");
        sampler.draw(&self.device, logits, draws, records);
    }

    fn is_drawn(&mut self) -> bool {
        self.sampler.as_ref().is_none_or(Sampler::is_drawn)
    }

    fn drawn(&mut self, out: &mut Vec<Drawn>) -> Result<()> {
        // The results are collected in any case: a fault belongs to its step, and the next step's
        // draw is another.
        let drawn = self.sampler.as_mut().expect("something was drawn").drawn(out);
        self.fault.take().map_or(drawn, Err)
    }
}

impl Operations for Cuda {
    fn rope_angles(&mut self, inputs: &mut Inputs, rope: usize, inv_freq: &Vector, magnitude: f32) {
        rows::rope_angles(&self.device, inputs, rope, inv_freq, magnitude);
    }

    fn embed(&mut self, out: &mut Tensor, table: &Weight, inputs: &Inputs, scale: f32) {
        let (rows, width) = (inputs.size().rows, table.k);
        out.check("embeddings", rows, width);
        let Some(values) = table.plain() else {
            assert_eq!(out.float(), Float::F32, "embeddings are the residual stream");
            return linear_stream::embed(&self.device, table, out.ptr(), inputs.tokens(), scale, rows);
        };
        let name = format!("embed_{}_{}", table.float.name(), out.float().name());
        let grid = [width.div_ceil(1024) as u32, rows as u32, 1];
        let (table, tokens) = (values, inputs.tokens());
        launch(&self.device, &name, grid, 256, args![out.ptr(), table, tokens, scale, width as i32]);
    }

    fn rms_norm(&mut self, out: &mut Tensor, x: &Tensor, weight: &Vector, eps: f32, rows: usize) {
        rows::rms_norm(&self.device, out, x, weight, eps, rows);
    }

    fn add(&mut self, residual: &mut Tensor, x: &Tensor, scale: f32, rows: usize) {
        rows::add(&self.device, residual, x, scale, rows);
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
        rows::add_rms_norm(&self.device, out, residual, x, scale, weight, eps, rows);
    }

    fn linear(&mut self, out: &mut Tensor, x: &Tensor, weight: &Weight, bias: Option<&Vector>, rows: usize) {
        self.multiply(out, x, weight, bias, rows);
    }

    fn norm_linear(
        &mut self,
        out: &mut Tensor,
        normed: &mut Tensor,
        x: &Tensor,
        norm: Norm<'_, Self>,
        product: Product<'_, Self>,
        rows: usize,
    ) {
        let (weight, bias) = (product.weight, product.bias);
        let target = (&*out, Finish::Write(out.float()));
        if !self.multiply_normed(target, x, (norm.weight, norm.eps), (weight, bias), rows) {
            self.rms_norm(normed, x, norm.weight, norm.eps, rows);
            self.multiply(out, normed, weight, bias, rows);
        }
    }

    fn norm_linear_gated(
        &mut self,
        out: &mut Tensor,
        gate_up: &mut Tensor,
        normed: &mut Tensor,
        x: &Tensor,
        norm: Norm<'_, Self>,
        product: Product<'_, Self>,
        activation: Activation,
        rows: usize,
    ) {
        let target = (&*out, Finish::Gate(activation));
        let (weight, bias) = (product.weight, product.bias);
        if self.multiply_normed(target, x, (norm.weight, norm.eps), (weight, bias), rows) {
            return;
        }
        self.rms_norm(normed, x, norm.weight, norm.eps, rows);
        self.linear_gated(out, gate_up, normed, product, activation, rows);
    }

    fn linear_gated(
        &mut self,
        out: &mut Tensor,
        gate_up: &mut Tensor,
        x: &Tensor,
        product: Product<'_, Self>,
        activation: Activation,
        rows: usize,
    ) {
        let (weight, bias) = (product.weight, product.bias);
        if !self.multiply_gated(out, x, (weight, bias), activation, rows) {
            self.multiply(gate_up, x, weight, bias, rows);
            self.gate(out, gate_up, activation, rows);
        }
    }

    fn linear_add(
        &mut self,
        residual: &mut Tensor,
        branch: &mut Tensor,
        x: &Tensor,
        product: Product<'_, Self>,
        scale: f32,
        rows: usize,
    ) {
        if !self.multiply_added(residual, x, (product.weight, product.bias), scale, rows) {
            self.multiply(branch, x, product.weight, product.bias, rows);
            self.add(residual, branch, scale, rows);
        }
    }

    fn fetch_ahead(&mut self, weight: &Weight) {
        self.ahead = weight.runs().first().map(|run| (run.buffer.ptr(), run.buffer.bytes()));
    }

    fn prepare_qkv(&mut self, qkv: &mut Tensor, kv: &mut Kv, layer: usize, op: PrepareQkv<'_, Self>, inputs: &Inputs) {
        rows::prepare_qkv(&self.device, qkv, kv, layer, &op, inputs);
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
        self.attend(out, qkv, kv, layer, &op, inputs);
        self.steps.first_piece_ends(&self.device);
    }

    fn gate(&mut self, out: &mut Tensor, gate_up: &Tensor, activation: Activation, rows: usize) {
        rows::gate(&self.device, out, gate_up, activation, rows);
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
        self.run_experts(out, x, router_logits, experts, &op, rows);
    }

    fn add_gated(&mut self, out: &mut Tensor, x: &Tensor, gate: &Tensor, rows: usize) {
        rows::add_gated(&self.device, out, x, gate, rows);
    }

    fn gather_outputs(&mut self, out: &mut Tensor, x: &Tensor, inputs: &Inputs) {
        rows::gather(&self.device, out, x, inputs);
    }

    fn finish_logits(&mut self, logits: &mut Tensor, scale: f32, soft_cap: Option<f32>, rows: usize) {
        rows::finish_logits(&self.device, logits, scale, soft_cap, rows);
    }

    fn copy_columns(&mut self, out: &mut Tensor, column: usize, x: &Tensor, rows: usize) {
        copies::copy_columns(&self.device, out, column, x, rows);
    }

    fn copy_rows(&mut self, out: &mut Tensor, x: &Tensor, pairs: &[(u32, u32)]) {
        copies::copy_rows(&self.device, out, x, pairs);
    }

    fn copy_blocks(&mut self, kv: &mut Kv, pairs: &[(u32, u32)]) {
        let copied = kv.copy(&self.device, pairs);
        self.note(copied);
    }

    fn move_tokens(&mut self, kv: &mut Kv, pairs: &[(u32, u32)]) {
        moves::move_tokens(&self.device, kv, pairs);
    }

    fn upload_rows(&mut self, tensor: &mut Tensor, values: &[f32]) {
        let copied = tensor.upload(&self.device, values);
        self.note(copied);
    }

    fn download(&mut self, tensor: &Tensor, rows: usize, out: &mut Vec<f32>) {
        let copied = tensor.download(&self.device, rows, out);
        if self.note(copied).is_none() {
            // The caller sees NaN and notices the fault.
            out.clear();
            out.resize(rows * tensor.cols(), f32::NAN);
        }
    }

    fn save_block(&mut self, kv: &Kv, block: u32, out: &mut [u8]) {
        let copied = kv.save(&self.device, block, out);
        self.note(copied);
    }

    fn load_block(&mut self, kv: &mut Kv, block: u32, bytes: &[u8]) {
        let copied = kv.load(&self.device, block, bytes);
        self.note(copied);
    }
}

impl BlockCopies for Cuda {
    fn start_save(&mut self, kv: &Kv, block: u32, memory: Box<dyn HostMemory>) -> Option<Box<dyn HostMemory>> {
        let begun = kv.start_save(&self.device, block, memory);
        self.begun(begun)
    }

    fn start_load(&mut self, kv: &mut Kv, block: u32, memory: Box<dyn HostMemory>) -> Option<Box<dyn HostMemory>> {
        let begun = kv.start_load(&self.device, block, memory);
        self.begun(begun)
    }

    fn moved(&mut self) -> Box<dyn HostMemory> {
        self.moving.pop_front().expect("a copy was started").wait()
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Work in flight still uses memory that is about to be freed. A lost device has no work in
        // flight.
        let _ = self.device.synchronize(Stream::Compute);
    }
}
