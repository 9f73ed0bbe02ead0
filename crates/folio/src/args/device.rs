//! Flags of the device and of its numerics.

use clap::{Args, ValueEnum};
use folio_session::{DeviceChoice, Dtype, LoadFormat};

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Device to compute on: auto (the first NVIDIA GPU, else the CPU), cpu, cuda or cuda:N
    #[arg(long, value_name = "auto|cpu|cuda:N", default_value = "auto", env = "FOLIO_DEVICE")]
    pub device: DeviceChoice,
    /// Data type of activations and unquantized weights on a GPU; auto is bfloat16
    #[arg(long, value_enum, default_value_t)]
    pub dtype: DtypeArg,
    /// On a GPU: make the bits of a result independent of the rest of the batch, as they are on the
    /// CPU
    #[arg(long)]
    pub batch_invariant: bool,
    /// On a GPU: launch every operation of every step instead of replaying CUDA graphs
    #[arg(long)]
    pub enforce_eager: bool,
    /// On a GPU: compute matrix products with Folio's own kernels only, even if cuBLASLt is found
    #[arg(long)]
    pub no_cublas: bool,
    /// Weights to load: those of the files, or random ones made on the GPU, which need only
    /// config.json
    #[arg(long, value_enum, default_value_t)]
    pub load_format: LoadFormatArg,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    #[default]
    Auto,
    #[value(name = "bfloat16", alias = "bf16")]
    BFloat16,
    #[value(name = "float32", alias = "float", alias = "f32")]
    Float32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LoadFormatArg {
    /// Weights of the model's files
    #[default]
    #[value(alias = "safetensors", alias = "gguf")]
    Auto,
    /// Random weights
    Dummy,
    /// Random weights in e4m3 with one scale per output; embeddings and head in bfloat16
    DummyFp8,
    /// Random weights in eight-bit integers, groups of 128
    DummyInt8,
    /// Random weights in four-bit integers, groups of 128
    #[value(alias = "dummy-int4-g128")]
    DummyInt4,
}

impl From<DtypeArg> for Dtype {
    fn from(arg: DtypeArg) -> Self {
        match arg {
            DtypeArg::Auto => Self::Auto,
            DtypeArg::BFloat16 => Self::BFloat16,
            DtypeArg::Float32 => Self::Float32,
        }
    }
}

impl From<LoadFormatArg> for LoadFormat {
    fn from(arg: LoadFormatArg) -> Self {
        match arg {
            LoadFormatArg::Auto => Self::Auto,
            LoadFormatArg::Dummy => Self::Dummy,
            LoadFormatArg::DummyFp8 => Self::DummyFp8,
            LoadFormatArg::DummyInt8 => Self::DummyInt8,
            LoadFormatArg::DummyInt4 => Self::DummyInt4,
        }
    }
}
