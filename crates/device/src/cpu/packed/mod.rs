//! Packed weights that outlive the process: a file beside the model holds them and is mapped at the
//! next start, which then neither packs nor allocates memory for them.
//!
//! If a file turns out to be damaged, at opening or later, [`PackedFile::check`] fails, and the
//! owner of the model loads it again from its own weights.
//!
//! A decoder's parts are packed in an order that its shapes decide, so a file is one part after the
//! other behind a header that describes them ([`layout`]). [`Supply`] gives a part its memory: it
//! has the part packed, or takes it from the file. The caller decides by a key which file belongs
//! to which model.

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

/// Source of one model's packed weights. A [`Cpu`](super::Cpu) gets it before it loads the weights.
#[derive(Clone)]
pub enum Packed {
    /// A file that holds them already.
    File(Arc<PackedFile>),
    /// The weights are packed at load, and shared with a later writer.
    Shared(PackedParts),
}

/// The parts that the last load packed, in order, until they are taken; parts of later loads are
/// not shared then.
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

    /// Takes all parts; later calls find none.
    fn take(&self) -> Parts {
        self.lock().take().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Parts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of a part; it is read-only once it is packed.
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
                    // Parts of an earlier load that failed.
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

    /// The next part. Unless it exists already, its memory is zeros that `pack` fills in.
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
