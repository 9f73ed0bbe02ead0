//! Flags of `folio eval`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use folio_model::AtLoad;

use super::{DeviceArgs, IsaArg, KvCacheDtype};

#[derive(Args)]
pub struct EvalArgs {
    /// A model folder, a .gguf file or ORG/NAME fetched by `folio pull`; without it, the built-in model
    pub model: Option<String>,
    /// The text to measure on: a .jsonl file of objects with a "text", one a document, or one document of plain text
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Tokens to measure on; documents are taken from all over the file [default: all]
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Tokens a window; windows do not overlap and a window's first token is not scored
    #[arg(long, default_value_t = 2048)]
    pub window: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Threads that compute [default: all cores]
    #[arg(long, env = "FOLIO_THREADS")]
    pub threads: Option<usize>,
    /// Instructions to use [default: the best this CPU has]
    #[arg(long, value_enum)]
    pub cpu_isa: Option<IsaArg>,
    /// Encode MODEL's plain weights while they are loaded
    #[arg(long, value_name = "int8|int4|int4-g128|fp8")]
    pub quantize: Option<AtLoad>,
    /// What computes MODEL
    #[arg(long, value_enum, default_value_t = BackendArg::Cpu)]
    pub backend: BackendArg,
    /// Format of MODEL's keys and values: auto (as precise as the weights), float32, float16, bfloat16, fp8, int8 or int4
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub kv_cache_dtype: KvCacheDtype,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub against: AgainstArgs,
    #[command(flatten)]
    pub matrix: MatrixArgs,
}

/// Two models side by side.
#[derive(Args)]
#[command(next_help_heading = "Comparing")]
pub struct AgainstArgs {
    /// Compare with this model: the divergence of MODEL's predictions from its, how often both would say the same, size
    #[arg(long, value_name = "BASE")]
    pub against: Option<String>,
    /// What computes BASE
    #[arg(long, value_enum, default_value_t = BackendArg::Cpu, requires = "against")]
    pub against_backend: BackendArg,
}

/// Every form of one model.
#[derive(Args)]
#[command(next_help_heading = "Matrix")]
pub struct MatrixArgs {
    /// Quantize MODEL by every format and method, one after the other, and compare each with MODEL as it is
    #[arg(long, conflicts_with_all = ["against", "quantize", "kv_cache_dtype"])]
    pub matrix: bool,
    /// Formats, as `folio quantize` names them [default: all]
    #[arg(long, value_delimiter = ',', requires = "matrix", value_name = "NAME,...")]
    pub formats: Option<Vec<String>>,
    /// rtn, gptq, awq, for each format [default: rtn, and the others for formats of 4 bits]
    #[arg(long, value_delimiter = ',', requires = "matrix", value_name = "NAME,...")]
    pub methods: Option<Vec<String>>,
    /// Formats of keys and values, with MODEL's own weights: fp8, int8, int4, or `none` [default: these three]
    #[arg(long, value_delimiter = ',', requires = "matrix", value_name = "NAME,...")]
    pub kv: Option<Vec<String>>,
    /// Text to calibrate on, of the same kinds as --text
    #[arg(long, requires = "matrix", value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Tokens to calibrate on
    #[arg(long, requires = "matrix", value_name = "N", default_value_t = 32_768)]
    pub calibration_tokens: usize,
    /// Take the rows in this file as they are, and add each new one to it: a matrix can be made in pieces
    #[arg(long, requires = "matrix", value_name = "FILE")]
    pub resume: Option<PathBuf>,
    /// Write a plot of divergence against size
    #[arg(long, requires = "matrix", value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write the tables as markdown
    #[arg(long, requires = "matrix", value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

/// Where a forward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// The fast one
    Cpu,
    /// Plain loops on weights decoded to f32: slow, and the judge of the others
    Reference,
    /// An NVIDIA GPU: the one that --device names, or the first
    Cuda,
}
