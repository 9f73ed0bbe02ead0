//! The OpenAI wire format.

pub mod body;
pub mod types;
pub mod validate;
