//! Errors of weight files, with the file and the field at fault.

use std::path::PathBuf;

use crate::Format;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },

    /// The file changed, so the bytes read from it cannot be relied on.
    #[error("{} was changed while it was read: {problem}; start again when it is whole", path.display())]
    Changed { path: PathBuf, problem: String },

    /// A part of the file that is neither a metadata value nor a tensor: magic, counts, header
    /// length, index.
    #[error("{}: {field}: {problem}", path.display())]
    Header { path: PathBuf, field: &'static str, problem: String },

    #[error("{}: metadata key {key}: {problem}", path.display())]
    Metadata { path: PathBuf, key: String, problem: String },

    #[error("{}: tensor {name}: {problem}", path.display())]
    Tensor { path: PathBuf, name: String, problem: String },

    #[error("{}: tensor {name} is stored as {dtype}, which folio does not read", path.display())]
    Unsupported { path: PathBuf, name: String, dtype: String },

    #[error("{place}: no tensor named {name}")]
    MissingTensor { place: String, name: String },

    #[error("{format} stores values in blocks of {block}, but {values} is not a multiple of {block}")]
    PartialBlock { format: Format, block: usize, values: u64 },

    #[error("{values} values of {format} need more bytes than 64 bits can count")]
    TooManyValues { format: Format, values: u64 },

    #[error("a row of {cols} values in {format} needs {expected} bytes, but this one has {found}")]
    RowSize { format: Format, cols: usize, expected: u64, found: u64 },

    #[error("cannot stack matrices: none were given")]
    EmptyStack,

    #[error("cannot stack matrices: the first has {expected} columns, another has {found}")]
    StackWidth { expected: usize, found: usize },

    #[error("quantization_config.{field} {problem}")]
    Scheme { field: String, problem: String },

    #[error("tensor {name} {problem}")]
    Packed { name: String, problem: String },

    #[error("codes and scales do not fit together: {problem}")]
    Grouped { problem: String },

    #[error("folio has no encoder for {format}")]
    NoEncoder { format: Format },
}

/// A name from a file, shortened and escaped for one line of an error message.
pub(crate) fn shown(name: &str) -> String {
    const LONGEST: usize = 80;
    let mut text: String = name.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if name.chars().nth(LONGEST).is_some() {
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn odd_names_stay_on_one_short_line() {
        assert_eq!(shown("blk.0.attn_q.weight"), "blk.0.attn_q.weight");
        assert_eq!(shown("a\nb\0"), "a\\nb\\0");
        assert_eq!(shown(&"x".repeat(100)), format!("{}...", "x".repeat(80)));
    }
}
