//! Flags of sampling defaults.

use std::str::FromStr;

use clap::Args;
use folio_engine::SamplingDefaults;
use folio_session::{GenerationSource, generation_overrides};

#[derive(Args, Clone, Debug, Default)]
pub struct GenerationArgs {
    /// Source of sampling defaults: auto (the model's generation_config.json or GGUF metadata),
    /// vllm (none, temperature 1), or a folder with another generation_config.json, whose
    /// max_new_tokens limits requests too
    #[arg(long, value_name = "auto|vllm|FOLDER", default_value = "auto")]
    pub generation_config: GenerationSource,
    /// JSON object of sampling defaults that override that source, e.g. '{"temperature": 0.5}';
    /// max_new_tokens limits requests too
    #[arg(long, value_name = "JSON")]
    pub override_generation_config: Option<GenerationOverride>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GenerationOverride(pub SamplingDefaults);

impl FromStr for GenerationOverride {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        generation_overrides(text).map(Self).map_err(|error| format!("{error:#}"))
    }
}
