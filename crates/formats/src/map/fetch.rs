//! A thread that prefetches a file's pages ahead of their reader. It reads the file itself, because
//! the system reads far ahead for such a reader, with few large requests, and only little ahead for
//! a reader that touches mapped pages. For a mapping on huge pages the thread maps the pages
//! instead, because reading a file brings it in on smaller ones.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;

use memmap2::Mmap;

/// Distance of the prefetch: far enough that a disk has work while other threads compute. It is
/// shorter before the first read, because a model may have many files.
const AHEAD: usize = 256 << 20;
const BEGINNING: usize = 128 << 20;

/// Bytes that the thread reads at a time.
const PIECE: usize = 1 << 20;

/// The way in which pages are prefetched.
pub(super) enum Way {
    Read(Arc<File>),
    /// Through the mapping or, if that is not possible, by reading the file.
    Map(Arc<Mmap>, Arc<File>),
}

/// The thread's handle in the reader. The thread ends when it is dropped.
#[derive(Debug)]
pub(super) struct Fetcher {
    shared: Arc<Shared>,
    thread: Thread,
}

#[derive(Debug)]
struct Shared {
    /// Position of the reader.
    at: AtomicUsize,
    ahead: AtomicUsize,
    is_over: AtomicBool,
}

impl Fetcher {
    /// Starts to prefetch `len` bytes; none if no thread can be started, which only costs time.
    pub fn start(way: Way, len: usize) -> Option<Self> {
        let shared = Arc::new(Shared {
            at: AtomicUsize::new(0),
            ahead: AtomicUsize::new(if matches!(way, Way::Read(_)) { BEGINNING } else { 0 }),
            is_over: AtomicBool::new(false),
        });
        let theirs = Arc::clone(&shared);
        let body = move || theirs.fetch(&way, len);
        let handle = std::thread::Builder::new().name("folio-fetch".into()).spawn(body).ok()?;
        Some(Self { shared, thread: handle.thread().clone() })
    }

    /// Requests the whole file, however little was read so far.
    pub fn fetch_all(&self) {
        self.shared.ahead.store(usize::MAX, Ordering::Relaxed);
        self.thread.unpark();
    }

    /// Ends the prefetching.
    pub fn end(&self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }

    /// Reports that the reader is at `at`.
    pub fn follow(&self, at: usize) {
        // Relaxed: the thread may see it late, and reads only these values.
        self.shared.at.store(at, Ordering::Relaxed);
        self.shared.ahead.store(AHEAD, Ordering::Relaxed);
        self.thread.unpark();
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn fetch(&self, way: &Way, len: usize) {
        let (mut buffer, mut fetched) = (Vec::new(), 0);
        while !self.is_over.load(Ordering::Relaxed) {
            let (at, ahead) = (self.at.load(Ordering::Relaxed), self.ahead.load(Ordering::Relaxed));
            let piece = next_piece(at, ahead, fetched, len);
            fetched = piece.end;
            if piece.is_empty() {
                std::thread::park();
            } else if way.fetch(piece, &mut buffer).is_err() {
                // The reader of the content will meet the same error.
                return;
            }
        }
    }
}

impl Way {
    fn fetch(&self, piece: Range<usize>, buffer: &mut Vec<u8>) -> std::io::Result<()> {
        let file = match self {
            Way::Map(map, _) if populate(map, &piece) => return Ok(()),
            Way::Map(_, file) | Way::Read(file) => file,
        };
        if is_cached(file, piece.end - 1) {
            return Ok(());
        }
        buffer.resize(PIECE, 0);
        read_at(file, &mut buffer[..piece.len()], piece.start).map(drop)
    }
}

/// Maps the pages, which prefetches them first; false if the system does not support it.
#[cfg(target_os = "linux")]
fn populate(map: &Mmap, piece: &Range<usize>) -> bool {
    map.advise_range(memmap2::Advice::PopulateRead, piece.start, piece.len()).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn populate(_: &Mmap, _: &Range<usize>) -> bool {
    false
}

/// The next range to prefetch from a file of `len` bytes with its reader at `at`, if everything
/// before `fetched` was prefetched. Files are mostly read from front to back; a reader far away
/// from there starts anew.
fn next_piece(at: usize, ahead: usize, fetched: usize, len: usize) -> Range<usize> {
    let end = len.min(at.saturating_add(ahead));
    let start = if (at..=end.saturating_add(ahead)).contains(&fetched) { fetched } else { at.min(end) };
    start..end.min(start.saturating_add(PIECE)).max(start)
}

#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], at: usize) -> std::io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, at as u64)
}

#[cfg(windows)]
fn read_at(file: &File, buffer: &mut [u8], at: usize) -> std::io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, at as u64)
}

