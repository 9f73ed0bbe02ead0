//! `folio pull`: downloads a model from the Hugging Face hub into the cache that its own tools use,
//! and resumes interrupted downloads.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};
use folio_session::HubName;
use folio_session::gguf_choice::{self, Pick, choose, is_gguf};
use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, Repo, RepoType};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::PullArgs;
use crate::environment;

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

pub fn main(args: &PullArgs) -> Result<()> {
    let Some(name) = HubName::parse(&args.model) else {
        bail!(
            "expected ORG/NAME, ORG/NAME:QUANTIZATION or ORG/NAME/FILE.gguf, with an optional @REVISION, found {:?}",
            args.model
        );
    };
    if environment::is_offline() {
        bail!("offline mode is on (HF_HUB_OFFLINE): nothing is downloaded; unset it and try again");
    }
    let cache = Cache::new(environment::hub_cache().context("neither HF_HOME nor a home folder is set")?);
    let hub_repo = || Repo::with_revision(name.repo.clone(), RepoType::Model, name.revision.clone());
    let repo = api(cache.clone())?.repo(hub_repo());
    let info = repo.info().with_context(|| {
        format!("could not read {}@{} from the hub (a private or gated model needs HF_TOKEN)", name.repo, name.revision)
    })?;
    let all: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let wanted = Selection::of(&name, &all)?;
    let files: Vec<&str> = all.iter().copied().filter(|file| args.all || wanted.has(file)).collect();
    if !args.all && !wanted.others.is_empty() {
        say!(
            "downloading {}, one of {} models; the others: {}",
            wanted.weights[0],
            wanted.others.len() + 1,
            wanted.others.join(", ")
        );
    }
    let mut fetched = HashMap::new();
    for file in files {
        if !is_safe(file) {
            bail!("the hub lists a file outside the model's folder: {file:?}");
        }
        let path = match cache.repo(hub_repo()).get(file) {
            Some(path) if path.exists() => path,
            _ => repo.download_with_progress(file, bar()).with_context(|| {
                format!("the download of {file} was interrupted; run the same command again to resume it")
            })?,
        };
        fetched.insert(file, path);
    }
    // A GGUF model is a file; other models are the folder of their files.
    let first = fetched.get(wanted.weights[0]).context("no weights were downloaded")?;
    let place = if is_gguf(wanted.weights[0]) { Some(first.as_path()) } else { first.parent() };
    outln!("{}", place.unwrap_or(first).display())?;
    match wanted.kind {
        Kind::Model => outln!("try: folio run {}", name.with(&name.pick)),
        Kind::Adapter => outln!("this is a LoRA adapter, which folio does not load"),
        Kind::Weights => outln!("there is no config.json, without which folio cannot load a model"),
    }
}

/// Files to download from a repository, besides [`WANTED_NAMES`].
#[derive(Debug)]
struct Selection<'a> {
    /// Weights in one format only: safetensors if there are any, else the GGUF files of one
    /// quantization.
    weights: Vec<&'a str>,
    /// Names of the other models in the repository.
    others: Vec<String>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Model,
    Adapter,
    /// Weights without a configuration.
    Weights,
}

impl<'a> Selection<'a> {
    fn of(name: &HubName, all: &[&'a str]) -> Result<Self> {
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

    fn has(&self, file: &str) -> bool {
        WANTED_NAMES.contains(&file) || self.weights.contains(&file)
    }
}

fn is_safe(file: &str) -> bool {
    !file.is_empty()
        && !file.contains('\\')
        && file.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

fn api(cache: Cache) -> Result<Api> {
    let builder = ApiBuilder::from_env().with_cache_dir(cache.path().clone()).with_progress(false).with_retries(3);
    let builder = match environment::hub_token() {
        Some(token) => builder.with_token(Some(token)),
        None => builder,
    };
    builder.build().context("could not set up the hub client")
}

/// Draws hf-hub's `Progress` with indicatif.
struct Bar(ProgressBar);

fn bar() -> Bar {
    let style =
        ProgressStyle::with_template("{msg:28!} {bar:28} {bytes:>11}/{total_bytes:11} {bytes_per_sec:>12} {eta:>5}");
    Bar(ProgressBar::new(0).with_style(style.expect("the template is well formed")))
}

impl hf_hub::api::Progress for Bar {
    fn init(&mut self, size: usize, filename: &str) {
        self.0.reset();
        self.0.set_length(size as u64);
        self.0.set_message(filename.to_string());
    }

    fn update(&mut self, size: usize) {
        self.0.inc(size as u64);
    }

    fn finish(&mut self) {
        self.0.finish();
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

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for bad in ["../x", "/etc/passwd", "a/../../b", "a//b", "", "a\\..\\b"] {
            assert!(!is_safe(bad), "{bad}");
        }
        assert!(is_safe("model-00001-of-00002.safetensors") && is_safe("original/params.json"));
    }
}
