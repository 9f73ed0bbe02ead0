//! How a model is to run, as plain values. Every field has a default, so that a caller names only
//! what it wants otherwise.
//!
//! Messages of errors call an option by the flag of the `folio` command that sets it.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use folio_device::KvFormat;
use folio_device::cpu::Isa;
use folio_engine::SamplingDefaults;
use folio_engine::speculate::NgramOptions;
use folio_model::{AtLoad, Overrides, Wanted};

/// Takes a line of text.
pub type Warn = fn(std::fmt::Arguments<'_>);

/// All options of a session.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of compute threads; none means all cores.
    pub threads: Option<usize>,
    /// CPU instruction set; none means the best that this CPU has.
    pub isa: Option<Isa>,
    /// Format to which unquantized weights are quantized while they are loaded.
    pub quantize: Option<AtLoad>,
    pub packed_cache: PackedCacheMode,
    /// Maximum tokens of a sequence, prompt and answer together; none means the model's context.
    pub max_model_len: Option<usize>,
    /// Fields that replace those of the model's configuration.
    pub overrides: Overrides,
    /// Maximum number of sequences that run at once; none means 64, or 256 on a GPU.
    pub max_num_seqs: Option<usize>,
    /// Maximum number of tokens computed in one step; none means 512, or 8192 on a GPU.
    pub max_num_batched_tokens: Option<usize>,
    pub prefix_caching: bool,
    pub device: DeviceOptions,
    pub memory: MemoryOptions,
    pub queue: QueueOptions,
    pub speculate: SpeculateOptions,
    pub folders: Folders,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: None,
            isa: None,
            quantize: None,
            packed_cache: PackedCacheMode::Auto,
            max_model_len: None,
            overrides: Overrides::default(),
            max_num_seqs: None,
            max_num_batched_tokens: None,
            prefix_caching: true,
            device: DeviceOptions::default(),
            memory: MemoryOptions::default(),
            queue: QueueOptions::default(),
            speculate: SpeculateOptions::default(),
            folders: Folders::default(),
        }
    }
}

impl Options {
    /// Settings that change how the model's files are read.
    pub(crate) fn wanted(&self) -> Wanted {
        Wanted { max_context: self.max_model_len, overrides: self.overrides.clone() }
    }
}

/// Folders outside the model. The library reads no environment variable: a program that knows these
/// folders sets them.
#[derive(Clone, Debug, Default)]
pub struct Folders {
    /// Cache of the Hugging Face hub, in which names such as `ORG/NAME` are looked up.
    pub hub: Option<PathBuf>,
    /// Cache for files that can be made again, such as compiled GPU kernels.
    pub cache: Option<PathBuf>,
}

/// Whether packed weights are cached in a folder `.folio` beside the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PackedCacheMode {
    /// On the CPU, from 256 MiB on.
    #[default]
    Auto,
    On,
    Off,
}

/// The device and its numerics.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    pub device: DeviceChoice,
    pub dtype: Dtype,
    /// On a GPU: the bits of a result do not depend on the rest of the batch, as on the CPU.
    pub batch_invariant: bool,
    /// On a GPU: launch every operation of every step instead of replaying CUDA graphs.
    pub enforce_eager: bool,
    /// On a GPU: compute matrix products with cuBLASLt if it is found.
    pub use_cublas: bool,
    pub load_format: LoadFormat,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            dtype: Dtype::Auto,
            batch_invariant: false,
            enforce_eager: false,
            use_cublas: true,
            load_format: LoadFormat::Auto,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first NVIDIA GPU, else the CPU.
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

/// Data type of activations and unquantized weights on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dtype {
    /// [`Dtype::BFloat16`].
    #[default]
    Auto,
    BFloat16,
    Float32,
}

