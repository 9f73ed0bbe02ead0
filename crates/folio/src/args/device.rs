//! Flags of the device and of its numerics.

use std::str::FromStr;

use clap::{Args, ValueEnum};

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Device to compute on: auto (the first NVIDIA GPU, else the CPU), cpu, cuda or cuda:N
    #[arg(long, value_name = "auto|cpu|cuda:N", default_value = "auto", env = "FOLIO_DEVICE")]
    pub device: DeviceChoice,
    /// Data type of activations and unquantized weights on a GPU; auto is bfloat16
    #[arg(long, value_enum, default_value_t)]
    pub dtype: Dtype,
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
    pub load_format: LoadFormat,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    #[default]
    Auto,
    Cpu,
    /// The GPU with this index.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().map_err(|_| format!("cuda:{text}: expected the number of a device"));
        match text.split_once(':') {
            None if text == "auto" => Ok(Self::Auto),
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", text)) => Ok(Self::Cuda(number(text)?)),
            _ => Err("expected auto, cpu, cuda or cuda:N".into()),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    #[default]
    Auto,
    #[value(name = "bfloat16", alias = "bf16")]
    BFloat16,
    #[value(name = "float32", alias = "float", alias = "f32")]
    Float32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
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

impl LoadFormat {
    pub fn is_dummy(self) -> bool {
        self != LoadFormat::Auto
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(0)),
            ("cuda:3", DeviceChoice::Cuda(3)),
        ] {
            assert_eq!(text.parse(), Ok(choice), "{text}");
        }
        for bad in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "rocm:0"] {
            assert!(bad.parse::<DeviceChoice>().is_err(), "{bad}");
        }
    }
}
