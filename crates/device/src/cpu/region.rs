//! Mappings on huge pages, and many buffers in one of them.
//!
//! A kernel that streams through a matrix needs huge pages: on small ones it spends a fifth of its
//! time on address translation, and hardware prefetches end with the page. Most matrices of a small
//! model are smaller than a huge page, so weights lie side by side in mappings of [`REGION`] bytes.
//! A mapping is freed with its last buffer.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Bytes of a huge page.
pub const HUGE: usize = 2 << 20;
/// Bytes that buffers share. Untouched memory costs nothing.
const REGION: usize = 16 * HUGE;

/// Zeroed memory from the system that begins with a huge page.
pub struct Region {
    base: *mut libc::c_void,
    total: usize,
    start: NonNull<u8>,
}

// SAFETY: the region owns its mapping, and every buffer keeps to its own part.
unsafe impl Send for Region {}
// SAFETY: as above; the region's own fields never change.
unsafe impl Sync for Region {}

impl Region {
    /// A region of at least `bytes` bytes, if the system has the memory.
    pub fn new(bytes: usize) -> Option<Self> {
        // One huge page more than requested, so that the start can be aligned to a huge page;
        // untouched pages cost nothing.
        let total = bytes.checked_add(HUGE)?;
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no
        // existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                total,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let skip = (base as usize).next_multiple_of(HUGE) - base as usize;
        // SAFETY: skip < HUGE, so start .. start + bytes is inside the mapping.
        let start = unsafe { base.cast::<u8>().add(skip) };
        // Advice only: a system without huge pages refuses, and small ones work too.
        // SAFETY: the range is inside the mapping made above, and advice does not change its
        // contents.
        unsafe { libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE) };
        Some(Self { base, total, start: NonNull::new(start)? })
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` at this address and length, unmapped once.
        unsafe { libc::munmap(self.base, self.total) };
    }
}

/// The region that is being filled, and its used bytes.
static OPEN: Mutex<(Weak<Region>, usize)> = Mutex::new((Weak::new(), 0));

/// `bytes` zeros that no other buffer has, at a multiple of `align`, a power of two that is at most
/// a huge page.
pub fn part(bytes: usize, align: usize) -> Option<(Arc<Region>, NonNull<u8>)> {
    if bytes > REGION / 2 {
        let region = Arc::new(Region::new(bytes)?);
        let start = region.start();
        return Some((region, start));
    }
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let at = open.1.next_multiple_of(align);
    let (region, at) = match open.0.upgrade().filter(|_| at + bytes <= REGION) {
        Some(region) => (region, at),
        None => (Arc::new(Region::new(REGION)?), 0),
    };
    *open = (Arc::downgrade(&region), at + bytes);
    // SAFETY: at + bytes <= REGION, the size of the region.
    let start = unsafe { region.start().add(at) };
    Some((region, start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zero_and_apart() {
        let sizes = [1, 64, 100, REGION / 2, REGION / 2 + 1, 5000, REGION / 2, 1 << 20, REGION / 2, 3];
        let parts: Vec<_> = sizes.iter().map(|&bytes| (part(bytes, 64).unwrap(), bytes)).collect();
        for (index, ((_, start), bytes)) in parts.iter().enumerate() {
            assert_eq!(start.as_ptr() as usize % 64, 0);
            // SAFETY: this test alone has the part, which has the requested length.
            let bytes = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), *bytes) };
            assert!(bytes.iter().all(|&byte| byte == 0), "part {index} was written to");
            bytes.fill(index as u8 + 1);
        }
    }

    #[test]
    fn a_part_outlives_its_neighbours() {
        let (first, second) = (part(1000, 64).unwrap(), part(1000, 64).unwrap());
        drop(first);
        // SAFETY: the region lives as long as one of its parts.
        unsafe { second.1.write(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { second.1.read() }, 7);
    }
}
