//! Rows' states sorted by their source, as copies to make.

use super::Feature;
use crate::{Result, decoder::check};

/// Pairs of rows (from, to).
#[derive(Default)]
pub(super) struct Sources {
    pub decoder: Vec<(u32, u32)>,
    pub after: Vec<(u32, u32)>,
}

impl Sources {
    pub fn of(features: &[Feature]) -> Self {
        let mut sources = Self::default();
        for (feature, row) in features.iter().zip(0..) {
            match *feature {
                Feature::Decoder(from) => sources.decoder.push((from, row)),
                Feature::After(from) => sources.after.push((from, row)),
            }
        }
        sources
    }

    /// `own`: rows of the head's last step.
    pub fn check(&self, decoders: usize, own: usize) -> Result<()> {
        let end = |pairs: &[(u32, u32)]| pairs.iter().map(|pair| pair.0 as usize + 1).max().unwrap_or(0);
        check::most("the end of the decoder's rows", end(&self.decoder), decoders)?;
        check::most("the end of the head's own rows", end(&self.after), own)
    }
}