/// Source of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadFormat {
    /// The model's files.
    #[default]
    Auto,
    /// Random weights made on the GPU; only config.json is read.
    Dummy,
    /// Random weights in e4m3 with one scale per output; embeddings and head in bfloat16.
    DummyFp8,
    /// Random weights in eight-bit integers, groups of 128.
    DummyInt8,
    /// Random weights in four-bit integers, groups of 128.
    DummyInt4,
}

impl LoadFormat {
    pub fn is_dummy(self) -> bool {
        self != LoadFormat::Auto
    }
}

/// Memory limits.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    pub budget: MemoryBudget,
    /// Allow a size that exceeds the free memory of this machine.
    pub unchecked: bool,
    /// Reduce the context to what fits in memory.
    pub fit: bool,
    /// Format of the KV cache; none means as precise as the weights.
    pub kv_format: Option<KvFormat>,
    /// Bytes of the host tier: host memory for cached KV blocks that no request holds. None means
    /// no tier, or 256 MiB with a disk tier.
    pub host_tier_bytes: Option<u64>,
    /// Folder of the disk tier: cached KV blocks that survive a restart.
    pub disk_tier: Option<PathBuf>,
    /// Maximum size of the disk tier.
    pub disk_tier_bytes: u64,
    /// Memory for request bodies; only a server has any.
    pub bodies: Option<BodyMemory>,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        Self {
            budget: MemoryBudget::Auto,
            unchecked: false,
            fit: false,
            kv_format: None,
            host_tier_bytes: None,
            disk_tier: None,
            disk_tier_bytes: 4 << 30,
            bodies: None,
        }
    }
}

/// How much memory may be taken.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum MemoryBudget {
    /// A KV cache as large as requests can use, at most half of the memory that the weights leave;
    /// on a GPU, nine tenths of its memory.
    #[default]
    Auto,
    /// Bytes for weights, activations, KV cache and host tier together.
    Total(u64),
    /// The total as a fraction of the memory that is free at start.
    Fraction(f64),
    /// Bytes for the KV cache alone, and the name of the setting for reports.
    KvCache { bytes: u64, setting: &'static str },
}

/// Memory for the bodies of requests and the values parsed from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyMemory {
    /// Maximum bytes of one body.
    pub body_bytes: u64,
    /// Bytes that a body of that length may take.
    pub least: u64,
    /// Bytes for all bodies; none means a sixteenth of the budget, at most 128 MiB.
    pub total: Option<u64>,
}

/// The order and pace of requests.
#[derive(Clone, Debug)]
pub struct QueueOptions {
    pub inter_token_target: InterTokenTarget,
    /// Time of waiting that equals one level of priority.
    pub priority_aging: Duration,
    /// Maximum number of waiting requests; none means four for each that may run.
    pub max_waiting: Option<usize>,
    /// Plan each step while the previous one runs.
    pub overlap: bool,
    /// Receives why a request is preempted, and the cost of copying or recomputing its blocks.
    pub debug: Option<Warn>,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self {
            inter_token_target: InterTokenTarget::Auto,
            priority_aging: Duration::from_secs(10),
            max_waiting: None,
            overlap: true,
            debug: None,
        }
    }
}

/// Target for the time between tokens of running streams while long prompts are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterTokenTarget {
    /// 50 ms on a GPU; on the CPU 15 ms, or nearly three decode steps if those take longer.
    #[default]
    Auto,
    /// Prompts are computed at full speed.
    Off,
    Within(Duration),
}

/// Speculative decoding.
#[derive(Clone, Debug, Default)]
pub struct SpeculateOptions {
    pub method: Method,
    /// Maximum number of draft tokens per step; none means as many as the method can use.
    pub tokens: Option<usize>,
    /// Always draft the maximum; by default the number adapts to acceptance and cost.
    pub fixed: bool,
}

