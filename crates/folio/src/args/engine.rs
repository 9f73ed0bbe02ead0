//! Flags of all commands that run a model: computation, memory, and the queue.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use folio_device::KvFormat;
use folio_device::cpu::Isa;
use folio_model::AtLoad;
use folio_session::PackedCacheMode;
use serde_json::{Map, Value};

use super::device::DeviceArgs;
use super::size::ByteSize;
use super::speculate::SpeculateArgs;

/// The model and the options of the engine.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// Model folder, .gguf file, or ORG/NAME or ORG/NAME:Q4_K_M downloaded by `folio pull`
    /// [default: the built-in model]
    pub model: Option<String>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Args, Clone)]
pub struct EngineArgs {
    /// Number of compute threads [default: all cores]
    #[arg(long, env = "FOLIO_THREADS")]
    pub threads: Option<usize>,
    /// CPU instruction set [default: the best that this CPU has]
    #[arg(long, value_enum)]
    pub cpu_isa: Option<IsaArg>,
    /// Quantize the unquantized weights of layers at load time: int8 or int4 in groups of 32,
    /// int4-g128 in groups of 128, fp8 with one scale per row [default: no; `folio quantize` loses
    /// less]
    #[arg(long, value_name = "int8|int4|int4-g128|fp8")]
    pub quantize: Option<AtLoad>,
    /// Cache packed weights in a folder `.folio` beside the model and map them at the next start:
    /// auto (on the CPU, from 256 MiB on), on or off
    #[arg(long, value_enum, default_value_t, env = "FOLIO_PACKED_CACHE")]
    pub packed_cache: PackedCacheArg,
    /// Maximum tokens of a sequence, prompt and answer together [default: the model's]
    #[arg(long)]
    pub max_model_len: Option<usize>,
    /// JSON object of values that override config.json, e.g. '{"max_position_embeddings": 65536}';
    /// a GGUF file's metadata are overridden by the same names
    #[arg(long, value_name = "JSON")]
    pub hf_overrides: Option<JsonObject>,
    /// JSON object that overrides the model's RoPE scaling, e.g. '{"rope_type": "yarn", "factor":
    /// 4.0, "original_max_position_embeddings": 32768}'; linear and yarn extend the context
    #[arg(long, value_name = "JSON")]
    pub rope_scaling: Option<RopeScaling>,
    /// Maximum number of sequences that run at once [default: 64, or 256 on a GPU]
    #[arg(long)]
    pub max_num_seqs: Option<usize>,
    /// Maximum number of tokens computed in one step [default: 512, or 8192 on a GPU]
    #[arg(long)]
    pub max_num_batched_tokens: Option<usize>,
    /// Disable the prefix cache: compute every prompt from its first token
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub memory: MemoryArgs,
    #[command(flatten)]
    pub queue: QueueArgs,
    #[command(flatten)]
    pub speculate: SpeculateArgs,
}

/// A JSON object.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonObject(pub Map<String, Value>);

impl FromStr for JsonObject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match serde_json::from_str(text) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(r#"expected a JSON object, e.g. {"max_position_embeddings": 65536}"#.into()),
            Err(error) => Err(format!(r#"expected a JSON object, e.g. {{"max_position_embeddings": 65536}}: {error}"#)),
        }
    }
}

/// RoPE scaling as config.json describes it under `rope_scaling` or `rope_parameters`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeScaling(pub Map<String, Value>);

impl FromStr for RopeScaling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let example = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}"#;
        let Ok(JsonObject(fields)) = text.parse() else {
            return Err(format!("expected a JSON object, e.g. {example}"));
        };
        match ["rope_type", "type"].iter().any(|field| fields.get(*field).is_some_and(Value::is_string)) {
            true => Ok(Self(fields)),
            false => Err(format!("rope_type is missing; expected e.g. {example}")),
        }
    }
}

/// Memory limits.
#[derive(Args, Clone)]
#[command(next_help_heading = "Memory")]
pub struct MemoryArgs {
    /// Memory limit for weights, activations, KV cache and host tier together, e.g. 6GiB
    #[arg(long, value_name = "SIZE", group = "memory-budget")]
    pub memory: Option<ByteSize>,
    /// Memory limit as a fraction of the memory that is free at start, e.g. 0.9
    #[arg(long, value_name = "FRACTION", group = "memory-budget", visible_alias = "gpu-memory-utilization")]
    pub memory_fraction: Option<f64>,
    /// Size of the KV cache in MiB [default: as much as requests can use, at most half of the
    /// memory left by the weights]
    #[arg(long, value_name = "MIB", group = "memory-budget")]
    pub kv_cache_mib: Option<u64>,
    /// Size of the KV cache in bytes or with a unit, e.g. 2GiB
    #[arg(long, value_name = "SIZE", group = "memory-budget")]
    pub kv_cache_memory_bytes: Option<ByteSize>,
    /// Allow a memory size that exceeds the free memory of this machine
    #[arg(long)]
    pub memory_unchecked: bool,
    /// Memory limit for all request bodies together, and for the values parsed from them [default:
    /// 1/16 of --memory or of free memory, from 20 MiB to 128 MiB]
    #[arg(long, value_name = "SIZE")]
    pub max_body_memory: Option<ByteSize>,
    /// Format of the KV cache: auto (as precise as the weights), float32, float16, bfloat16, fp8
    /// (e4m3), int8 or int4
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub kv_cache_dtype: KvCacheDtype,
    /// Reduce --max-model-len to what fits in memory
    #[arg(long)]
    pub fit: bool,
    /// Size of the host tier in MiB: host memory for cached KV blocks that no request holds
    /// [default: none, or 256 with --kv-disk]
    #[arg(long, value_name = "MIB", group = "host-tier")]
    pub kv_host_mib: Option<u64>,
    /// Size of the host tier in GiB
    #[arg(long, value_name = "GIB", group = "host-tier")]
    pub kv_offloading_size: Option<f64>,
    /// Folder of the disk tier: cached KV blocks that survive a restart
    #[arg(long, value_name = "FOLDER")]
    pub kv_disk: Option<PathBuf>,
    /// Maximum size of the disk tier in MiB
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    pub kv_disk_mib: u64,
}

