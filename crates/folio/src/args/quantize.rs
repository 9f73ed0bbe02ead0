//! Flags of `folio quantize`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use folio_quantize::write::Mix;
use folio_quantize::{Method, Target};

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct QuantizeArgs {
    /// Model in full precision: folder, .gguf file, or ORG/NAME downloaded by `folio pull`
    pub model: String,
    /// Output folder, or .gguf file
    pub out: PathBuf,
    /// Format of the quantized weights
    #[arg(long, value_name = "FORMAT")]
    pub format: QuantizeFormat,
    /// Quantization method: rtn rounds to nearest; gptq and awq also use calibration text
    #[arg(long, value_name = "rtn|gptq|awq", default_value = "rtn", value_parser = Method::from_str)]
    pub method: Method,
    /// Calibration text: a .jsonl file of objects with a "text", or plain text [default: Folio's
    /// own documentation]
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Maximum number of calibration tokens
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    pub calibration_tokens: usize,
    /// Tokens per calibration sequence
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub calibration_window: usize,
    /// Linear layers to leave unquantized, by any part of their names
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "lm_head")]
    pub keep: Vec<String>,
    /// Overwrite OUT
    #[arg(long)]
    pub force: bool,
    /// Number of compute threads [default: all cores]
    #[arg(long, env = "FOLIO_THREADS")]
    pub threads: Option<usize>,
}

const AFTER_HELP: &str = "\
Formats, with bits per weight and other software that loads them:
  int8          8.1   groups of 128            transformers, vLLM (compressed-tensors)
  int8-channel  8.0   W8A8, one scale per row  transformers, vLLM (compressed-tensors)
  int4-g128     4.1   groups of 128            transformers, vLLM (compressed-tensors)
  int4-g32      4.5   groups of 32             transformers, vLLM (compressed-tensors)
  fp8           8.0   e4m3, one scale per row  transformers, vLLM (compressed-tensors)
  fp8-block     8.0   e4m3, blocks of 128x128  transformers, vLLM (compressed-tensors)
  mxfp4         4.3   e2m1, groups of 32       transformers (compressed-tensors)
  nvfp4         4.5   e2m1, groups of 16       transformers, vLLM (compressed-tensors)
  nf4           4.5   groups of 64             transformers (bitsandbytes)
  llm-int8      8.0   outlier columns in bf16  transformers without them (bitsandbytes)
  q4_k_m        4.8   GGUF                     llama.cpp
  q8_0          8.5   GGUF                     llama.cpp";

/// A format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizeFormat {
    Folder(Target),
    Gguf(Mix),
}

impl FromStr for QuantizeFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(mix) = text.parse() {
            return Ok(Self::Gguf(mix));
        }
        text.parse().map(Self::Folder).map_err(|error: folio_quantize::Error| format!("{error}, q4_k_m, q8_0"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_both_kinds() {
        assert_eq!("q8_0".parse(), Ok(QuantizeFormat::Gguf(Mix::Q8)));
        assert_eq!("fp8".parse(), Ok(QuantizeFormat::Folder(Target::Fp8 { block: false })));
        let error = "int5".parse::<QuantizeFormat>().unwrap_err();
        assert!(error.contains("int4-g128") && error.contains("q4_k_m"), "{error}");
    }
}
