//! What a client may ask of a model: the one request that can be run, made in one place whatever route it came by.

mod bounds;
mod chat;
mod generate;
mod openai;
mod prompt;
pub mod sampling;

pub use bounds::{Bounds, ModelNames, SamplingDefaults};
pub use chat::{Conversation, Message};
pub use generate::{Generate, RawParams, TextOptions, invalid};
pub use openai::{ChatRequest, CompletionRequest, StreamOptions};
pub use prompt::{Prompt, Prompts};
