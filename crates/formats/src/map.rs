//! A file's bytes, mapped read-only and shared, or bytes that are in memory already.
//!
//! The only module of this crate with `unsafe` in it.
#![allow(unsafe_code)]

mod fetch;
mod guard;

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use memmap2::Mmap;

use crate::{Error, Result};
use fetch::{Fetcher, Way};
use guard::Watch;

/// Bytes at an address that stays valid as long as the last clone of the `Arc` lives.
#[derive(Debug)]
pub struct Mapped {
    /// Its name in errors.
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    File(OnDisk),
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

#[derive(Debug)]
struct OnDisk {
    /// The watch on the mapping, which must be dropped before it.
    watch: Watch,
    map: Arc<Mmap>,
    file: Arc<File>,
    opened: Stamp,
    fetcher: Option<Fetcher>,
}

/// State that changes when a file is written to: its size and the time of the last write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    len: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(about: &std::fs::Metadata) -> Self {
        Self { len: about.len(), modified: about.modified().ok() }
    }
}

impl Mapped {
    /// Maps a file; a thread prefetches its beginning meanwhile.
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        Self::map(path, |file, map| Fetcher::start(Way::Read(file), map.len()))
    }

    /// Maps a file that will be read whole and many times, on huge pages if the system has them for
    /// files. Nothing is prefetched before [`Mapped::fetch_all`].
    pub fn open_whole(path: &Path) -> Result<Arc<Self>> {
        Self::map(path, |file, map| {
            // A refusal only costs time.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            Fetcher::start(Way::Map(Arc::clone(map), file), map.len())
        })
    }

    fn map(path: &Path, fetch: impl FnOnce(Arc<File>, &Arc<Mmap>) -> Option<Fetcher>) -> Result<Arc<Self>> {
        let wrong = |source| Error::Io { path: path.to_owned(), source };
        // Checked before opening, because opening a pipe waits for a writer.
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
                // SAFETY: the mapping is read-only and private to this value. As with every mapped
                // file, another process that rewrites or truncates the file while it is open breaks
                // the promise. Weight files are replaced by renaming; if one is not, reads do not
                // fault, and `check` reports it.
                let map = Arc::new(unsafe { Mmap::map(&file) }.map_err(wrong)?);
                let (watch, file) = (Watch::new(&map), Arc::new(file));
                let fetcher = fetch(Arc::clone(&file), &map);
                Bytes::File(OnDisk { watch, map, file, opened: Stamp::of(&about), fetcher })
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
            Bytes::File(OnDisk { map, .. }) => map,
            Bytes::Static(bytes) => bytes,
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// Whether all bytes read so far are those that the file had when it was opened: an error if it
    /// was written to or truncated since, or if a page of it could not be read. Files that were
    /// replaced by renaming are unchanged.
    pub fn check(&self) -> Result<()> {
        let Bytes::File(OnDisk { opened, .. }) = &self.bytes else { return Ok(()) };
        let problem = match self.stamp() {
            _ if self.has_failed() => {
                "a part of it cannot be read: it was truncated, or its disk has failed".to_owned()
            }
            Some(now) if now.len != opened.len => format!("it had {} bytes, and has {} now", opened.len, now.len),
            Some(now) if now != *opened => "it was written to".to_owned(),
            Some(_) => return Ok(()),
            None => "it is not there any more".to_owned(),
        };
        Err(Error::Changed { path: self.path.clone(), problem })
    }

    /// Whether some of it could not be read, and was replaced by zeros.
    pub fn has_failed(&self) -> bool {
        matches!(&self.bytes, Bytes::File(file) if file.watch.has_failed())
    }

    /// Whether its path still leads to it, and not to nothing or to a replacement.
    pub fn is_in_place(&self) -> bool {
        let Bytes::File(OnDisk { file, .. }) = &self.bytes else { return false };
        let (own, there) = (file.metadata(), std::fs::metadata(&self.path));
        own.and_then(|own| Ok(is_same(&own, &there?))).unwrap_or(false)
    }

    /// The stamp of the file at present, even if it was moved; none for bytes in memory, and if the
    /// system does not report it.
    pub fn stamp(&self) -> Option<Stamp> {
        let Bytes::File(OnDisk { file, .. }) = &self.bytes else { return None };
        file.metadata().ok().map(|about| Stamp::of(&about))
    }

    /// Prefetches the whole file from front to back, for a reader that does not report its
    /// position.
    pub fn fetch_all(&self) {
        if let Some(fetcher) = self.fetcher() {
            fetcher.fetch_all();
        }
    }

    /// Ends the prefetching.
    pub fn rest(&self) {
        if let Some(fetcher) = self.fetcher() {
            fetcher.end();
        }
    }

    fn fetcher(&self) -> Option<&Fetcher> {
        match &self.bytes {
            Bytes::File(file) => file.fetcher.as_ref(),
            Bytes::Static(_) | Bytes::Owned(_) => None,
        }
    }

    /// Frees the memory of the whole pages inside `range`, which the reader has passed. They may
    /// still be read: the file is then read again.
    pub fn release(&self, range: Range<usize>) {
        let Bytes::File(OnDisk { map, fetcher, .. }) = &self.bytes else { return };
        if let Some(fetcher) = fetcher {
            fetcher.follow(range.end);
        }
        let pages = whole_pages(range, map.len(), page_size());
        if pages.is_empty() {
            return;
        }
        // SAFETY: the range is inside the mapping, which is a file mapped read-only: a dropped page
        // holds nothing that the file does not, so that every `&[u8]` into it reads the same bytes
        // afterwards.
        let advised =
            unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, pages.start, pages.len()) };
        // A refusal only costs memory.
        let _ = advised;
    }
}

#[cfg(unix)]
fn is_same(one: &std::fs::Metadata, other: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

#[cfg(not(unix))]
fn is_same(one: &std::fs::Metadata, other: &std::fs::Metadata) -> bool {
    Stamp::of(one) == Stamp::of(other)
}

fn whole_pages(range: Range<usize>, len: usize, page: usize) -> Range<usize> {
    let start = range.start.next_multiple_of(page);
    // The mapping's last page is whole even if the file ends inside it.
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
    use folio_testing::Folder;

    use super::*;

    #[test]
    fn released_pages_read_the_same_again() {
        let folder = Folder::new("map");
        let content: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        let path = folder.write("file", &content);
        let map = Mapped::open(&path).unwrap();
        assert_eq!(map.bytes(), content);
        assert_eq!(Mapped::open_whole(&path).unwrap().bytes(), content);
        map.release(10..90_000);
        map.release(90_000..100_000);
        map.release(5..5);
        assert_eq!(map.bytes(), content);
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
        let folder = Folder::new("map-empty");
        let path = folder.write("file", "");
        assert!(Mapped::open(&path).unwrap().bytes().is_empty());
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Mapped::open(&path), Err(Error::Io { .. })));
        let refusal = Mapped::open(&folder).unwrap_err().to_string();
        assert!(refusal.contains("expected a file"), "{refusal}");
    }
}
