//! Everything that planning and starting a model ask of a device, so that no other module tells a
//! CPU from a GPU.

use std::time::Duration;

use folio_device::cpu::{self, CpuConfig};
use folio_device::cuda::{self, ExpertsShape};
use folio_device::{InputLimits, KvFormat, TensorKind};

use crate::machine;
use crate::target::{Gpu, Target};

/// How much runs at once by default.
pub struct Defaults {
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
}

/// Sizes of a model on which the working memory of a step depends.
pub struct StepShape<'a> {
    pub hidden: usize,
    pub vocab_size: usize,
    /// From the layer with the most heads times their width.
    pub heads: usize,
    pub head_dim: usize,
    /// Largest over all matrices.
    pub widest_input: usize,
    pub widened: cuda::Widened,
    /// One for each layer with experts.
    pub experts: &'a [ExpertsShape],
}

/// A device on which a model can run.
pub trait Device {
    /// Threads or the GPU, in words.
    fn describe(&self) -> String;

    fn defaults(&self) -> Defaults;

    /// Threads of the host that compute or load.
    fn threads(&self) -> usize;

    /// Bytes that could be taken now, if the system tells.
    fn free_bytes(&self) -> Option<u64>;

    /// Whether its memory is its own, apart from the host's.
    fn has_own_memory(&self) -> bool;

    /// The share of free memory that is taken by default. None means that the memory is shared with
    /// other programs, and no more is taken than requests can use.
    fn default_share(&self) -> Option<f64>;

    /// Default format of the KV cache; none means as precise as the weights.
    fn kv_format(&self) -> Option<KvFormat>;

    /// Bytes of one value of a tensor.
    fn value_bytes(&self, kind: TensorKind) -> usize;

    /// Bytes of the largest step besides tensors, weights and the KV cache: an upper bound.
    fn working_bytes(&self, shape: &StepShape<'_>, limits: &InputLimits) -> u64;

    /// Default target for the time between tokens, and the steps that it is raised to if they take
    /// longer.
    fn inter_token_target(&self) -> (Duration, u32);

    /// Time after which a step of prompts alone ends. While a step runs, no request joins or
    /// leaves.
    fn longest_step(&self) -> Option<Duration>;

    /// Whether a step is computed at start, before any request comes.
    fn computes_at_start(&self) -> bool;
}

impl Target {
    /// The device behind it.
    pub fn device(&self) -> &dyn Device {
        match self {
            Self::Cpu(cpu) => cpu,
            Self::Cuda(gpu) => gpu,
        }
    }
}

impl Device for CpuConfig {
    fn describe(&self) -> String {
        format!("{} threads", self.threads)
    }

    fn defaults(&self) -> Defaults {
        Defaults { max_num_seqs: 64, max_num_batched_tokens: 512 }
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn free_bytes(&self) -> Option<u64> {
        machine::memory_available()
    }

    fn has_own_memory(&self) -> bool {
        false
    }

    fn default_share(&self) -> Option<f64> {
        None
    }

    fn kv_format(&self) -> Option<KvFormat> {
        None
    }

    fn value_bytes(&self, _: TensorKind) -> usize {
        4
    }

    fn working_bytes(&self, shape: &StepShape<'_>, limits: &InputLimits) -> u64 {
        let StepShape { hidden, widest_input, experts, .. } = *shape;
        let step = cpu::working_bytes(&cpu::WorkingShape { hidden, widest_input, experts }, limits);
        // Logits are sampled from in the host's memory.
        step.saturating_add(4 * (limits.outputs as u64) * shape.vocab_size as u64)
    }

    /// Steps of a few dozen rows are as fast by the row as longer ones, so they are kept short.
    fn inter_token_target(&self) -> (Duration, u32) {
        (Duration::from_millis(15), 3)
    }

    /// A step of prompts alone could take minutes, and is no faster by the row than one of a
    /// second.
    fn longest_step(&self) -> Option<Duration> {
        Some(Duration::from_secs(1))
    }

    fn computes_at_start(&self) -> bool {
        false
    }
}

impl Device for Gpu {
    fn describe(&self) -> String {
        Gpu::describe(self)
    }

    fn defaults(&self) -> Defaults {
        Defaults { max_num_seqs: 256, max_num_batched_tokens: 8192 }
    }

    fn threads(&self) -> usize {
        machine::cores()
    }

    fn free_bytes(&self) -> Option<u64> {
        Some(self.free_bytes)
    }

    fn has_own_memory(&self) -> bool {
        true
    }

    /// Kernels and libraries need some of the memory too.
    fn default_share(&self) -> Option<f64> {
        Some(0.9)
    }

    fn kv_format(&self) -> Option<KvFormat> {
        Some(Gpu::kv_format(self))
    }

    fn value_bytes(&self, kind: TensorKind) -> usize {
        if kind == TensorKind::Activation && !self.is_f32() { 2 } else { 4 }
    }

    fn working_bytes(&self, shape: &StepShape<'_>, limits: &InputLimits) -> u64 {
        let StepShape { hidden, heads, head_dim, widest_input, widened, experts, .. } = *shape;
        let experts = experts.iter().copied().max_by_key(|e| e.top_k * (2 * hidden + 3 * e.inter));
        let shape = cuda::WorkingShape { hidden, heads, head_dim, widest_input, widened, experts };
        cuda::working_bytes(&shape, limits, &self.config())
    }

    /// A GPU wants long steps.
    fn inter_token_target(&self) -> (Duration, u32) {
        (Duration::from_millis(50), 0)
    }

    fn longest_step(&self) -> Option<Duration> {
        None
    }

    /// The first step finds out whether the device works, and allocates memory between kernels.
    fn computes_at_start(&self) -> bool {
        true
    }
}
