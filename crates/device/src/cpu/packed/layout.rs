//! Layout of a file of packed weights: a header that follows from key and shapes, then panels and
//! factors of one part after the other.
//!
//! | bytes | content |
//! |---|---|
//! | 16 | `folio packed` and zeros |
//! | 8, 8, 16 | [`LAYOUT_VERSION`], number of parts, key |
//! | 16 | digest of [`PAGES`] pages behind the header |
//! | 16 | digest of all bytes behind the header: of the digests of its pieces of [`PIECE`] bytes |
//! | 40 a part | digest of its packing, outputs, inputs, bytes of panels, bytes of factors |
//!
//! Everything but the digests is known before the file is opened, so no size is ever read from the
//! file: a header equals the expected one, byte for byte, or the file belongs to another model.
//! Sampled pages are compared when the file is opened, the whole file before the first step's
//! results are used.

use std::ops::Range;

use folio_formats::Digest;

use super::super::weight::PartShape;

/// Raised when the header changes, or when a part's packed bytes change for the same shape and
/// source; a test has the packed bytes of this version.
pub const LAYOUT_VERSION: u64 = 3;

const MAGIC: &[u8; 16] = b"folio packed\0\0\0\0";
/// Position of the two digests: of pages and of the whole file.
const DIGESTS: Range<usize> = 48..80;
/// Parts, and their factors, begin at a cache line.
const ALIGN: usize = 64;
const PAGE: usize = 4 << 10;
/// Number of sampled pages: enough to notice a file that was overwritten or not written, at the
/// cost of a few random reads.
const PAGES: usize = 32;
/// Bytes with a digest of their own, so that several threads can verify a file.
const PIECE: usize = 4 << 20;

pub struct Layout {
    /// The header, with zeros in place of the digests.
    header: Vec<u8>,
    pub parts: Vec<PartPlace>,
    /// Length of the file in bytes.
    pub total: usize,
}

/// Position of a part in the file.
#[derive(Clone)]
pub struct PartPlace {
    pub shape: PartShape,
    pub data: Range<usize>,
    pub factors: Range<usize>,
}

impl Layout {
    /// None if no file could be this large.
    pub fn new(key: u128, shapes: &[PartShape]) -> Option<Self> {
        let mut header = MAGIC.to_vec();
        header.extend(LAYOUT_VERSION.to_le_bytes());
        header.extend((shapes.len() as u64).to_le_bytes());
        header.extend(key.to_le_bytes());
        header.resize(DIGESTS.end, 0);
        for shape in shapes {
            let mut packing = Digest::new("packing");
            packing.field(format!("{:?}", shape.packing).as_bytes());
            let factors = shape.num_factors() * size_of::<f32>();
            let sizes = [shape.outputs, shape.inputs, shape.data_bytes(), factors];
            header.extend((packing.finish() as u64).to_le_bytes());
            header.extend(sizes.into_iter().flat_map(|size| (size as u64).to_le_bytes()));
        }
        let mut end = header.len();
        let mut place = |bytes: usize| {
            let start = end.checked_next_multiple_of(ALIGN)?;
            end = start.checked_add(bytes)?;
            Some(start..end)
        };
        let part = |&shape: &PartShape| {
            let data = place(shape.data_bytes())?;
            Some(PartPlace { shape, data, factors: place(shape.num_factors() * size_of::<f32>())? })
        };
        let parts = shapes.iter().map(part).collect::<Option<Vec<_>>>()?;
        Some(Self { header, parts, total: end })
    }

    /// The header of a file with these digests.
    pub fn header(&self, pages: u128, all: u128) -> Vec<u8> {
        let mut header = self.header.clone();
        header[DIGESTS].copy_from_slice(&digests(pages, all));
        header
    }

    /// The digest of the whole file as written, if header and sampled pages are as expected.
    pub fn is_of(&self, bytes: &[u8]) -> Option<u128> {
        let (before, digests, behind) = match bytes.len() == self.total {
            true => (&bytes[..DIGESTS.start], &bytes[DIGESTS], &bytes[DIGESTS.end..self.header.len()]),
            false => return None,
        };
        // The header is compared first: nothing else is read from a foreign file.
        if *before != self.header[..DIGESTS.start] || *behind != self.header[DIGESTS.end..] {
            return None;
        }
        let (pages, all) = digests.split_at(DIGESTS.len() / 2);
        let mut digest = pages_digest();
        self.sampled_pages().for_each(|page| digest.update(&bytes[page]));
        let all = all.try_into().map(u128::from_le_bytes);
        (*pages == digest.finish().to_le_bytes()).then_some(all.ok()?)
    }

    /// Pieces of the file behind the header, in order.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = Range<usize>> {
        let (first, end) = (self.header.len(), self.total);
        (0..(end - first).div_ceil(PIECE)).map(move |piece| first + piece * PIECE..end.min(first + (piece + 1) * PIECE))
    }

    /// Pages at equal distances behind the header, the last page among them.
    pub fn sampled_pages(&self) -> impl Iterator<Item = Range<usize>> {
        let (first, last) = (self.header.len(), self.total.saturating_sub(PAGE).max(self.header.len()));
        let end = self.total;
        let at = move |page: usize| first + ((last - first) as u128 * page as u128 / (PAGES - 1) as u128) as usize;
        (0..PAGES).map(move |page| at(page)..(at(page) + PAGE).min(end))
    }
}

fn digests(pages: u128, all: u128) -> [u8; DIGESTS.end - DIGESTS.start] {
    let mut bytes = [0; DIGESTS.end - DIGESTS.start];
    let (first, second) = bytes.split_at_mut(DIGESTS.len() / 2);
    first.copy_from_slice(&pages.to_le_bytes());
    second.copy_from_slice(&all.to_le_bytes());
    bytes
}

/// A digest for the sampled pages.
pub fn pages_digest() -> Digest {
    Digest::new("pages of packed weights")
}

/// Digest of the whole file, from the digests of its pieces.
pub fn whole_digest(pieces: impl IntoIterator<Item = u128>) -> u128 {
    let mut digest = Digest::new("packed weights");
    pieces.into_iter().for_each(|piece| digest.update(&piece.to_le_bytes()));
    digest.finish()
}

/// Digest of one piece.
pub fn piece_digest(bytes: &[u8]) -> u128 {
    let mut digest = Digest::new("piece of packed weights");
    digest.update(bytes);
    digest.finish()
}
