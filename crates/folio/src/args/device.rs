//! Flags that say where a model is computed, and how.

use std::str::FromStr;

use clap::{Args, ValueEnum};

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Where to compute: auto (the first NVIDIA GPU, or else the CPU), cpu, cuda or cuda:N
    #[arg(long, value_name = "auto|cpu|cuda:N", default_value = "auto", env = "FOLIO_DEVICE")]
    pub device: DeviceChoice,
    /// Type of activations on a GPU, and of plain weights there: auto is bfloat16
    #[arg(long, value_enum, default_value_t)]
    pub dtype: Dtype,
    /// On a GPU: bits that do not depend on what else is in the batch, as on the CPU
    #[arg(long)]
    pub batch_invariant: bool,
    /// On a GPU: ask for every operation of every step, in place of replaying a recorded one
    #[arg(long)]
    pub enforce_eager: bool,
    /// On a GPU: matrix products by Folio's own kernels alone, even where cuBLASLt is found
    #[arg(long)]
    pub no_cublas: bool,
    /// What the weights are: those of the files, or random ones made on the GPU, for which config.json is enough
    #[arg(long, value_enum, default_value_t)]
    pub load_format: LoadFormat,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    #[default]
    Auto,
    Cpu,
    /// The GPU of that number.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().map_err(|_| format!("cuda:{text} names no device: expected a number"));
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
    /// As the files are
    #[default]
    #[value(alias = "safetensors", alias = "gguf")]
    Auto,
    /// Random weights
    Dummy,
    /// The same, in e4m3 with a scale an output; embeddings and head in bfloat16
    DummyFp8,
    /// The same in eight-bit integers, groups of 128
    DummyInt8,
    /// The same in four-bit integers, groups of 128
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
