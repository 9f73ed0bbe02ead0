//! Environment variables of the Hugging Face hub and of caches. Flags with a variable of their own
//! are read where clap reads them.

use std::path::PathBuf;

use folio_session::{Folders, Options};

/// Options of a model that no flag changes.
pub fn options() -> Options {
    Options { folders: folders(), ..Options::default() }
}

/// Folders that the environment names.
pub fn folders() -> Folders {
    Folders { hub: hub_cache(), cache: Some(cache_folder()) }
}

/// Cache of the hub: below `HF_HOME`, else below the user's home folder.
pub fn hub_cache() -> Option<PathBuf> {
    let home = std::env::var("HF_HOME").ok().map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cache").join("huggingface")));
    home.map(|home| home.join("hub"))
}

/// Token for private models on the hub.
pub fn hub_token() -> Option<String> {
    std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty())
}

/// Address of the hub, if it is another one.
pub fn hub_endpoint() -> Option<String> {
    std::env::var("HF_ENDPOINT").ok()
}

/// Whether downloads are forbidden.
pub fn is_offline() -> bool {
    ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]
        .iter()
        .any(|name| std::env::var(name).is_ok_and(|value| !matches!(value.as_str(), "" | "0" | "false" | "no")))
}

/// Folder of files that can be made again.
pub fn cache_folder() -> PathBuf {
    let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
    cache.unwrap_or_else(std::env::temp_dir).join("folio")
}
