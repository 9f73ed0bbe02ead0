//! How parts lie in a file: a header that follows from key and shapes, then panels and factors of one part after the other.
//!
//! | bytes | what |
//! |---|---|
//! | 16 | `folio packed` and zeros |
//! | 8, 8, 16 | [`LAYOUT_VERSION`], number of parts, key |
//! | 16 | digest of [`PAGES`] pages of what follows the header |
//! | 16 | digest of all that follows the header: of the digests of its pieces of [`PIECE`] bytes |
//! | 40 each | of a part: digest of its packing, outputs, inputs, bytes of panels, bytes of factors |
//!
//! All but the digests is known before the file is opened, so that nothing in it is read for a size: a header is
//! equal to the one that is expected, byte for byte, or the file is another's. Pages are looked at when the file is opened, all of it
//! before the first step's results are used.

use std::ops::Range;

use folio_formats::Digest;

use super::super::weight::PartShape;

/// Raised when a part's packed bytes change for the same shape and source, of which a test knows those of this version, and when the
/// header does.
pub const LAYOUT_VERSION: u64 = 3;

const MAGIC: &[u8; 16] = b"folio packed\0\0\0\0";
/// Where the digests are, of pages and of all.
const DIGESTS: Range<usize> = 48..80;
/// Parts begin with a cache line, and with them their factors.
const ALIGN: usize = 64;
const PAGE: usize = 4 << 10;
/// Pages that are looked at: enough to notice a file that was overwritten or not written, at the cost of a few random reads.
const PAGES: usize = 32;
/// Bytes that have a digest of their own, so that several threads can look at a file.
const PIECE: usize = 4 << 20;

pub struct Layout {
    /// With zeros in place of the digests.
    header: Vec<u8>,
    pub parts: Vec<PartPlace>,
    /// Bytes of the file.
    pub total: usize,
}

/// Where a part lies in the file.
#[derive(Clone)]
pub struct PartPlace {
    pub shape: PartShape,
    pub data: Range<usize>,
    pub factors: Range<usize>,
}

impl Layout {
    /// None where no file could be so large.
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

    /// The header of a file that has those digests.
    pub fn header(&self, pages: u128, all: u128) -> Vec<u8> {
        let mut header = self.header.clone();
        header[DIGESTS].copy_from_slice(&digests(pages, all));
        header
    }

    /// The digest of all that was written, if those look like the bytes of a file that was written for this.
    pub fn is_of(&self, bytes: &[u8]) -> Option<u128> {
        let (before, digests, behind) = match bytes.len() == self.total {
            true => (&bytes[..DIGESTS.start], &bytes[DIGESTS], &bytes[DIGESTS.end..self.header.len()]),
            false => return None,
        };
        // The header first: of a foreign file nothing else is read.
        if *before != self.header[..DIGESTS.start] || *behind != self.header[DIGESTS.end..] {
            return None;
        }
        let (pages, all) = digests.split_at(DIGESTS.len() / 2);
        let mut digest = pages_digest();
        self.sampled_pages().for_each(|page| digest.update(&bytes[page]));
        let all = all.try_into().map(u128::from_le_bytes);
        (*pages == digest.finish().to_le_bytes()).then_some(all.ok()?)
    }

    /// All that follows the header, in order.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = Range<usize>> {
        let (first, end) = (self.header.len(), self.total);
        (0..(end - first).div_ceil(PIECE)).map(move |piece| first + piece * PIECE..end.min(first + (piece + 1) * PIECE))
    }

    /// Pages at equal distances behind the header, the last among them.
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

/// To take the pages that are looked at.
pub fn pages_digest() -> Digest {
    Digest::new("pages of packed weights")
}

/// Of all, from the digests of its pieces.
pub fn whole_digest(pieces: impl IntoIterator<Item = u128>) -> u128 {
    let mut digest = Digest::new("packed weights");
    pieces.into_iter().for_each(|piece| digest.update(&piece.to_le_bytes()));
    digest.finish()
}

/// Of one piece.
pub fn piece_digest(bytes: &[u8]) -> u128 {
    let mut digest = Digest::new("piece of packed weights");
    digest.update(bytes);
    digest.finish()
}