/// A drafting method.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Method {
    #[default]
    Off,
    /// The best that is found beside the model, or else [`Method::Suffix`].
    Auto,
    Ngram(NgramOptions),
    Suffix,
    Lookahead,
    /// A draft model; none means the sibling found beside the model.
    Draft(Option<String>),
    /// A file of Medusa heads; none means the one found beside the model.
    Medusa(Option<PathBuf>),
    /// A file of an EAGLE head; none means the one found beside the model.
    Eagle(Option<PathBuf>),
    /// For benchmarks: drafts that are accepted this often, in thousandths.
    Synthetic(u32),
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let named = |f: &mut std::fmt::Formatter<'_>, name: &str, file: Option<&str>| match file {
            Some(file) => write!(f, "{name}:{file}"),
            None => f.write_str(name),
        };
        match self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::Ngram(_) => f.write_str("ngram"),
            Self::Suffix => f.write_str("suffix"),
            Self::Lookahead => f.write_str("lookahead"),
            Self::Draft(model) => named(f, "draft", model.as_deref()),
            Self::Medusa(file) => named(f, "medusa", file.as_ref().map(|file| file.to_string_lossy()).as_deref()),
            Self::Eagle(file) => named(f, "eagle", file.as_ref().map(|file| file.to_string_lossy()).as_deref()),
            Self::Synthetic(thousandths) => write!(f, "synthetic, {} accepted", f64::from(*thousandths) / 1e3),
        }
    }
}

impl FromStr for Method {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, file) = match text.split_once(':') {
            Some((name, "")) => return Err(format!("expected a file after {name}:")),
            Some((name, file)) => (name, Some(file)),
            None => (text, None),
        };
        match (name, file) {
            ("off" | "none", None) => Ok(Self::Off),
            ("auto", None) => Ok(Self::Auto),
            ("ngram", None) => Ok(Self::Ngram(NgramOptions::default())),
            ("suffix", None) => Ok(Self::Suffix),
            ("lookahead", None) => Ok(Self::Lookahead),
            ("draft", file) => Ok(Self::Draft(file.map(str::to_owned))),
            ("medusa", file) => Ok(Self::Medusa(file.map(PathBuf::from))),
            ("eagle" | "eagle3", file) => Ok(Self::Eagle(file.map(PathBuf::from))),
            (name @ ("off" | "none" | "auto" | "ngram" | "suffix" | "lookahead"), Some(file)) => {
                Err(format!("{name} takes no file, but {file} was given"))
            }
            _ => Err(EXPECTED.into()),
        }
    }
}

const EXPECTED: &str = "expected off, auto, ngram, suffix, lookahead, draft[:MODEL], medusa[:FILE] or eagle[:FILE]";

/// Sampling defaults of requests.
#[derive(Clone, Debug, Default)]
pub struct GenerationOptions {
    pub source: GenerationSource,
    /// Defaults that override those of the source; `max_tokens` limits requests too.
    pub overrides: Option<SamplingDefaults>,
}

/// Source of sampling defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GenerationSource {
    /// The model's generation_config.json or GGUF metadata.
    #[default]
    Auto,
    /// None: temperature 1, as vLLM calls it.
    Vllm,
    /// A folder with another generation_config.json.
    Folder(PathBuf),
}

impl FromStr for GenerationSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "vllm" => Ok(Self::Vllm),
            _ if std::path::Path::new(text).is_dir() => Ok(Self::Folder(text.into())),
            _ => Err("expected auto, vllm or a folder with a generation_config.json".into()),
        }
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

    #[test]
    fn methods() {
        let check = |text: &str, expect: Method| assert_eq!(text.parse(), Ok(expect), "{text}");
        check("off", Method::Off);
        check("auto", Method::Auto);
        check("ngram", Method::Ngram(NgramOptions::default()));
        check("draft", Method::Draft(None));
        check("draft:org/name", Method::Draft(Some("org/name".into())));
        check("draft:C:/x.gguf", Method::Draft(Some("C:/x.gguf".into())));
        check("eagle3:a/b", Method::Eagle(Some("a/b".into())));
        for bad in ["", "Ngram", "medusa:", "ngram:x", "mtp"] {
            bad.parse::<Method>().expect_err(bad);
        }
    }
}
