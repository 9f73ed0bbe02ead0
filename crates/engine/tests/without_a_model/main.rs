//! The engine's loop without a model or a device.

mod blame;
mod embeddings;
mod faults;
mod memory;
mod mock;
mod overlap;
mod progress;
mod requests;
mod streams;
