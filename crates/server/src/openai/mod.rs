//! The OpenAI wire types and their translation into engine requests.

pub mod types;
pub mod validate;
