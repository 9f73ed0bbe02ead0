//! How parts lie in a file: a header that follows from key and shapes, then panels and factors of one part after the other.
//!
//! | bytes | what |
//! |---|---|
//! | 16 | `folio packed` and zeros |
//! | 8, 8, 16 | [`LAYOUT_VERSION`], number of parts, key |
//! | 16 | digest of [`PAGES`] pages of what follows the header |
//! | 40 each | of a part: digest of its packing, outputs, inputs, bytes of panels, bytes of factors |
//!
//! All but the digest of pages is known before the file is opened, so that nothing in it is read for a size: a header is
//! equal to the one that is expected, byte for byte, or the file is another's.

use std::ops::Range;

use folio_formats::Digest;

use super::super::weight::PartShape;

/// Raised when a part's packed bytes change for the same shape and source; a test knows those of this version.
pub const LAYOUT_VERSION: u64 = 2;

const MAGIC: &[u8; 16] = b"folio packed\0\0\0\0";
/// Where the digest of pages is.
const DIGEST: Range<usize> = 48..64;
/// Parts begin with a cache line, and with them their factors.
const ALIGN: usize = 64;
const PAGE: usize = 4 << 10;
/// Pages that are looked at: enough to notice a file that was overwritten or not written, at the cost of a few random reads.
const PAGES: usize = 32;

pub struct Layout {
    /// With zeros in place of the digest.
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
        header.resize(DIGEST.end, 0);
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

    /// The header of a file whose pages have that digest.
    pub fn header(&self, digest: u128) -> Vec<u8> {
        let mut header = self.header.clone();
        header[DIGEST].copy_from_slice(&digest.to_le_bytes());
        header
    }

    /// Whether those are the bytes of a file that was written for this.
    pub fn is_of(&self, bytes: &[u8]) -> bool {
        if bytes.len() != self.total {
            return false;
        }
        let mut digest = PageDigest::default();
        // The header first: of a foreign file nothing else is read.
        bytes[..DIGEST.start] == self.header[..DIGEST.start]
            && bytes[DIGEST.end..self.header.len()] == self.header[DIGEST.end..]
            && {
                self.sampled_pages().for_each(|page| digest.add(&bytes[page]));
                bytes[DIGEST] == digest.finish().to_le_bytes()
            }
    }

    /// Pages at equal distances behind the header, the last among them.
    pub fn sampled_pages(&self) -> impl Iterator<Item = Range<usize>> {
        let (first, last) = (self.header.len(), self.total.saturating_sub(PAGE).max(self.header.len()));
        let end = self.total;
        let at = move |page: usize| first + ((last - first) as u128 * page as u128 / (PAGES - 1) as u128) as usize;
        (0..PAGES).map(move |page| at(page)..(at(page) + PAGE).min(end))
    }
}

/// Digest of the pages that are looked at.
pub struct PageDigest(Digest);

impl Default for PageDigest {
    fn default() -> Self {
        Self(Digest::new("pages of packed weights"))
    }
}

impl PageDigest {
    pub fn add(&mut self, page: &[u8]) {
        self.0.update(page);
    }

    pub fn finish(self) -> u128 {
        self.0.finish()
    }
}
