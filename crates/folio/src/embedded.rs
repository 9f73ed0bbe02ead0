//! The model inside the binary: weights, and the tokenizer that all of the project's models share.

/// What `folio run` uses when no model is named.
pub struct EmbeddedModel {
    pub name: &'static str,
    pub gguf: &'static [u8],
    /// A compressed tokenizer.json.
    pub tokenizer: &'static [u8],
}

#[cfg(feature = "embedded-model")]
pub fn model() -> Option<EmbeddedModel> {
    Some(EmbeddedModel {
        name: "folio-rust-42m",
        gguf: include_bytes!("../../../models/folio-rust-42m.gguf"),
        tokenizer: include_bytes!("../../../models/tokenizer.json.lzma"),
    })
}

/// Heads of that model, by kind.
#[cfg(feature = "embedded-model")]
pub fn heads(_kind: &str) -> Option<&'static [u8]> {
    None
}

#[cfg(not(feature = "embedded-model"))]
pub fn heads(_: &str) -> Option<&'static [u8]> {
    None
}

#[cfg(not(feature = "embedded-model"))]
pub fn model() -> Option<EmbeddedModel> {
    None
}
