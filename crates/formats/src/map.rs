//! A file's bytes, mapped read-only and shared, or bytes that are in memory already.
//!
//! The only module of this crate with `unsafe` in it.
#![allow(unsafe_code)]

mod fetch;

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::{Error, Result};
use fetch::{Fetcher, Way};

/// Bytes that stay put for as long as the last clone of the `Arc` lives.
#[derive(Debug)]
pub struct Mapped {
    /// What errors call it.
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    File { map: Arc<Mmap>, fetcher: Option<Fetcher> },
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

impl Mapped {
    /// Maps a file, whose beginning is fetched meanwhile.
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        Self::map(path, |file, map| Fetcher::start(Way::Read(file), map.len()))
    }

    /// Maps a file of which all will be read many times, on huge pages where the system has them for files. Nothing is fetched
    /// before [`Mapped::fetch_all`].
    pub fn open_whole(path: &Path) -> Result<Arc<Self>> {
        Self::map(path, |file, map| {
            // A refusal costs time alone.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            Fetcher::start(Way::Map(Arc::clone(map), file), map.len())
        })
    }

    fn map(path: &Path, fetch: impl FnOnce(File, &Arc<Mmap>) -> Option<Fetcher>) -> Result<Arc<Self>> {
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
            _ => {
                // SAFETY: the mapping is read-only and private to this value. As with every mapped file, another process
                // that rewrites or truncates the file while it is open breaks the promise; weight files are replaced by
                // renaming, never rewritten in place.
                let map = Arc::new(unsafe { Mmap::map(&file) }.map_err(wrong)?);
                let fetcher = fetch(file, &map);
                Bytes::File { map, fetcher }
            }
        };
        Ok(Arc::new(Self { path: path.to_owned(), bytes }))
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

    /// Has all of it fetched, from front to back, for somebody who tells nobody how far he is.
    pub fn fetch_all(&self) {
        if let Some(fetcher) = self.fetcher() {
            fetcher.fetch_all();
        }
    }

    /// Has no more of it fetched.
    pub fn rest(&self) {
        if let Some(fetcher) = self.fetcher() {
            fetcher.end();
        }
    }

    fn fetcher(&self) -> Option<&Fetcher> {
        match &self.bytes {
            Bytes::File { fetcher, .. } => fetcher.as_ref(),
            Bytes::Static(_) | Bytes::Owned(_) => None,
        }
    }

    /// Gives back the memory of the whole pages inside `range`, as something further on is next. They may still be read: the
    /// file is then read again.
    pub fn release(&self, range: Range<usize>) {
        let Bytes::File { map, fetcher } = &self.bytes else { return };
        if let Some(fetcher) = fetcher {
            fetcher.follow(range.end);
        }
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
        assert_eq!(Mapped::open_whole(&path).unwrap().bytes(), content);
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
