//! How many bytes the weights will take, before any of them is loaded.
//!
//! [`Counting`] is a backend that keeps no weights, only their sizes. The decoder is loaded onto it
//! exactly as it is loaded onto the real one, so that fused, tied, padded and mixed matrices are
//! counted as they will be, whatever the family; how many bytes one takes is the real backend's to
//! say. It never runs a step.

use anyhow::Result;
use folio_device::{
    Batch, BlockCopies, ExpertsSource, Handles, InputLimits, Intercept, KvFormat, KvShape, Memory, Op, Sampling,
    StepSize, Steps, TensorKind,
};
use folio_device::{cpu, cuda};
use folio_formats::Matrix;
use folio_model::{Decoder, DecoderLimits, OpenModel};

use crate::target::Target;

/// Bytes that stay for as long as the model is loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// Matrices, and experts with their biases.
    pub matrices: u64,
    /// Bytes of the routed experts among them.
    pub experts: u64,
    /// Bytes of the embedding table among them.
    pub table: u64,
    /// Norms, biases, sinks and frequencies.
    pub vectors: u64,
    /// The widest row that any matrix reads.
    pub widest_input: usize,
    /// On a GPU: what is written out of coded matrices.
    pub widened: cuda::Widened,
    /// On the CPU: what the matrices are packed to, in order.
    pub parts: Vec<cpu::PartShape>,
}

impl WeightBytes {
    /// As the target's backend will hold them.
    pub fn of(model: &OpenModel, target: &Target) -> Result<Self> {
        let groups = model.spec.kv_groups().len();
        // The smallest step there is: nothing of it counts here.
        let limits = DecoderLimits {
            rows: 1,
            spans: 1,
            outputs: 1,
            table_entries: 1,
            blocks: vec![1; groups],
            kv_format: KvFormat::BF16,
        };
        let mut decoder = Decoder::load(Counting::new(target), model, limits, &mut |_| {})?;
        let matrices = decoder.memory().weights;
        let Counting { experts, table, vectors, widest_input, widened, ref mut parts, .. } = *decoder.backend_mut();
        let (table, parts) = (table.unwrap_or(0), std::mem::take(parts));
        Ok(Self { matrices, experts, table, vectors, widest_input, widened, parts })
    }
}

struct Counting {
    packing: Packing,
    experts: u64,
    /// The first that a decoder loads.
    table: Option<u64>,
    vectors: u64,
    widest_input: usize,
    widened: cuda::Widened,
    parts: Vec<cpu::PartShape>,
}

/// The backend whose layout is counted.
#[derive(Clone, Copy)]
enum Packing {
    Cpu,
    Cuda(cuda::Precision, cuda::RandomForm),
}

impl Counting {
    fn new(target: &Target) -> Self {
        let packing = match target {
            Target::Cpu(_) => Packing::Cpu,
            Target::Cuda(gpu) => Packing::Cuda(gpu.precision(), gpu.random_form()),
        };
        Self {
            packing,
            experts: 0,
            table: None,
            vectors: 0,
            widest_input: 0,
            widened: cuda::Widened::default(),
            parts: Vec::new(),
        }
    }

    /// Bytes of parts, which are noted.
    fn add(&mut self, parts: Vec<cpu::PartShape>) -> u64 {
        let bytes = parts.iter().map(cpu::PartShape::bytes).sum();
        self.parts.extend(parts);
        bytes
    }

    fn widen(&mut self, matrix: &Matrix<'_>) {
        self.widest_input = self.widest_input.max(matrix.cols());
    }
}

const NO_STEP: &str = "a plan runs no step";

impl Handles for Counting {
    type Tensor = ();
    type Vector = ();
    /// Bytes.
    type Weight = u64;
    /// Bytes.
    type Experts = u64;
    type Kv = ();
    type Inputs = ();
}

impl Memory for Counting {
    fn tensor(&mut self, _: usize, _: usize, _: TensorKind) -> folio_device::Result<()> {
        Ok(())
    }

    fn vector(&mut self, values: &[f32]) -> folio_device::Result<()> {
        self.vectors += match self.packing {
            Packing::Cpu => size_of_val(values) as u64,
            Packing::Cuda(..) => cuda::Vector::bytes_of(values.len()),
        };
        Ok(())
    }

    fn weight(&mut self, matrix: &Matrix<'_>) -> folio_device::Result<u64> {
        self.widen(matrix);
        let bytes = match self.packing {
            Packing::Cpu => self.add(cpu::packed_parts(matrix)?),
            Packing::Cuda(precision, form) => {
                if !cuda::is_plain(matrix, precision, form) {
                    self.widened.add(matrix.num_rows() * matrix.cols());
                }
                cuda::packed_bytes(matrix, precision, form)
            }
        };
        self.table.get_or_insert(bytes);
        Ok(bytes)
    }

    fn experts(&mut self, source: ExpertsSource<'_>) -> folio_device::Result<u64> {
        source.gate_up.iter().chain(&source.down).for_each(|matrix| self.widen(matrix));
        let bytes = match self.packing {
            Packing::Cpu => {
                let biases = source.gate_up_bias.iter().chain(&source.down_bias).flatten();
                let biases: u64 = biases.map(|bias| size_of_val(&bias[..]) as u64).sum();
                self.add(cpu::packed_experts_parts(&source)?) + biases
            }
            Packing::Cuda(precision, _) => cuda::packed_experts_bytes(&source, precision),
        };
        self.experts += bytes;
        Ok(bytes)
    }

    fn reads_matrices(&self) -> bool {
        false
    }

    fn kv(&mut self, _: KvShape) -> folio_device::Result<()> {
        Ok(())
    }

    fn inputs(&mut self, _: InputLimits) -> folio_device::Result<()> {
        Ok(())
    }

    fn weight_bytes(&self, weight: &u64) -> u64 {
        *weight
    }

    fn experts_bytes(&self, experts: &u64) -> u64 {
        *experts
    }
}

impl Intercept for Counting {
    fn intercept(&mut self, _: Op<'_, Self>) {
        unreachable!("{NO_STEP}")
    }
}

impl Steps for Counting {
    fn numerics(&self) -> String {
        "counts bytes".into()
    }

    fn upload(&mut self, (): &mut (), _: &Batch) -> StepSize {
        unreachable!("{NO_STEP}")
    }
}

impl Sampling for Counting {}

impl BlockCopies for Counting {}
