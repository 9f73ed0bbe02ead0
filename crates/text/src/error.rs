//! The one error type of this crate.

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error, with the file or field that it concerns as far as that is known.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("tokenizer.json: {field}: {reason}")]
    TokenizerJson { field: String, reason: String },
    #[error("tokenizer.ggml.{field}: {reason}")]
    TokenizerGguf { field: &'static str, reason: String },
    #[error("{file}: {field}: expected {expected}, found {found}")]
    Config { file: &'static str, field: String, expected: &'static str, found: String },
    #[error("the tokenizer cannot encode this text: {0}")]
    Encode(String),
    #[error("only {whose} tokenizer itself knows how its tokens join to text")]
    UnusualDecoder { whose: &'static str },
    #[error("{text:?} comes back from {whose} tokenizer as {found:?}")]
    LosesText { whose: &'static str, text: String, found: String },
    #[error("{lost} of {num_tokens} tokens of {whose} vocabulary come back as other text, the first: {first}")]
    LosesVocabulary { lost: usize, num_tokens: usize, whose: &'static str, first: Box<Error> },
    #[error("chat template does not compile: {0}")]
    TemplateSyntax(String),
    #[error("chat template failed: {0}")]
    TemplateRender(String),
    /// The template itself refused the conversation, by `raise_exception`.
    #[error("chat template refused the conversation: {0}")]
    TemplateRefused(String),
    #[error("chat template wrote more than {limit} bytes")]
    TemplateOutput { limit: usize },
}
