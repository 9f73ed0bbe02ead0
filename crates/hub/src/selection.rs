//! The choice of files to download from a repository.

use anyhow::{Result, bail};
use folio_session::HubName;
use folio_session::gguf_choice::{self, Pick, choose};

/// Files that Folio reads in a model repository, besides weights.
const WANTED_NAMES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
];

/// Files to download from a repository, besides [`WANTED_NAMES`].
#[derive(Debug)]
pub struct Selection<'a> {
    /// Weights in one format only: safetensors if there are any, else the GGUF files of one
    /// quantization.
    pub weights: Vec<&'a str>,
    /// Names of the other models in the repository.
    pub others: Vec<String>,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Model,
    /// A LoRA adapter.
    Adapter,
    /// Weights without a configuration.
    Weights,
}

impl<'a> Selection<'a> {
    pub fn of(name: &HubName, all: &[&'a str]) -> Result<Self> {
        let has = |name: &str| all.contains(&name);
        let safetensors = |file: &&str| file.ends_with(".safetensors") && !file.contains('/');
        let weights: Vec<&str> = all.iter().copied().filter(safetensors).collect();
        if name.pick == Pick::Default && !weights.is_empty() {
            let kind = match (has("config.json"), has("adapter_config.json")) {
                (true, _) => Kind::Model,
                (false, true) => Kind::Adapter,
                (false, false) => Kind::Weights,
            };
            return Ok(Self { weights, others: Vec::new(), kind });
        }
        let picks = gguf_choice::picks(all);
        let names = |picks: &[Pick]| picks.iter().map(|pick| name.with(pick)).collect::<Vec<_>>();
        let Some(chosen) = choose(all, &name.pick) else {
            match picks.is_empty() {
                true if name.pick == Pick::Default => {
                    bail!("{} has neither safetensors nor GGUF weights among its {} files", name.repo, all.len())
                }
                true => bail!("{} has no GGUF weights among its {} files", name.repo, all.len()),
                false => bail!("{} has no such model; it has {}", name.with(&name.pick), names(&picks).join(", ")),
            }
        };
        let others: Vec<Pick> = picks.into_iter().filter(|pick| choose(all, pick).as_ref() != Some(&chosen)).collect();
        Ok(Self { others: names(&others), weights: chosen.files, kind: Kind::Model })
    }

    pub fn has(&self, file: &str) -> bool {
        WANTED_NAMES.contains(&file) || self.weights.contains(&file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_weight_format_is_fetched() {
        let check = |model: &str, all: &[&str], expect: &[&str], others: &[&str], kind: Kind| {
            let name = HubName::parse(model).expect(model);
            let wanted = Selection::of(&name, all).unwrap_or_else(|error| panic!("{model}: {error}"));
            let picked: Vec<_> = all.iter().filter(|file| wanted.has(file)).copied().collect();
            assert_eq!((picked.as_slice(), wanted.kind), (expect, kind), "{model} of {all:?}");
            assert_eq!(wanted.others, others, "{model} of {all:?}");
        };
        let both = ["config.json", "a.safetensors", "a.gguf", "pytorch_model.bin", "onnx/m.safetensors", "README.md"];
        check("org/a", &both, &["config.json", "a.safetensors"], &[], Kind::Model);
        check("org/a/a.gguf", &both, &["config.json", "a.gguf"], &[], Kind::Model);
        check("org/a", &["a.gguf", "README.md"], &["a.gguf"], &[], Kind::Model);
        let modelopt = ["config.json", "hf_quant_config.json", "model.safetensors"];
        check("org/a", &modelopt, &modelopt, &[], Kind::Model);
        let many = [
            "a-Q8_0.gguf",
            "a-Q4_K_M.gguf",
            "mmproj-F16.gguf",
            "a-F16-00001-of-00002.gguf",
            "a-F16-00002-of-00002.gguf",
        ];
        check("org/a", &many, &["a-Q4_K_M.gguf"], &["org/a:F16", "org/a:Q8_0"], Kind::Model);
        check("org/a:Q8_0@v1", &many, &["a-Q8_0.gguf"], &["org/a:F16@v1", "org/a:Q4_K_M@v1"], Kind::Model);
        check("org/a:f16", &many, &many[3..], &["org/a:Q4_K_M", "org/a:Q8_0"], Kind::Model);
        let adapter = ["adapter_config.json", "adapter_model.safetensors"];
        check("org/a", &adapter, &adapter[1..], &[], Kind::Adapter);
        check("org/a", &["heads.safetensors"], &["heads.safetensors"], &[], Kind::Weights);
    }

    #[test]
    fn what_a_repository_lacks_is_said() {
        let check = |model: &str, all: &[&str], expect: &str| {
            let error = Selection::of(&HubName::parse(model).expect(model), all).expect_err(model).to_string();
            assert!(error.contains(expect), "{model}: {error}");
        };
        check("org/a", &["config.json", "pytorch_model.bin"], "neither safetensors nor GGUF weights among its 2 files");
        check("org/a:Q8_0", &["model.safetensors"], "no GGUF weights");
        check("org/a:Q9", &["a-Q8_0.gguf", "a-Q4_0.gguf"], "it has org/a:Q4_0, org/a:Q8_0");
    }
}
