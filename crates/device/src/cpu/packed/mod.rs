//! Packed weights that outlive the process: kept in a file beside the model and mapped at the next start, which then
//! neither packs nor takes memory for them.
//!
//! A file that turns out to be damaged, at the first look or later, is one that [`PackedFile::check`] refuses: whoever runs the model then
//! loads it again, from its own weights.
//!
//! A decoder's parts are packed in an order that its shapes decide, so a file is the parts one after the other behind a
//! header that says what they are ([`layout`]). [`Supply`] stands between who packs and memory: it has a part packed, or
//! takes it from the file. Which file belongs to which model is for the caller to say, by a key.

mod file;
mod layout;
#[cfg(test)]
mod tests;
mod write;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use file::PackedFile;
pub use layout::LAYOUT_VERSION;
pub use write::{PackedPlace, PackedWriter};

use super::buffer::Buffer;
use super::weight::PartShape;
use crate::Result;

/// Where the weights of one model come from, as a [`Cpu`](super::Cpu) is told before it loads them.
#[derive(Clone)]
pub enum Packed {
    /// Out of a file that holds them already.
    File(Arc<PackedFile>),
    /// Packed, and shared with whoever will write them.
    Shared(PackedParts),
}

/// The parts that the last load has packed, in order, until they are taken; then those of later loads are not shared.
#[derive(Clone)]
pub struct PackedParts(Arc<Mutex<Option<Parts>>>);

type Parts = Vec<(PartShape, PartMemory)>;

impl Default for PackedParts {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Some(Vec::new()))))
    }
}

impl PackedParts {
    pub fn shapes(&self) -> Vec<PartShape> {
        self.lock().iter().flatten().map(|(shape, _)| *shape).collect()
    }

    /// All of them, once.
    fn take(&self) -> Parts {
        self.lock().take().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Parts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a part consists of; nobody writes to it once it is made.
#[derive(Clone)]
pub(crate) struct PartMemory {
    pub data: Arc<Buffer<u8>>,
    pub factors: Arc<Buffer<f32>>,
}

/// Gives parts their memory, one after the other.
pub(crate) enum Supply {
    Fresh,
    File { file: Arc<PackedFile>, next: usize },
    Shared(PackedParts),
}

impl Supply {
    pub fn new(packed: &Packed) -> Self {
        match packed {
            Packed::File(file) => Supply::File { file: Arc::clone(file), next: 0 },
            Packed::Shared(parts) => match &mut *parts.lock() {
                None => Supply::Fresh,
                Some(earlier) => {
                    // Of a load before this, whose model has failed.
                    earlier.clear();
                    Supply::Shared(parts.clone())
                }
            },
        }
    }

    /// Whether parts are packed at all.
    pub fn packs(&self) -> bool {
        !matches!(self, Supply::File { .. })
    }

    /// The next part, of zeros that `pack` fills in unless it is there already.
    pub fn part(&mut self, shape: PartShape, pack: impl FnOnce(&mut [u8], &mut [f32])) -> Result<PartMemory> {
        if let Supply::File { file, next } = self {
            *next += 1;
            return Ok(file.part(*next - 1, shape));
        }
        let mut data = Buffer::on_huge_pages("a weight", shape.data_bytes())?;
        let mut factors = Buffer::zeroed("a weight's factors", shape.num_factors())?;
        pack(&mut data, &mut factors);
        let part = PartMemory { data: Arc::new(data), factors: Arc::new(factors) };
        if let Supply::Shared(parts) = self
            && let Some(parts) = &mut *parts.lock()
        {
            parts.push((shape, part.clone()));
        }
        Ok(part)
    }
}
