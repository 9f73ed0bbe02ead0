//! Text to tokens and back: tokenizers, chat templates, the incremental detokenizer and stop
//! strings.
//!
//! Everything a model folder or a GGUF file says about text comes through here, and all of it is
//! untrusted: bad input is an [`Error`], never a panic, and templates and regular expressions run
//! under limits. Nothing here reads a file, a clock or the environment, and nothing knows the
//! engine: callers hand in bytes, names and dates.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod config;
mod detokenizer;
mod error;
mod stop;
mod template;
mod tokenizer;
mod translate;

pub use config::TokenizerConfig;
pub use detokenizer::Detokenizer;
pub use error::{Error, Result};
pub use stop::StopMatcher;
pub use template::{ChatRender, ChatTemplate, RESERVED, SpecialTokens, WallTime};
pub use tokenizer::{ControlTokens, GgufVocab, Mark, Tokenizer};
pub use translate::{Translation, Translator};
