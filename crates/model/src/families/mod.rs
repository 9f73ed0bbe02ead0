//! Model families: each turns its configuration into a [`ModelSpec`]. One row here, one short file
//! beside it.

mod common;
mod gemma;
mod gpt_oss;
mod granite;
mod llama;
mod mistral;
mod olmo;
mod phi3;
mod qwen;
mod smollm3;

use crate::{Config, ModelSpec, Result};

/// A model family and its peculiarities.
pub struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// `general.architecture` in GGUF, if it has its own.
    pub gguf: Option<&'static str>,
    spec: fn(&Config) -> Result<ModelSpec>,
    /// Whether GGUF stores query and key rows reordered for rotation in adjacent pairs.
    pub(crate) gguf_permuted: bool,
    /// Whether fused experts are transposed, with alternating gate and up columns.
    pub(crate) interleaved_experts: bool,
}

const fn family(
    model_type: &'static str,
    gguf: Option<&'static str>,
    spec: fn(&Config) -> Result<ModelSpec>,
) -> Family {
    Family { model_type, gguf, spec, gguf_permuted: false, interleaved_experts: false }
}

/// Every family, by its name in configurations.
pub const FAMILIES: &[Family] = &[
    Family { gguf_permuted: true, ..family("llama", Some("llama"), llama::spec) },
    Family { gguf_permuted: true, ..family("mistral", None, mistral::mistral) },
    Family { gguf_permuted: true, ..family("mixtral", None, mistral::mixtral) },
    family("qwen2", Some("qwen2"), qwen::qwen2),
    family("qwen3", Some("qwen3"), qwen::qwen3),
    family("qwen3_moe", Some("qwen3moe"), qwen::qwen3_moe),
    family("gemma2", Some("gemma2"), gemma::gemma2),
    family("gemma3_text", Some("gemma3"), gemma::gemma3),
    family("gemma3", None, gemma::gemma3),
    family("phi3", Some("phi3"), phi3::spec),
    family("olmo2", Some("olmo2"), olmo::olmo2),
    family("olmo3", None, olmo::olmo3),
    Family { gguf_permuted: true, ..family("granite", Some("granite"), granite::spec) },
    Family { gguf_permuted: true, ..family("smollm3", Some("smollm3"), smollm3::spec) },
    Family { interleaved_experts: true, ..family("gpt_oss", Some("gpt-oss"), gpt_oss::spec) },
];

impl Family {
    /// The family that `model_type` names.
    pub fn of(config: &Config) -> Result<&'static Family> {
        check_head(config)?;
        let name = config.str("model_type")?.ok_or_else(|| config.refuse("model_type", "is missing"))?;
        FAMILIES.iter().find(|family| family.model_type == name).ok_or_else(|| {
            let known: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
            config.family_error("model_type", &format!("{name:?}"), known.join(", "))
        })
    }

    pub(crate) fn by_gguf(architecture: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.gguf == Some(architecture))
    }

    pub(crate) fn by_model_type(name: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.model_type == name)
    }

    pub fn spec(&self, config: &Config) -> Result<ModelSpec> {
        (self.spec)(config)
    }
}

/// Refuses a classifier or a reward model, which has the same body and another head.
fn check_head(config: &Config) -> Result<()> {
    let Some(first) = config.list("architectures")?.and_then(|list| list.first()).and_then(|name| name.as_str()) else {
        return Ok(());
    };
    let generates = ["ForCausalLM", "ForConditionalGeneration"].iter().any(|head| first.contains(head));
    if generates || !first.contains("For") {
        return Ok(());
    }
    Err(config.refuse("architectures", format!("is {first:?}, which does not generate text")))
}

#[cfg(test)]
mod tests;
