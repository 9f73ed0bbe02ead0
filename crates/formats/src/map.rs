//! A file's bytes, mapped read-only and shared, or bytes that are in memory already.
//!
//! The only module of this crate with `unsafe` in it.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{Advice, Mmap};

use crate::{Error, Result};

/// How far a file is fetched ahead of what is read: by itself the system fetches little more than what somebody waits for.
/// Enough that a disk is never without a request, little enough that a model of many files does not ask for all at once.
const AHEAD: usize = 32 << 20;

/// Bytes that stay put for as long as the last clone of the `Arc` lives.
#[derive(Debug)]
pub struct Mapped {
    /// What errors call it.
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    File {
        map: Mmap,
        /// Where that ends which the system was last asked to fetch.
        fetched: AtomicUsize,
    },
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

impl Mapped {
    /// Maps a file, whose beginning is fetched meanwhile.
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        let wrong = |source| Error::Io { path: path.to_owned(), source };
        // Asked before it is opened: opening a pipe waits for a writer.
        if !std::fs::metadata(path).map_err(wrong)?.is_file() {
            let problem = "expected a file, found a folder, a pipe or a device".to_owned();
            return Err(Error::Header { path: path.to_owned(), field: "file", problem });
        }
        let file = File::open(path).map_err(wrong)?;
        let about = file.metadata().map_err(wrong)?;
        let bytes = match about.len() {
            // An empty range cannot be mapped.
            0 => Bytes::Static(&[]),
            // SAFETY: the mapping is read-only and private to this value. As with every mapped file, another process
            // that rewrites or truncates the file while it is open breaks the promise; weight files are replaced by
            // renaming, never rewritten in place.
            _ => Bytes::File { map: unsafe { Mmap::map(&file) }.map_err(wrong)?, fetched: AtomicUsize::new(0) },
        };
        let mapped = Self { path: path.to_owned(), bytes };
        mapped.fetch_behind(0);
        Ok(Arc::new(mapped))
    }

    /// Bytes that are part of the program; `name` stands in for a path in errors.
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Arc<Self> {
        Arc::new(Self { path: PathBuf::from(name), bytes: Bytes::Static(bytes) })
    }

    /// Bytes made in memory, by a test or a download.
    pub fn from_vec(name: &str, bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { path: PathBuf::from(name), bytes: Bytes::Owned(bytes) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::File { map, .. } => map,
            Bytes::Static(bytes) => bytes,
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// Has the system fetch what lies behind `at`, without waiting for it.
    fn fetch_behind(&self, at: usize) {
        let Bytes::File { map, fetched } = &self.bytes else { return };
        // Two threads may ask twice.
        let range = still_to_fetch(at, fetched.load(Ordering::Relaxed), map.len());
        if !range.is_empty() {
            // A refusal costs time, nothing else.
            let _ = map.advise_range(Advice::WillNeed, range.start, range.len());
            fetched.store(range.end, Ordering::Relaxed);
        }
    }

    /// Gives back the memory of the whole pages inside `range`, as something further on is next. They may still be read: the
    /// file is then read again.
    pub fn release(&self, range: Range<usize>) {
        self.fetch_behind(range.end);
        let Bytes::File { map, .. } = &self.bytes else { return };
        let pages = whole_pages(range, map.len(), page_size());
        if pages.is_empty() {
            return;
        }
        // SAFETY: the range lies inside the mapping, which is a file mapped read-only: a dropped page holds nothing
        // that the file does not, so that every `&[u8]` into it reads the same bytes afterwards.
        let advised =
            unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, pages.start, pages.len()) };
        // A refusal only costs memory.
        let _ = advised;
    }
}

/// What to fetch of a file of `len` bytes when what comes next lies at `at`, and was fetched up to `fetched`. Files are mostly
/// gone through from front to back; far from there it starts anew.
fn still_to_fetch(at: usize, fetched: usize, len: usize) -> Range<usize> {
    let end = len.min(at.saturating_add(AHEAD));
    let start = if (at..=end.saturating_add(AHEAD)).contains(&fetched) { fetched } else { at };
    start.min(end)..end
}

fn whole_pages(range: Range<usize>, len: usize, page: usize) -> Range<usize> {
    let start = range.start.next_multiple_of(page);
    // The mapping's last page is whole even where the file ends inside it.
    let end = if range.end >= len { len } else { range.end / page * page };
    start..end.max(start)
}

fn page_size() -> usize {
    // SAFETY: `sysconf` only reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_pages_read_the_same_again() {
        let path = std::env::temp_dir().join(format!("folio-map-{}", std::process::id()));
        let content: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let map = Mapped::open(&path).unwrap();
        assert_eq!(map.bytes(), content);
        map.release(10..90_000);
        map.release(90_000..100_000);
        map.release(5..5);
        assert_eq!(map.bytes(), content);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn only_whole_pages_are_released() {
        let check = |range: Range<usize>, expect: Range<usize>| {
            assert_eq!(whole_pages(range.clone(), 100, 16), expect, "{range:?}");
        };
        check(0..32, 0..32);
        check(1..32, 16..32);
        check(1..15, 16..16);
        check(17..47, 32..32);
        check(17..100, 32..100);
        check(98..100, 112..112);
    }

    #[test]
    fn a_file_is_fetched_ahead_of_its_reader() {
        let check = |at: usize, fetched: usize, expect: Range<usize>| {
            assert_eq!(still_to_fetch(at, fetched, 10 * AHEAD), expect, "at {at}, up to {fetched}");
        };
        check(0, 0, 0..AHEAD);
        check(5, AHEAD, AHEAD..AHEAD + 5);
        // A little back, and far.
        check(5, AHEAD + 9, AHEAD + 5..AHEAD + 5);
        check(5, 7 * AHEAD, 5..AHEAD + 5);
        check(4 * AHEAD, AHEAD, 4 * AHEAD..5 * AHEAD);
        check(9 * AHEAD + 7, 10 * AHEAD - 1, 10 * AHEAD - 1..10 * AHEAD);
        check(10 * AHEAD, 10 * AHEAD, 10 * AHEAD..10 * AHEAD);
    }

    #[test]
    fn empty_missing_and_folder() {
        let path = std::env::temp_dir().join(format!("folio-map-empty-{}", std::process::id()));
        std::fs::write(&path, b"").unwrap();
        assert!(Mapped::open(&path).unwrap().bytes().is_empty());
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Mapped::open(&path), Err(Error::Io { .. })));
        let folder = Mapped::open(&std::env::temp_dir()).unwrap_err().to_string();
        assert!(folder.contains("expected a file"), "{folder}");
    }
}
