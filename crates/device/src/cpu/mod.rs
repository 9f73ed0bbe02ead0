//! The fast CPU backend: weights packed once into panels, kernels by instruction set, one pool of
//! threads.
//!
//! This file only wires: every operation is one function in its own module, called with the pool
//! and the instruction set as first argument. Lanes run along outputs and sums along the inner
//! dimension in one fixed order, so a row's bits depend neither on the rows beside it nor on the
//! number of threads.
#![allow(unsafe_code)]

mod attention;
mod buffer;
pub mod ceilings;
mod elementwise;
mod embed;
mod experts;
mod inputs;
mod isa;
mod kv;
mod matmul;
mod norm;
mod packed;
mod pool;
mod qkv;
#[cfg(target_os = "linux")]
mod region;
mod routing;
mod simd;
mod tensor;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod topology;
mod weight;
mod working;

pub use isa::Isa;
pub use packed::{LAYOUT_VERSION, Packed, PackedFile, PackedParts, PackedPlace, PackedWriter};
pub use pool::Pool;
pub use tensor::{Tensor, Vector};
pub use weight::{PartShape, Weight, packed_experts_parts, packed_parts};
pub use working::{WorkingShape, working_bytes};

use std::sync::Arc;

use folio_formats::Matrix;

use packed::Supply;

use crate::{
    Activation, Attention, Batch, BlockCopies, Error, ExpertsSource, Handles, InputLimits, KvShape, Memory, Operations,
    PrepareQkv, Pulse, Result, Routing, Sampling, StepSize, Steps, TensorKind,
};

/// Options of a [`Cpu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that compute, including the caller's.
    pub threads: usize,
    /// Instruction set of the kernels; `None` for the best of this machine.
    pub isa: Option<Isa>,
}

impl CpuConfig {
    /// Whether its threads are spread over several memory nodes, each with the weights that it
    /// reads.
    pub fn has_memory_nodes(&self) -> bool {
        !topology::nodes(self.threads).is_empty()
    }
}

/// Context of every operation. `isa` is one of [`Isa::available`]: [`Cpu::new`] checks it, and
/// entering a kernel relies on it.
#[derive(Clone, Copy)]
pub(crate) struct Ctx<'a> {
    pub pool: &'a Pool,
    pub isa: Isa,
}

/// The CPU backend.
pub struct Cpu {
    pool: Pool,
    isa: Isa,
    /// Source of memory for the weights that are being loaded.
    supply: Supply,
    /// The file of packed weights that the model uses, if there is one.
    packed: Option<Arc<PackedFile>>,
    activations: matmul::Scratch,
    routing: experts::Scratch,
}

impl Cpu {
    pub fn new(config: CpuConfig) -> Result<Cpu> {
        let isa = config.isa.unwrap_or_else(Isa::best);
        if !Isa::available().contains(&isa) {
            return Err(Error::Unsupported { backend: "this cpu", what: format!("instruction set {}", isa.name()) });
        }
        Ok(Cpu {
            pool: Pool::new(config.threads)?,
            isa,
            supply: Supply::Fresh,
            packed: None,
            activations: matmul::Scratch::default(),
            routing: experts::Scratch::default(),
        })
    }

    /// Another backend on the same threads, for a second model that runs in turn with the first.
    pub fn beside(&self) -> Cpu {
        Cpu {
            pool: self.pool.beside(),
            isa: self.isa,
            supply: Supply::Fresh,
            packed: None,
            activations: matmul::Scratch::default(),
            routing: experts::Scratch::default(),
        }
    }

    /// Sets the source of packed weights for the one model that is loaded next.
    pub fn with_packed(mut self, packed: &Packed) -> Cpu {
        self.supply = Supply::new(packed);
        self.packed = match packed {
            Packed::File(file) => Some(Arc::clone(file)),
            Packed::Shared(_) => None,
        };
        self
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }

