//! What a forward pass computes: one decoder for every family, and one short file a family that describes it.
//!
//! The decoder knows no request, no storage format and no device; families hold no forward code.

mod decoder;
mod error;
pub mod families;
mod load;
mod rope;
mod spec;

pub use decoder::{Decoder, DecoderLimits};
pub use error::{Error, Result};
pub use folio_device as device;
pub use spec::*;
