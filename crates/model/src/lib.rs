//! Describes and runs forward passes: one decoder for every family, and one short file per family
//! that describes it.
//!
//! The decoder does not depend on requests, storage formats or devices; families hold no forward
//! code.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod activations;
mod at_load;
mod attention;
mod config;
mod decoder;
mod dummy;
mod error;
mod experts;
pub mod families;
mod ffn;
mod fingerprint;
mod gguf;
pub mod heads;
mod linear;
mod load;
mod memory;
mod names;
mod open;
mod overrides;
mod rope;
mod sites;
mod spec;

pub use at_load::AtLoad;
pub use config::Config;
pub use decoder::{Decoder, DecoderLimits, Stage, Tap};
pub use error::{Error, Result};
pub use fingerprint::{Fingerprint, file_stamp};
pub use folio_formats::Digest;
pub use load::LoadProgress;
pub use memory::{MemoryUse, Parameters, activation_bytes, kv_bytes, parameters, weight_bytes};
pub use names::Names;
pub use open::{OpenModel, open, open_with, open_without_weights};
pub use overrides::{Overrides, Wanted};
pub use sites::{LayerSites, Site, SiteKind, StoredLinear};
pub use spec::*;