    /// Bytes of scratch memory that its operations have allocated so far.
    #[cfg(test)]
    fn scratch_bytes(&self) -> u64 {
        self.activations.bytes() + self.routing.bytes()
    }

    fn ctx(&self) -> Ctx<'_> {
        Ctx { pool: &self.pool, isa: self.isa }
    }
}

impl Handles for Cpu {
    type Tensor = Tensor;
    type Vector = Vector;
    type Weight = Weight;
    type Experts = experts::Experts;
    type Kv = kv::Kv;
    type Inputs = inputs::Inputs;
}

impl Memory for Cpu {
    fn tensor(&mut self, rows: usize, cols: usize, _: TensorKind) -> Result<Tensor> {
        Tensor::new(rows, cols)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector> {
        Vector::new(values)
    }

    fn weight(&mut self, matrix: &Matrix<'_>) -> Result<Weight> {
        let ctx = Ctx { pool: &self.pool, isa: self.isa };
        Weight::pack(ctx, &mut self.supply, matrix)
    }

    fn experts(&mut self, source: ExpertsSource<'_>) -> Result<experts::Experts> {
        let ctx = Ctx { pool: &self.pool, isa: self.isa };
        experts::Experts::pack(ctx, &mut self.supply, source)
    }

    fn reads_matrices(&self) -> bool {
        self.supply.packs()
    }

    fn end_load(&mut self) {
        self.supply = Supply::Fresh;
    }

    fn kv(&mut self, shape: KvShape) -> Result<kv::Kv> {
        kv::Kv::new(shape)
    }

    fn inputs(&mut self, limits: InputLimits) -> Result<inputs::Inputs> {
        inputs::Inputs::new(limits)
    }

    fn weight_bytes(&self, weight: &Weight) -> u64 {
        weight.bytes()
    }

    fn experts_bytes(&self, experts: &experts::Experts) -> u64 {
        experts.bytes()
    }
}

impl Steps for Cpu {
    fn numerics(&self) -> String {
        format!("cpu {} {}", std::env::consts::ARCH, self.isa.name())
    }

    fn pulse(&self) -> Option<Pulse> {
        Some(self.pool.pulse().clone())
    }

    fn upload(&mut self, inputs: &mut inputs::Inputs, batch: &Batch) -> StepSize {
        inputs::upload(self.ctx(), inputs, batch);
        StepSize::of(batch)
    }

    fn check(&mut self) -> Result<()> {
        self.packed.as_ref().map_or(Ok(()), |file| file.check())
    }
}

impl Operations for Cpu {
    fn rope_angles(&mut self, inputs: &mut inputs::Inputs, rope: usize, inv_freq: &Vector, magnitude: f32) {
        inputs::rope_angles(self.ctx(), inputs, rope, inv_freq, magnitude);
    }

    fn embed(&mut self, out: &mut Tensor, table: &Weight, inputs: &inputs::Inputs, scale: f32) {
        embed::embed(self.ctx(), out, table, inputs.tokens(), scale);
    }

    fn rms_norm(&mut self, out: &mut Tensor, x: &Tensor, weight: &Vector, eps: f32, rows: usize) {
        norm::rms_norm(self.ctx(), out, x, weight, eps, rows);
    }

    fn add(&mut self, residual: &mut Tensor, x: &Tensor, scale: f32, rows: usize) {
        norm::add(self.ctx(), residual, x, scale, rows);
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
        norm::add_rms_norm(self.ctx(), out, residual, x, scale, weight, eps, rows);
    }

    fn linear(&mut self, out: &mut Tensor, x: &Tensor, weight: &Weight, bias: Option<&Vector>, rows: usize) {
        let ctx = Ctx { pool: &self.pool, isa: self.isa };
        matmul::linear(ctx, &mut self.activations, out, x, weight, bias, rows);
    }