/// A KV-cache format, or none: the model decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheDtype(pub Option<KvFormat>);

impl FromStr for KvCacheDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let format = match text {
            "auto" => return Ok(Self(None)),
            "float32" | "f32" => KvFormat::F32,
            "float16" | "f16" => KvFormat::F16,
            "bfloat16" | "bf16" => KvFormat::BF16,
            "fp8" | "fp8_e4m3" => KvFormat::Fp8,
            "int8" => KvFormat::Int8,
            "int4" => KvFormat::Int4,
            _ => {
                return Err(
                    "expected auto, float32, float16, bfloat16, fp8 (or fp8_e4m3, the same), int8 or int4".into()
                );
            }
        };
        Ok(Self(Some(format)))
    }
}

/// The order and pace of requests.
#[derive(Args, Clone)]
#[command(next_help_heading = "Scheduling")]
pub struct QueueArgs {
    /// Target for the time between tokens of running streams while long prompts are computed, in
    /// milliseconds; `off` computes prompts at full speed [default: 50 on a GPU; on the CPU 15, or
    /// nearly three decode steps if those take longer]
    #[arg(long, value_name = "MS|off")]
    pub inter_token_target: Option<InterTokenTarget>,
    /// Seconds of waiting that equal one level of priority
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub priority_aging: f64,
    /// Maximum number of waiting requests; further ones are rejected [default: 4 x --max-num-seqs]
    #[arg(long, value_name = "N")]
    pub max_waiting: Option<usize>,
    /// Plan each step after the previous one has ended, not while it runs
    #[arg(long, visible_alias = "no-async-scheduling")]
    pub no_overlap: bool,
    /// Log to standard error why a request is preempted, and the cost of copying or recomputing its
    /// blocks
    #[arg(long, env = "FOLIO_DEBUG")]
    pub debug: bool,
}

/// Milliseconds, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterTokenTarget(pub Option<Duration>);

impl FromStr for InterTokenTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("off") {
            return Ok(Self(None));
        }
        let ms = text.parse::<f64>().ok().filter(|ms| (0.001..=3.6e6).contains(ms));
        let ms = ms.ok_or("expected milliseconds from 0.001 to 3600000, or `off`")?;
        Ok(Self(Some(Duration::from_secs_f64(ms / 1e3))))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PackedCacheArg {
    #[default]
    Auto,
    On,
    Off,
}

impl From<PackedCacheArg> for PackedCacheMode {
    fn from(arg: PackedCacheArg) -> Self {
        match arg {
            PackedCacheArg::Auto => Self::Auto,
            PackedCacheArg::On => Self::On,
            PackedCacheArg::Off => Self::Off,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub enum IsaArg {
    Scalar,
    Avx2,
    Avx512,
    Amx,
    Neon,
}

impl From<IsaArg> for Isa {
    fn from(arg: IsaArg) -> Isa {
        match arg {
            IsaArg::Scalar => Isa::Scalar,
            IsaArg::Avx2 => Isa::Avx2,
            IsaArg::Avx512 => Isa::Avx512,
            IsaArg::Amx => Isa::Amx,
            IsaArg::Neon => Isa::Neon,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_keys_and_values() {
        assert_eq!("auto".parse(), Ok(KvCacheDtype(None)));
        assert_eq!("fp8_e4m3".parse(), Ok(KvCacheDtype(Some(KvFormat::Fp8))));
        for format in KvFormat::ALL {
            assert_eq!(format.name().parse(), Ok(KvCacheDtype(Some(format))), "a report's name can be given back");
        }
        for bad in ["fp8_e5m2", "INT8", "int3", ""] {
            let error = bad.parse::<KvCacheDtype>().expect_err(bad);
            assert!(error.starts_with("expected auto, float32"), "{error}");
        }
    }

    #[test]
    fn scalings_of_positions() {
        let check = |text: &str, expect: Option<&str>| {
            let error = text.parse::<RopeScaling>().err();
            match expect {
                None => assert_eq!(error, None, "{text}"),
                Some(part) => assert!(error.as_ref().is_some_and(|error| error.contains(part)), "{text}: {error:?}"),
            }
        };
        check(r#"{"rope_type": "yarn", "factor": 4.0}"#, None);
        check(r#"{"type": "linear", "factor": 2}"#, None);
        check(r#"{"factor": 4.0}"#, Some("rope_type is missing"));
        // llama.cpp's notation.
        check("yarn", Some(r#"{"rope_type": "yarn""#));
        check("[]", Some("expected a JSON object"));
        let bad = "[1]".parse::<JsonObject>().expect_err("no object");
        assert!(bad.starts_with("expected a JSON object"), "{bad}");
    }

    #[test]
    fn targets() {
        let check = |text: &str, expect: Option<InterTokenTarget>| {
            assert_eq!(text.parse::<InterTokenTarget>().ok(), expect, "{text}");
        };
        check("50", Some(InterTokenTarget(Some(Duration::from_millis(50)))));
        check("2.5", Some(InterTokenTarget(Some(Duration::from_micros(2500)))));
        check("off", Some(InterTokenTarget(None)));
        for bad in ["0", "-1", "nan", "inf", "soon", ""] {
            check(bad, None);
        }
    }
}
