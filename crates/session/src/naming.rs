//! The name of a model, by its path.

use std::path::{Component, Path};

use crate::gguf_choice::split_name;

/// A model's name, and its commit if the hub's cache has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub name: String,
    pub commit: Option<String>,
}

/// A folder has its own name, a file its name without `.gguf` and its number among parts. A link
/// has the name of its target, unless that is a nameless file in the hub's cache; a folder of that
/// cache has the hub's name.
pub fn of(path: &Path) -> Name {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    if path.is_dir() {
        return match of_snapshot(&real) {
            Some((repo, commit)) => Name { name: repo, commit: Some(commit) },
            None => Name { name: last(&real), commit: None },
        };
    }
    let commit = path.ancestors().find_map(of_snapshot).map(|(_, commit)| commit);
    // The hub's cache stores files under their digests, and links to them.
    let named = [real.as_path(), path].map(last);
    let name = named.iter().find_map(|name| split_name(name)).map(|(stem, _)| stem.to_owned());
    Name { name: name.unwrap_or_else(|| named[1].clone()), commit }
}

/// ORG/NAME and the commit of `models--ORG--NAME/snapshots/COMMIT`.
fn of_snapshot(folder: &Path) -> Option<(String, String)> {
    let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let repo = last(snapshots.parent()?);
    let repo = repo.strip_prefix("models--")?;
    Some((repo.replacen("--", "/", 1), last(folder)))
}

fn last(path: &Path) -> String {
    match path.components().next_back() {
        Some(Component::Normal(name)) => name.to_string_lossy().into_owned(),
        _ => "model".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn nothing_is_cut_but_what_is_no_name() {
        let scratch = std::env::temp_dir().join(format!("folio-naming-{}", std::process::id()));
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let cached = format!("models--org--some.Model-1.5/snapshots/{commit}");
        for folder in ["Qwen2.5-7B-Instruct", "Llama-3.2-1B", "plain", &cached, "blobs"] {
            fs::create_dir_all(scratch.join(folder)).expect("writable");
        }
        for file in ["Llama-3.2-1B-Q4_K_M.gguf", "m-00001-of-00003.gguf", "upper.GGUF", "blobs/abcdef", "odd.gguf.gguf"]
        {
            fs::write(scratch.join(file), "").expect("writable");
        }
        #[cfg(unix)]
        for (to, from) in [
            ("Qwen2.5-7B-Instruct", "current"),
            ("Llama-3.2-1B-Q4_K_M.gguf", "link.gguf"),
            ("../../../blobs/abcdef", &format!("{cached}/x-1.5-Q8_0.gguf")),
            (&cached, "snapshot"),
        ] {
            std::os::unix::fs::symlink(to, scratch.join(from)).expect("writable");
        }
        let check = |path: &str, name: &str, has_commit: bool| {
            let found = of(&scratch.join(path));
            let expect = Name { name: name.into(), commit: has_commit.then(|| commit.into()) };
            assert_eq!(found, expect, "{path}");
        };
        check("Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct", false);
        check("Qwen2.5-7B-Instruct/", "Qwen2.5-7B-Instruct", false);
        check("Qwen2.5-7B-Instruct/.", "Qwen2.5-7B-Instruct", false);
        check("Qwen2.5-7B-Instruct/../Llama-3.2-1B", "Llama-3.2-1B", false);
        check("Llama-3.2-1B", "Llama-3.2-1B", false);
        check("plain/..", &last(&scratch), false);
        check("Llama-3.2-1B-Q4_K_M.gguf", "Llama-3.2-1B-Q4_K_M", false);
        check("m-00001-of-00003.gguf", "m", false);
        check("upper.GGUF", "upper", false);
        check("odd.gguf.gguf", "odd.gguf", false);
        check(&cached, "org/some.Model-1.5", true);
        if cfg!(unix) {
            check("current", "Qwen2.5-7B-Instruct", false);
            check("link.gguf", "Llama-3.2-1B-Q4_K_M", false);
            check(&format!("{cached}/x-1.5-Q8_0.gguf"), "x-1.5-Q8_0", true);
            check("snapshot", "org/some.Model-1.5", true);
        }
        assert_eq!(of(Path::new("/")).name, "model");
        assert_eq!(of(Path::new("no/such/m.gguf")).name, "m");
        fs::remove_dir_all(&scratch).expect("it is there");
    }
}