    fn prepare_qkv(
        &mut self,
        qkv: &mut Tensor,
        kv: &mut kv::Kv,
        layer: usize,
        op: PrepareQkv<'_, Self>,
        inputs: &inputs::Inputs,
    ) {
        qkv::prepare_qkv(self.ctx(), qkv, kv, layer, &op, inputs);
    }

    fn attention(
        &mut self,
        out: &mut Tensor,
        qkv: &Tensor,
        kv: &kv::Kv,
        layer: usize,
        op: Attention<'_, Self>,
        inputs: &inputs::Inputs,
    ) {
        attention::attention(self.ctx(), out, qkv, kv, layer, &op, inputs);
    }

    fn gate(&mut self, out: &mut Tensor, gate_up: &Tensor, activation: Activation, rows: usize) {
        elementwise::gate(self.ctx(), out, gate_up, activation, rows);
    }

    fn experts_forward(
        &mut self,
        out: &mut Tensor,
        x: &Tensor,
        router_logits: &Tensor,
        experts: &experts::Experts,
        op: Routing<'_, Self>,
        rows: usize,
    ) {
        let ctx = Ctx { pool: &self.pool, isa: self.isa };
        let scratch = (&mut self.activations, &mut self.routing);
        experts::experts_forward(ctx, scratch, out, x, router_logits, experts, &op, rows);
    }

    fn add_gated(&mut self, out: &mut Tensor, x: &Tensor, gate: &Tensor, rows: usize) {
        elementwise::add_gated(self.ctx(), out, x, gate, rows);
    }

    fn gather_outputs(&mut self, out: &mut Tensor, x: &Tensor, inputs: &inputs::Inputs) {
        elementwise::gather_outputs(self.ctx(), out, x, inputs);
    }

    fn finish_logits(&mut self, logits: &mut Tensor, scale: f32, soft_cap: Option<f32>, rows: usize) {
        elementwise::finish_logits(self.ctx(), logits, scale, soft_cap, rows);
    }

    fn copy_blocks(&mut self, kv: &mut kv::Kv, pairs: &[(u32, u32)]) {
        kv::copy_blocks(self.ctx(), kv, pairs);
    }

    fn move_tokens(&mut self, kv: &mut kv::Kv, pairs: &[(u32, u32)]) {
        kv::move_tokens(self.ctx(), kv, pairs);
    }

    fn copy_columns(&mut self, out: &mut Tensor, column: usize, x: &Tensor, rows: usize) {
        let (all, width) = (out.cols(), x.cols());
        assert!(column + width <= all, "columns {column}..{} of {all}", column + width);
        for (row, out) in out.head_mut(rows).chunks_exact_mut(all).enumerate() {
            out[column..column + width].copy_from_slice(x.row(row));
        }
    }

    fn copy_rows(&mut self, out: &mut Tensor, x: &Tensor, pairs: &[(u32, u32)]) {
        let (width, rows) = (x.cols(), out.num_rows());
        assert_eq!(out.cols(), width, "width of copied rows");
        let out = out.head_mut(rows);
        for &(from, to) in pairs {
            out[to as usize * width..][..width].copy_from_slice(x.row(from as usize));
        }
    }

    fn upload_rows(&mut self, tensor: &mut Tensor, values: &[f32]) {
        let cols = tensor.cols().max(1);
        assert!(values.len().is_multiple_of(cols), "{} values in rows of {cols}", values.len());
        tensor.head_mut(values.len() / cols).copy_from_slice(values);
    }

    fn download(&mut self, tensor: &Tensor, rows: usize, out: &mut Vec<f32>) {
        out.clear();
        out.extend_from_slice(tensor.head(rows));
    }

    fn save_block(&mut self, kv: &kv::Kv, block: u32, out: &mut [u8]) {
        kv::save_block(kv, block, out);
    }

    fn load_block(&mut self, kv: &mut kv::Kv, block: u32, bytes: &[u8]) {
        kv::load_block(kv, block, bytes);
    }
}

impl Sampling for Cpu {}

impl BlockCopies for Cpu {}
