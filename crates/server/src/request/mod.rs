//! Requests to a model: every route's fields become the one request that can be run.

mod bounds;
mod chat;
mod generate;
mod openai;
mod prompt;
pub mod sampling;

pub use bounds::{Bounds, ModelNames};
pub use chat::{Conversation, Message};
pub use folio_engine::SamplingDefaults;
pub use generate::{Generate, RawParams, TextOptions, invalid};
pub use openai::{ChatRequest, CompletionRequest, StreamOptions};
pub use prompt::{Prompt, Prompts};
