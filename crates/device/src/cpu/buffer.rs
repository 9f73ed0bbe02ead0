//! Memory for kernels: zeroed, 64-byte aligned, and on huge pages if it is big or one of many
//! buffers that are read in sequence; or a part of a mapped file, read in place.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use folio_formats::Mapped;

#[cfg(target_os = "linux")]
use super::region::{self, HUGE, Region};
use crate::{Error, Result};

/// Alignment: one cache line, which is the width of the widest vector.
const ALIGN: usize = 64;

/// Types whose all-zero bytes are a value and which own nothing.
///
/// # Safety
/// The implementor must be valid for every bit pattern and have no drop glue and no padding.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: plain numbers.
unsafe impl Plain for u8 {}
// SAFETY: plain numbers.
unsafe impl Plain for u16 {}
// SAFETY: plain numbers.
unsafe impl Plain for u32 {}
// SAFETY: plain numbers.
unsafe impl Plain for f32 {}

/// A fixed-size, zero-initialised, aligned array.
pub struct Buffer<T: Plain> {
    ptr: NonNull<T>,
    len: usize,
    origin: Origin,
    values: PhantomData<T>,
}

enum Origin {
    Empty,
    Heap(std::alloc::Layout),
    #[cfg(target_os = "linux")]
    Mapping(#[expect(dead_code, reason = "held, so that it is there")] Arc<Region>),
    /// Part of a file, which is never written to.
    File(#[expect(dead_code, reason = "held, so that it is there")] Arc<Mapped>),
}

// SAFETY: a Buffer owns its memory like a Vec, and T is Send + Sync.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    /// `len` zeros. `what` names the buffer in the error.
    pub fn zeroed(what: &'static str, len: usize) -> Result<Self> {
        let out_of_memory = || Error::OutOfMemory { what, bytes: (len as u64).saturating_mul(size_of::<T>() as u64) };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(out_of_memory)?;
        if bytes == 0 {
            return Ok(Self { ptr: NonNull::dangling(), len, origin: Origin::Empty, values: PhantomData });
        }
        // Buffers of at least a huge page have their own mapping.
        #[cfg(target_os = "linux")]
        if bytes >= HUGE {
            let region = Arc::new(Region::new(bytes).ok_or_else(out_of_memory)?);
            let start = region.start();
            return Ok(Self::mapped(region, start, len));
        }
        let layout = std::alloc::Layout::from_size_align(bytes, ALIGN).map_err(|_| out_of_memory())?;
        // SAFETY: the layout has a size above zero.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        let ptr = NonNull::new(ptr.cast::<T>()).ok_or_else(out_of_memory)?;
        Ok(Self { ptr, len, origin: Origin::Heap(layout), values: PhantomData })
    }

    /// Like [`Buffer::zeroed`], but on huge pages at any size, beside other such buffers: for
    /// memory that stays until all of them are dropped.
    pub fn on_huge_pages(what: &'static str, len: usize) -> Result<Self> {
        #[cfg(target_os = "linux")]
        if let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes > 0) {
            let (region, start) = region::part(bytes, ALIGN).ok_or(Error::OutOfMemory { what, bytes: bytes as u64 })?;
            return Ok(Self::mapped(region, start, len));
        }
        Self::zeroed(what, len)
    }

    /// The contents of these bytes of a file. They are read-only: write access is a bug.
    pub fn in_file(map: &Arc<Mapped>, bytes: Range<usize>) -> Self {
        let bytes = &map.bytes()[bytes];
        // The file stays mapped at this address as long as the buffer holds it.
        let ptr = NonNull::from(bytes).cast::<T>();
        assert!(ptr.is_aligned() && bytes.len().is_multiple_of(size_of::<T>()), "place of a buffer in a file");
        let len = bytes.len() / size_of::<T>();
        Self { ptr, len, origin: Origin::File(Arc::clone(map)), values: PhantomData }
    }