/// Whether the system has the byte at `at` in memory, as far as it reports.
#[cfg(target_os = "linux")]
fn is_cached(file: &File, at: usize) -> bool {
    let mut byte = 0u8;
    let into = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let Ok(at) = libc::off_t::try_from(at) else { return false };
    // SAFETY: one buffer of one byte, which outlives the call.
    let read =
        unsafe { libc::preadv2(std::os::fd::AsRawFd::as_raw_fd(file), &raw const into, 1, at, libc::RWF_NOWAIT) };
    read == 1
}

#[cfg(not(target_os = "linux"))]
fn is_cached(_: &File, _: usize) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use folio_testing::Folder;

    use super::*;

    #[test]
    fn pieces_stay_ahead_of_the_reader() {
        let check = |at: usize, fetched: usize, expect: Range<usize>| {
            assert_eq!(next_piece(at, 4 * PIECE, fetched, 20 * PIECE), expect, "at {at}, up to {fetched}");
        };
        check(0, 0, 0..PIECE);
        check(5, 4 * PIECE, 4 * PIECE..4 * PIECE + 5);
        // Slightly backwards, and far backwards.
        check(5, 4 * PIECE + 9, 4 * PIECE + 9..4 * PIECE + 9);
        check(5, 9 * PIECE, 5..PIECE + 5);
        check(8 * PIECE, 4 * PIECE, 8 * PIECE..9 * PIECE);
        check(19 * PIECE + 7, 20 * PIECE - 1, 20 * PIECE - 1..20 * PIECE);
        check(20 * PIECE, 20 * PIECE, 20 * PIECE..20 * PIECE);
        check(30 * PIECE, 20 * PIECE, 20 * PIECE..20 * PIECE);
        assert_eq!(next_piece(0, usize::MAX, 19 * PIECE, 20 * PIECE), 19 * PIECE..20 * PIECE);
        assert_eq!(next_piece(0, usize::MAX, 20 * PIECE, 20 * PIECE), 20 * PIECE..20 * PIECE);
    }

    #[test]
    fn what_was_read_is_in_memory_and_a_fetcher_ends() {
        let folder = Folder::new("fetch");
        let path = folder.write("file", vec![1; 3 * PIECE]);
        let file = Arc::new(File::open(&path).unwrap());
        // The thread's own references are dropped when it ends, which is before the fetcher is
        // dropped.
        fn wait_for_end<T>(shared: &Arc<T>) {
            while Arc::strong_count(shared) > 1 {
                std::thread::yield_now();
            }
        }
        let fetcher = Fetcher::start(Way::Read(Arc::clone(&file)), 3 * PIECE).unwrap();
        fetcher.follow(PIECE);
        fetcher.end();
        wait_for_end(&fetcher.shared);
        fetcher.follow(2 * PIECE);
        // SAFETY: no process writes to the file.
        let map = Arc::new(unsafe { Mmap::map(&*file) }.unwrap());
        let fetcher = Fetcher::start(Way::Map(Arc::clone(&map), Arc::clone(&file)), map.len()).unwrap();
        fetcher.fetch_all();
        drop(fetcher);
        wait_for_end(&map);
        assert!(!is_cached(&file, 3 * PIECE), "nothing lies behind the end");
    }
}
