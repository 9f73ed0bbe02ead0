//! MODEL on the command line: a folder, a file, a name on the hub, or nothing.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use hf_hub::{Cache, Repo, RepoType};

/// Where a model is to be had on this machine.
#[derive(Debug, PartialEq, Eq)]
pub enum ModelRef {
    Embedded,
    Folder(PathBuf),
    Gguf(PathBuf),
}

/// ORG/NAME and perhaps a revision: letters, digits, `-`, `_` and `.`, and exactly one slash.
#[derive(Debug, PartialEq, Eq)]
pub struct HubName {
    pub repo: String,
    pub revision: String,
}

impl HubName {
    pub fn parse(text: &str) -> Option<Self> {
        let (repo, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (org, name) = repo.split_once('/')?;
        let revision_ok = !revision.is_empty() && revision.split('/').all(is_plain_name);
        let ok = is_plain_name(org) && is_plain_name(name) && revision_ok;
        ok.then(|| Self { repo: repo.to_string(), revision: revision.to_string() })
    }

    pub fn repo(&self) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, self.revision.clone())
    }

    /// The folder `folio pull` filled, if it did.
    fn snapshot(&self) -> Option<PathBuf> {
        let config = Cache::from_env().repo(self.repo()).get("config.json")?;
        config.parent().map(Path::to_path_buf)
    }
}

fn is_plain_name(part: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !part.is_empty() && part.chars().all(plain) && !part.starts_with('.')
}

impl ModelRef {
    pub fn resolve(text: Option<&str>) -> Result<Self> {
        let Some(text) = text else { return Ok(Self::Embedded) };
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Folder(path.to_path_buf()));
        }
        if path.is_file() {
            if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) {
                return Ok(Self::Gguf(path.to_path_buf()));
            }
            bail!(
                "{text} is a file, but not a .gguf; give the folder that holds config.json and the safetensors files"
            );
        }
        let is_path = text.ends_with(".gguf") || text.starts_with(['.', '/']);
        let Some(name) = HubName::parse(text).filter(|_| !is_path) else {
            bail!("{text}: no such file or folder, and not an ORG/NAME of the hub");
        };
        match name.snapshot() {
            Some(folder) => Ok(Self::Folder(folder)),
            None => bail!("{text} is not on this machine; fetch it with `folio pull {text}`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_names() {
        let check = |text: &str, expect: Option<(&str, &str)>| {
            let found = HubName::parse(text);
            assert_eq!(found.as_ref().map(|n| (n.repo.as_str(), n.revision.as_str())), expect, "{text}");
        };
        check("org/name", Some(("org/name", "main")));
        check("org/name-1.5_x@v1.0", Some(("org/name-1.5_x", "v1.0")));
        check("org/name@refs/pr/1", Some(("org/name", "refs/pr/1")));
        check("name", None);
        check("../name", None);
        check("org/..", None);
        check("org/name/more", None);
        check("org/name@", None);
        check("org/name@../../etc", None);
        check("/etc/passwd", None);
    }

    #[test]
    fn what_is_missing_says_what_to_do() {
        let text = |model| format!("{:#}", ModelRef::resolve(Some(model)).unwrap_err());
        assert!(text("no-such-org/no-such-model").contains("folio pull no-such-org/no-such-model"));
        assert!(text("/no/such/folder").contains("no such file or folder"));
        assert!(text("models/missing.gguf").contains("no such file or folder"));
        assert_eq!(ModelRef::resolve(None).unwrap(), ModelRef::Embedded);
    }
}
