//! `model.safetensors.index.json`: the shard of each tensor.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::header::Pairs;
use crate::error::shown;
use crate::{Error, Result};

const MAX_INDEX_BYTES: u64 = 100_000_000;

pub(super) struct Index {
    pub path: PathBuf,
    /// Shard file name -> the tensors listed for it. Sorted, so that shards open in their numbered
    /// order.
    pub files: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: Pairs<String>,
}

pub(super) fn read(path: &Path) -> Result<Index> {
    let wrong = |field, problem| Error::Header { path: path.to_owned(), field, problem };
    let io = |source| Error::Io { path: path.to_owned(), source };
    let bytes = std::fs::metadata(path).map_err(io)?.len();
    if bytes > MAX_INDEX_BYTES {
        return Err(wrong("index", format!("{bytes} bytes is more than the {MAX_INDEX_BYTES} allowed")));
    }
    let text = std::fs::read(path).map_err(io)?;
    let raw: RawIndex =
        serde_json::from_slice(&text).map_err(|problem| wrong("index", format!("not as expected: {problem}")))?;
    let mut files = BTreeMap::<String, Vec<String>>::new();
    for (name, file) in raw.weight_map.0 {
        if !is_plain_name(&file) {
            let problem =
                format!("{:?} is listed for tensor {}: not a file of this folder", shown(&file), shown(&name));
            return Err(wrong("weight_map", problem));
        }
        files.entry(file).or_default().push(name);
    }
    if files.is_empty() {
        return Err(wrong("weight_map", "lists no tensor".to_owned()));
    }
    Ok(Index { path: path.to_owned(), files })
}

/// True for the bare name of a file: without a folder, and not leading out of this one.
fn is_plain_name(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == file)
        && !file.contains('\\')
}