    /// `len` zeros of a region that no other buffer has.
    #[cfg(target_os = "linux")]
    fn mapped(region: Arc<Region>, start: NonNull<u8>, len: usize) -> Self {
        Self { ptr: start.cast(), len, origin: Origin::Mapping(region), values: PhantomData }
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        match self.origin {
            Origin::Empty => {}
            // SAFETY: allocated in `zeroed` with this layout, freed once.
            Origin::Heap(layout) => unsafe { std::alloc::dealloc(self.ptr.as_ptr().cast(), layout) },
            // Unmapped with the last buffer in the mapping.
            #[cfg(target_os = "linux")]
            Origin::Mapping(_) => {}
            Origin::File(_) => {}
        }
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: ptr is aligned and holds len initialised values (zeros at first, or a file's,
        // which stays mapped as long as this lives and is not rewritten in place); Plain allows
        // every bit pattern.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        assert!(!matches!(self.origin, Origin::File(_)), "what lies in a file is not written to");
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive: memory that is not a
        // file's belongs to this buffer alone.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

/// Scratch memory that grows to the largest step and is reused, so that later steps allocate
/// nothing.
pub struct Grown<T: Plain>(Option<Buffer<T>>);

impl<T: Plain> Default for Grown<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: Plain> Grown<T> {
    /// `len` values with any contents.
    /// Bytes of its memory.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |values| size_of_val(&values[..]) as u64)
    }

    pub fn take(&mut self, len: usize) -> &mut [T] {
        if self.0.as_ref().is_none_or(|values| values.len() < len) {
            self.0 = None;
            // An operation of a step cannot fail; activations are small beside the weights already
            // loaded.
            self.0 = Some(Buffer::zeroed("activations", len).expect("memory for activations"));
        }
        self.0.as_mut().map(|values| &mut values[..len]).expect("just made")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zero_aligned_and_writable() {
        let page = 2 << 20;
        let make = [Buffer::<f32>::zeroed, Buffer::<f32>::on_huge_pages];
        for (len, make) in
            [0, 1, 1000, 2 * page / 4, 3 * page / 4 + 5].into_iter().flat_map(|len| make.map(|m| (len, m)))
        {
            let mut buffer = make("test", len).unwrap();
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&value| value == 0.0));
            if let Some(last) = buffer.last_mut() {
                *last = 1.0;
                assert_eq!(buffer.as_ptr() as usize % ALIGN, 0);
            }
        }
    }

    #[test]
    fn a_file_is_read_in_place_and_never_written() {
        let path = std::env::temp_dir().join(format!("folio-buffer-{}", std::process::id()));
        std::fs::write(&path, (0..64u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
        let map = Mapped::open(&path).unwrap();
        let mut buffer = Buffer::<u32>::in_file(&map, 64..128);
        assert!(Buffer::<f32>::in_file(&map, 128..128).is_empty());
        drop(map);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(buffer[..], (16..32).collect::<Vec<u32>>());
        let write = std::panic::AssertUnwindSafe(|| buffer[0] = 1);
        assert!(std::panic::catch_unwind(write).is_err());
    }

    #[test]
    fn scratch_grows_and_stays() {
        let mut scratch = Grown::<u32>::default();
        assert!(scratch.take(0).is_empty());
        let first = scratch.take(100).as_ptr();
        assert_eq!(scratch.take(7).len(), 7);
        assert_eq!(scratch.take(100).as_ptr(), first);
        assert_eq!(scratch.take(101).len(), 101);
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(Buffer::<f32>::zeroed("test", usize::MAX / 2).is_err());
        assert!(Buffer::<f32>::zeroed("test", 1 << 59).is_err());
        assert!(Buffer::<f32>::on_huge_pages("test", usize::MAX / 2).is_err());
        assert!(Buffer::<f32>::on_huge_pages("test", 1 << 59).is_err());
    }
}
