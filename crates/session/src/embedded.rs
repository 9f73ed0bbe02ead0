//! Models in the binary: the default model, the tokenizer that all of the project's models share, a
//! smaller model of the same tokens, and heads; the latter two are for drafting. Without the
//! feature `embedded-model` there are none.

/// A model as files that lie in the binary.
pub struct EmbeddedModel {
    pub name: &'static str,
    pub gguf: &'static [u8],
    /// A compressed tokenizer.json.
    pub tokenizer: &'static [u8],
}

/// The default model.
#[cfg(feature = "embedded-model")]
pub fn model() -> Option<EmbeddedModel> {
    Some(EmbeddedModel {
        name: "folio-rust-42m",
        gguf: include_bytes!("../../../models/folio-rust-42m.gguf"),
        tokenizer: include_bytes!("../../../models/tokenizer.json.lzma"),
    })
}

/// The smaller sibling of that model.
#[cfg(feature = "embedded-model")]
pub fn sibling() -> Option<EmbeddedModel> {
    let gguf = include_bytes!("../../../models/folio-rust-7m.gguf");
    Some(EmbeddedModel { name: "folio-rust-7m", gguf, ..model()? })
}

/// Heads of that model, by kind.
#[cfg(feature = "embedded-model")]
pub fn heads(kind: &str) -> Option<&'static [u8]> {
    match kind {
        "eagle" => Some(include_bytes!("../../../models/folio-rust-42m.eagle.gguf")),
        "medusa" => Some(include_bytes!("../../../models/folio-rust-42m.medusa.gguf")),
        _ => None,
    }
}

#[cfg(not(feature = "embedded-model"))]
pub fn model() -> Option<EmbeddedModel> {
    None
}

#[cfg(not(feature = "embedded-model"))]
pub fn sibling() -> Option<EmbeddedModel> {
    None
}

#[cfg(not(feature = "embedded-model"))]
pub fn heads(_: &str) -> Option<&'static [u8]> {
    None
}
