//! Flags of `folio eval`, and the options of `folio-measure` that they stand for.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use folio_measure::eval;
use folio_measure::eval::matrix::Forms;
use folio_model::AtLoad;
use folio_session::Options;

use super::{DeviceArgs, IsaArg, KvCacheDtype};
use crate::environment;

#[derive(Args)]
pub struct EvalArgs {
    /// Model folder, .gguf file, or ORG/NAME downloaded by `folio pull` [default: the built-in
    /// model]
    pub model: Option<String>,
    /// Text to measure on: a .jsonl file of objects with a "text", one per document, or one
    /// document of plain text
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Number of tokens to measure on, from documents spread over the file [default: all]
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Tokens per window; windows do not overlap, and the first token of each is not scored
    #[arg(long, default_value_t = 2048)]
    pub window: usize,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    /// Number of compute threads [default: all cores]
    #[arg(long, env = "FOLIO_THREADS")]
    pub threads: Option<usize>,
    /// CPU instruction set [default: the best that this CPU has]
    #[arg(long, value_enum)]
    pub cpu_isa: Option<IsaArg>,
    /// Quantize MODEL's unquantized weights at load time
    #[arg(long, value_name = "int8|int4|int4-g128|fp8")]
    pub quantize: Option<AtLoad>,
    /// Backend that computes MODEL
    #[arg(long, value_enum, default_value_t = BackendArg::Cpu)]
    pub backend: BackendArg,
    /// Format of MODEL's KV cache: auto (as precise as the weights), float32, float16, bfloat16,
    /// fp8, int8 or int4
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub kv_cache_dtype: KvCacheDtype,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub against: AgainstArgs,
    #[command(flatten)]
    pub matrix: MatrixArgs,
}

/// Comparison of two models.
#[derive(Args)]
#[command(next_help_heading = "Comparison")]
pub struct AgainstArgs {
    /// Model to compare with: report the divergence of MODEL's predictions from it, top-1 agreement
    /// and size
    #[arg(long, value_name = "BASE")]
    pub against: Option<String>,
    /// Backend that computes BASE
    #[arg(long, value_enum, default_value_t = BackendArg::Cpu, requires = "against")]
    pub against_backend: BackendArg,
}

/// All quantized variants of one model.
#[derive(Args)]
#[command(next_help_heading = "Matrix")]
pub struct MatrixArgs {
    /// Quantize MODEL to every format with every method, one after the other, and compare each with
    /// MODEL
    #[arg(long, conflicts_with_all = ["against", "quantize", "kv_cache_dtype"])]
    pub matrix: bool,
    /// Formats in the notation of `folio quantize` [default: all]
    #[arg(long, value_delimiter = ',', requires = "matrix", value_name = "NAME,...")]
    pub formats: Option<Vec<String>>,
    /// Methods for each format: rtn, gptq, awq [default: rtn, and the others for formats of 4 bits]
    #[arg(long, value_delimiter = ',', requires = "matrix", value_name = "NAME,...")]
    pub methods: Option<Vec<String>>,
    /// KV-cache formats to measure with MODEL's own weights: fp8, int8, int4, or `none` [default:
    /// these three]
    #[arg(long, value_delimiter = ',', requires = "matrix", value_name = "NAME,...")]
    pub kv: Option<Vec<String>>,
    /// Calibration text, in the same formats as --text
    #[arg(long, requires = "matrix", value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Number of calibration tokens
    #[arg(long, requires = "matrix", value_name = "N", default_value_t = 32_768)]
    pub calibration_tokens: usize,
    /// File of finished rows: take those in it, and append each new one
    #[arg(long, requires = "matrix", value_name = "FILE")]
    pub resume: Option<PathBuf>,
    /// Write a plot of divergence over size to this file
    #[arg(long, requires = "matrix", value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write the tables as Markdown to this file
    #[arg(long, requires = "matrix", value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

/// A backend of forward passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// The optimized CPU backend
    Cpu,
    /// Plain loops over weights decoded to f32: slow, the reference for the others
    Reference,
    /// An NVIDIA GPU: the one given by --device, or the first
    Cuda,
}

impl From<BackendArg> for eval::Backend {
    fn from(arg: BackendArg) -> Self {
        match arg {
            BackendArg::Cpu => Self::Cpu,
            BackendArg::Reference => Self::Reference,
            BackendArg::Cuda => Self::Cuda,
        }
    }
}

impl EvalArgs {
    pub fn options(&self) -> eval::Options {
        eval::Options {
            model: self.model.clone(),
            text: self.text.clone(),
            tokens: self.tokens,
            window: self.window,
            threads: self.threads,
            isa: self.cpu_isa.map(Into::into),
            quantize: self.quantize,
            backend: self.backend.into(),
            kv_format: self.kv_cache_dtype.0,
            session: Options { device: self.device.options(), ..environment::options() },
        }
    }
}

impl MatrixArgs {
    pub fn forms(&self) -> Forms {
        Forms {
            formats: self.formats.clone(),
            methods: self.methods.clone(),
            kv: self.kv.clone(),
            calibration: self.calibration.clone(),
            calibration_tokens: self.calibration_tokens,
            resume: self.resume.clone(),
        }
    }
}
