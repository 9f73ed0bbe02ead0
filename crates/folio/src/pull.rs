//! `folio pull`: from the Hugging Face hub into the cache that its own tools use. Resumes what was cut off.

use anyhow::{Context, Result, bail};
use hf_hub::Cache;
use hf_hub::api::sync::{Api, ApiBuilder};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::PullArgs;
use crate::model_ref::HubName;

/// What Folio reads of a model repository.
const WANTED_NAMES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
];

pub fn main(args: &PullArgs) -> Result<()> {
    let Some(name) = HubName::parse(&args.model) else {
        bail!("{} is not an ORG/NAME or ORG/NAME@REVISION", args.model);
    };
    if offline() {
        bail!("offline mode is on (HF_HUB_OFFLINE): nothing is fetched; unset it and try again");
    }
    let repo = api()?.repo(name.repo());
    let info = repo.info().with_context(|| {
        format!("could not read {}@{} from the hub (a private or gated model needs HF_TOKEN)", name.repo, name.revision)
    })?;
    let all: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let files: Vec<&str> = all.iter().copied().filter(|file| args.all || is_wanted(file, &all)).collect();
    if !files.iter().any(|file| file.ends_with(".safetensors") || file.ends_with(".gguf")) {
        bail!("{} has neither safetensors nor GGUF weights among its {} files", name.repo, all.len());
    }
    let mut folder = None;
    for file in files {
        if !is_safe(file) {
            bail!("the hub names a file that would leave the model's folder: {file:?}");
        }
        let path = match Cache::from_env().repo(name.repo()).get(file) {
            Some(path) if path.exists() => path,
            _ => repo
                .download_with_progress(file, bar())
                .with_context(|| format!("{file} was cut off; run the same command again to go on where it stopped"))?,
        };
        folder = folder.or_else(|| (!file.contains('/')).then(|| path.parent().map(|f| f.to_path_buf())).flatten());
    }
    let folder = folder.context("the repository has no file at its top level")?;
    println!("{}\ntry it: folio run {}", folder.display(), args.model);
    Ok(())
}

/// Weights in one format only: a repository that has safetensors is not fetched as PyTorch or GGUF too.
fn is_wanted(file: &str, all: &[&str]) -> bool {
    let safetensors = |name: &str| name.ends_with(".safetensors") && !name.contains('/');
    WANTED_NAMES.contains(&file)
        || safetensors(file)
        || (file.ends_with(".gguf") && !all.iter().any(|other| safetensors(other)))
}

fn is_safe(file: &str) -> bool {
    !file.is_empty()
        && !file.contains('\\')
        && file.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

fn api() -> Result<Api> {
    let builder = ApiBuilder::from_env().with_progress(false).with_retries(3);
    let builder = match std::env::var("HF_TOKEN") {
        Ok(token) if !token.is_empty() => builder.with_token(Some(token)),
        _ => builder,
    };
    builder.build().context("could not set up the hub client")
}

fn offline() -> bool {
    ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]
        .iter()
        .any(|name| std::env::var(name).is_ok_and(|value| !matches!(value.as_str(), "" | "0" | "false" | "no")))
}

/// hf-hub reports to any of its own `Progress`; this one draws with indicatif.
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
        let both = ["config.json", "a.safetensors", "a.gguf", "pytorch_model.bin", "onnx/m.safetensors", "README.md"];
        let picked: Vec<_> = both.iter().filter(|file| is_wanted(file, &both)).copied().collect();
        assert_eq!(picked, ["config.json", "a.safetensors"]);
        assert!(is_wanted("a.gguf", &["a.gguf", "README.md"]));
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for bad in ["../x", "/etc/passwd", "a/../../b", "a//b", "", "a\\..\\b"] {
            assert!(!is_safe(bad), "{bad}");
        }
        assert!(is_safe("model-00001-of-00002.safetensors") && is_safe("original/params.json"));
    }
}
