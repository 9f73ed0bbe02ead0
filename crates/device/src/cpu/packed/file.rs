//! A file of packed weights, mapped and found to be the one that is wanted.

use std::sync::Arc;

use folio_formats::Mapped;

use super::super::buffer::Buffer;
use super::super::weight::PartShape;
use super::PartMemory;
use super::layout::Layout;

pub struct PackedFile {
    map: Arc<Mapped>,
    layout: Layout,
}

impl PackedFile {
    /// None where the file is not of this key and these shapes, is cut off, or has other pages than were written.
    pub fn new(map: Arc<Mapped>, key: u128, shapes: &[PartShape]) -> Option<Self> {
        let layout = Layout::new(key, shapes)?;
        layout.is_of(map.bytes()).then_some(Self { map, layout })
    }

    /// Part `index`, which is of that shape.
    pub(super) fn part(&self, index: usize, shape: PartShape) -> PartMemory {
        let place = &self.layout.parts[index];
        assert_eq!(place.shape, shape, "part {index} of a packed file");
        PartMemory {
            data: Arc::new(Buffer::in_file(&self.map, place.data.clone())),
            factors: Arc::new(Buffer::in_file(&self.map, place.factors.clone())),
        }
    }
}
