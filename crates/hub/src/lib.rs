//! Downloads models from the Hugging Face hub into the cache that its own tools use, and resumes
//! interrupted downloads.
//!
//! Nothing here reads the environment or prints: the cache's folder, the token and the endpoint are
//! options, and progress goes to a [`Listener`].

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod selection;

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use folio_session::HubName;
use folio_session::gguf_choice::is_gguf;
use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, Repo, RepoType};

pub use selection::Kind;
use selection::Selection;

#[derive(Clone, Debug)]
pub struct Options {
    /// Folder of the hub's cache.
    pub cache: PathBuf,
    /// Token for private models; by default the one that is stored beside the cache.
    pub token: Option<String>,
    /// Address of the hub, if it is another one.
    pub endpoint: Option<String>,
    /// Download every file of the repository, not only those that Folio reads.
    pub all: bool,
}

/// Receives the progress of a download.
pub trait Listener {
    /// The repository has several models: `chosen` is the first file of the one to download, and
    /// `others` are the names of the rest.
    fn chose(&mut self, chosen: &str, others: &[String]);

    /// The download of a file begins.
    fn begin(&mut self, file: &str, bytes: usize);

    fn advance(&mut self, bytes: usize);

    /// The file is there.
    fn finish(&mut self);
}

/// A model in the cache.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// A GGUF file, or the folder of the model's files.
    pub path: PathBuf,
    pub kind: Kind,
}

/// Downloads the files of a model that the cache lacks.
pub fn pull(name: &HubName, options: &Options, listener: &mut dyn Listener) -> Result<Pulled> {
    let cache = Cache::new(options.cache.clone());
    let hub_repo = || Repo::with_revision(name.repo.clone(), RepoType::Model, name.revision.clone());
    let repo = api(cache.clone(), options)?.repo(hub_repo());
    let info = repo.info().with_context(|| {
        format!("could not read {}@{} from the hub (a private or gated model needs HF_TOKEN)", name.repo, name.revision)
    })?;
    let all: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let wanted = Selection::of(name, &all)?;
    let files: Vec<&str> = all.iter().copied().filter(|file| options.all || wanted.has(file)).collect();
    if !options.all && !wanted.others.is_empty() {
        listener.chose(wanted.weights[0], &wanted.others);
    }
    let mut fetched = HashMap::new();
    for file in files {
        if !is_safe(file) {
            bail!("the hub lists a file outside the model's folder: {file:?}");
        }
        let path = match cache.repo(hub_repo()).get(file) {
            Some(path) if path.exists() => path,
            _ => repo.download_with_progress(file, Passed(&mut *listener)).with_context(|| {
                format!("the download of {file} was interrupted; run the same command again to resume it")
            })?,
        };
        fetched.insert(file, path);
    }
    // A GGUF model is a file; other models are the folder of their files.
    let first = fetched.get(wanted.weights[0]).context("no weights were downloaded")?;
    let place = if is_gguf(wanted.weights[0]) { Some(first.as_path()) } else { first.parent() };
    Ok(Pulled { path: place.unwrap_or(first).to_owned(), kind: wanted.kind })
}

fn api(cache: Cache, options: &Options) -> Result<Api> {
    let mut builder = ApiBuilder::from_cache(cache).with_progress(false).with_retries(3);
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    if let Some(token) = &options.token {
        builder = builder.with_token(Some(token.clone()));
    }
    builder.build().context("could not set up the hub client")
}

fn is_safe(file: &str) -> bool {
    !file.is_empty()
        && !file.contains('\\')
        && file.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

/// Passes the progress of the hub's client on.
struct Passed<'a>(&'a mut dyn Listener);

impl hf_hub::api::Progress for Passed<'_> {
    fn init(&mut self, size: usize, filename: &str) {
        self.0.begin(filename, size);
    }

    fn update(&mut self, size: usize) {
        self.0.advance(size);
    }

    fn finish(&mut self) {
        self.0.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for bad in ["../x", "/etc/passwd", "a/../../b", "a//b", "", "a\\..\\b"] {
            assert!(!is_safe(bad), "{bad}");
        }
        assert!(is_safe("model-00001-of-00002.safetensors") && is_safe("original/params.json"));
    }
}
