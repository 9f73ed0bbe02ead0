//! MODEL on the command line: a folder, a file, a name on the hub, or nothing.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::gguf_choice::{self, Pick, choose, is_gguf};

/// The place of a model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelRef {
    Embedded,
    Folder(PathBuf),
    Gguf(PathBuf),
}

/// `ORG/NAME`, and perhaps one of its GGUF files: `ORG/NAME:Q4_K_M` by quantization,
/// `ORG/NAME/FILE.gguf` by name. Behind either, perhaps a revision: `@REVISION`. ORG, NAME,
/// quantization and revision are letters, digits, `-`, `_` and `.`.
#[derive(Debug, PartialEq, Eq)]
pub struct HubName {
    pub repo: String,
    pub revision: String,
    pub pick: Pick,
}

/// Folders below a snapshot in which GGUF files are looked for.
const MOST_DEPTH: usize = 4;
/// Beginnings of a model's web address, or of Ollama's name for one.
const HUB_ADDRESSES: [&str; 4] = ["https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/"];

impl HubName {
    pub fn parse(text: &str) -> Option<Self> {
        let (model, revision) = text.split_once('@').unwrap_or((text, "main"));
        let mut parts = model.splitn(3, '/');
        let (org, name, file) = (parts.next()?, parts.next()?, parts.next());
        let (name, pick) = match (name.split_once(':'), file) {
            (None, None) => (name, Pick::Default),
            (Some((name, tag)), None) if is_plain_name(tag) => (name, Pick::Tag(tag.to_string())),
            (None, Some(file)) if is_gguf(file) && file.split('/').all(is_file_name) => {
                (name, Pick::File(file.to_string()))
            }
            _ => return None,
        };
        let revision_ok = !revision.is_empty() && revision.split('/').all(is_plain_name);
        let ok = is_plain_name(org) && is_plain_name(name) && revision_ok;
        ok.then(|| Self { repo: format!("{org}/{name}"), revision: revision.to_string(), pick })
    }

    /// The hub's name in a text, unless a file or folder has that path.
    pub fn of_argument(text: &str) -> Option<Self> {
        // `models/file.gguf` is a missing file.
        let is_path = is_gguf(text) && text.matches('/').count() < 2;
        if is_path || text.starts_with(['.', '/']) || Path::new(text).exists() {
            return None;
        }
        Self::parse(text)
    }

    /// The name without its revision.
    pub fn name(&self) -> String {
        format!("{}{}", self.repo, self.pick)
    }

    /// Another model of the same repository and revision.
    pub fn with(&self, pick: &Pick) -> String {
        match self.revision.as_str() {
            "main" => format!("{}{pick}", self.repo),
            revision => format!("{}{pick}@{revision}", self.repo),
        }
    }

    /// The folder of the commit that the revision names, as far as it was downloaded.
    fn snapshot(&self, hub: &Path) -> Option<PathBuf> {
        let folder = hub.join(format!("models--{}", self.repo.replace('/', "--")));
        let reference = folder.join("refs").join(&self.revision);
        // A revision may be a commit itself.
        let commit = std::fs::read_to_string(reference).unwrap_or_else(|_| self.revision.clone());
        let commit = Some(commit.trim()).filter(|commit| is_plain_name(commit))?;
        Some(folder.join("snapshots").join(commit)).filter(|folder| folder.is_dir())
    }

    /// The model among the downloaded files of the snapshot.
    fn find(&self, hub: Option<&Path>) -> Result<ModelRef> {
        let missing = || {
            let name = self.with(&self.pick);
            match self.pick {
                // It may have been meant as a path.
                Pick::File(_) => format!("{name}: no such file or folder; `folio pull {name}` fetches it from the hub"),
                _ => format!("{name} is not on this machine; fetch it with `folio pull {name}`"),
            }
        };
        let Some(snapshot) = hub.and_then(|hub| self.snapshot(hub)) else { bail!(missing()) };
        let mut files = Vec::new();
        list(&snapshot, "", MOST_DEPTH, &mut files);
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let has = |name: &str| files.contains(&name);
        let has_weights = files.iter().any(|file| file.ends_with(".safetensors") && !file.contains('/'));
        let chosen = choose(&files, &self.pick);
        match chosen {
            _ if self.pick == Pick::Default && (has_weights || chosen.is_none()) => {
                if has("adapter_config.json") && !has("config.json") {
                    bail!("{} is a LoRA adapter, which folio does not load", self.repo);
                }
                match has_weights || has("config.json") {
                    true => Ok(ModelRef::Folder(snapshot)),
                    false => bail!(missing()),
                }
            }
            Some(chosen) if chosen.is_whole() => Ok(ModelRef::Gguf(snapshot.join(chosen.files[0]))),
            Some(chosen) => bail!("{} ({} of its {} parts are here)", missing(), chosen.files.len(), chosen.parts),
            None => {
                let here: Vec<String> = gguf_choice::picks(&files).iter().map(|pick| self.with(pick)).collect();
                match here.is_empty() {
                    true => bail!(missing()),
                    false => bail!("{}; here is {}", missing(), here.join(", ")),
                }
            }
        }
    }
}

/// Paths of the files below a folder, at most `depth` folders down.
fn list(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = entry.path();
        if path.is_file() {
            found.push(format!("{prefix}{name}"));
        } else if depth > 0 && path.is_dir() {
            list(&path, &format!("{prefix}{name}/"), depth - 1, found);
        }
    }
}

fn is_file_name(part: &str) -> bool {
    !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', ':', '\0'])
}

fn is_plain_name(part: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !part.is_empty() && part.chars().all(plain) && !part.starts_with('.')
}

impl ModelRef {
    /// Finds the model of that name; `hub` is the cache of the hub.
    pub fn resolve(text: Option<&str>, hub: Option<&Path>) -> Result<Self> {
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
        if let Some(name) = HubName::of_argument(text) {
            return name.find(hub);
        }
        let named = HUB_ADDRESSES.iter().find_map(|address| HubName::parse(text.strip_prefix(address)?));
        match named {
            Some(name) => bail!("{text}: no such file or folder; did you mean {}?", name.with(&name.pick)),
            None => bail!("{text}: no such file or folder, and not an ORG/NAME of the hub"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_names() {
        let check = |text: &str, expect: Option<(&str, &str)>| {
            let found = HubName::parse(text).map(|name| (name.name(), name.revision));
            assert_eq!(found.as_ref().map(|(name, revision)| (name.as_str(), revision.as_str())), expect, "{text}");
        };
        check("org/name", Some(("org/name", "main")));
        check("org/name-1.5_x@v1.0", Some(("org/name-1.5_x", "v1.0")));
        check("org/name@refs/pr/1", Some(("org/name", "refs/pr/1")));
        check("org/name:Q4_K_M", Some(("org/name:Q4_K_M", "main")));
        check("org/name:Q4_K_M@v1.0", Some(("org/name:Q4_K_M", "v1.0")));
        check("org/name/a b+c.gguf", Some(("org/name/a b+c.gguf", "main")));
        check(
            "org/name/Q8_0/m-00001-of-00002.gguf@refs/pr/1",
            Some(("org/name/Q8_0/m-00001-of-00002.gguf", "refs/pr/1")),
        );
        check("org/name:", None);
        check("org/name:a/b", None);
        check("org/name:Q8_0/m.gguf", None);
        check("org/name/../m.gguf", None);
        check("org/name//m.gguf", None);
        check("org/name/m.bin", None);
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
        let text =
            |model| format!("{:#}", ModelRef::resolve(Some(model), Some(Path::new("/no/such/cache"))).unwrap_err());
        assert!(text("no-such-org/no-such-model").contains("folio pull no-such-org/no-such-model"));
        assert!(text("/no/such/folder").contains("no such file or folder"));
        assert!(text("models/missing.gguf").contains("no such file or folder"));
        assert!(text("no-such-org/no-such-model:Q8_0@v1").contains("folio pull no-such-org/no-such-model:Q8_0@v1"));
        assert!(text("no-such-org/model/file.gguf").contains("folio pull no-such-org/model/file.gguf"));
        for address in ["https://huggingface.co/org/model", "hf.co/org/model:Q8_0"] {
            assert!(text(address).contains("did you mean org/model"), "{}", text(address));
        }
        assert_eq!(ModelRef::resolve(None, None).unwrap(), ModelRef::Embedded);
    }
}
