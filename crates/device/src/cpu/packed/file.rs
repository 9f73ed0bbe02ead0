//! A mapped file of packed weights, verified to be the expected one.
//!
//! Its header and a few pages are compared when it is opened. Meanwhile threads compute the digest
//! of the whole file, and [`PackedFile::check`] waits for them. It is called at the end of each
//! step: the first step reads the weights while they are verified, and its results are used only
//! once the weights are known to be good. A later check only asks the system whether the file was
//! written to since; if it was, the whole file is verified again.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use folio_formats::{Mapped, Stamp};

use super::super::buffer::Buffer;
use super::super::weight::PartShape;
use super::PartMemory;
use super::layout::{Layout, piece_digest, whole_digest};
use crate::{Error, Result};

/// More threads would not read faster.
const MOST_READERS: usize = 4;

pub struct PackedFile {
    content: Arc<Content>,
    state: Mutex<State>,
}

/// The state that the verifying threads share.
struct Content {
    map: Arc<Mapped>,
    layout: Layout,
    /// Digest of the whole file when it was written.
    digest: u128,
    is_over: AtomicBool,
    is_damaged: AtomicBool,
}

#[derive(Default)]
struct State {
    /// The thread of the first verification.
    reader: Option<JoinHandle<Option<Stamp>>>,
    /// The file's state when its digest was last found to be right.
    verified: Option<Stamp>,
}

impl PackedFile {
    /// None if the file has another key or other shapes, is truncated, or has other pages than were
    /// written.
    pub fn new(map: Arc<Mapped>, key: u128, shapes: &[PartShape]) -> Option<Self> {
        let layout = Layout::new(key, shapes)?;
        let digest = layout.is_of(map.bytes())?;
        let (is_over, is_damaged) = (AtomicBool::new(false), AtomicBool::new(false));
        let content = Arc::new(Content { map, layout, digest, is_over, is_damaged });
        Some(Self { content, state: Mutex::default() })
    }

    /// Starts to verify the whole file.
    pub fn begin_check(&self) {
        let content = Arc::clone(&self.content);
        let body = move || content.verify();
        // If no thread can be started, the first check verifies in its own thread.
        self.state().reader = std::thread::Builder::new().name("folio-verify".into()).spawn(body).ok();
    }

    /// Whether all bytes read so far are those that were written. A file that failed once is
    /// damaged for good: zeros may have been read in its place.
    pub fn check(&self) -> Result<()> {
        let content = &*self.content;
        let mut state = self.state();
        if let Some(reader) = state.reader.take() {
            state.verified = reader.join().unwrap_or_default();
        }
        let is_good = !self.is_damaged()
            && !content.map.has_failed()
            && (state.verified.is_some() && state.verified == content.map.stamp() || {
                state.verified = content.verify();
                state.verified.is_some()
            });
        if is_good {
            return Ok(());
        }
        content.is_damaged.store(true, Ordering::Relaxed);
        let problem = match content.map.has_failed() {
            true => "a part of it cannot be read any more: it was truncated, or its disk has failed",
            false => "it holds other bytes than were written to it",
        };
        Err(Error::PackedWeights { path: self.path().to_owned(), problem })
    }

    /// Whether a check has found the file damaged.
    pub fn is_damaged(&self) -> bool {
        self.content.is_damaged.load(Ordering::Relaxed)
    }

    /// Whether its path still leads to it.
    pub(super) fn is_in_place(&self) -> bool {
        self.content.map.is_in_place()
    }

    pub fn path(&self) -> &Path {
        self.content.map.path()
    }

    /// Part `index`, which has this shape.
    pub(super) fn part(&self, index: usize, shape: PartShape) -> PartMemory {
        let Content { map, layout, .. } = &*self.content;
        let place = &layout.parts[index];
        assert_eq!(place.shape, shape, "part {index} of a packed file");
        PartMemory {
            data: Arc::new(Buffer::in_file(map, place.data.clone())),
            factors: Arc::new(Buffer::in_file(map, place.factors.clone())),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PackedFile {
    fn drop(&mut self) {
        // No check waits for the digest any more.
        self.content.is_over.store(true, Ordering::Relaxed);
    }
}

impl Content {
    /// Reads the whole file. Returns its state from before the reading, if the digest is right.
    fn verify(&self) -> Option<Stamp> {
        let stamp = self.map.stamp();
        let (bytes, pieces) = (self.map.bytes(), self.layout.pieces().collect::<Vec<_>>());
        let next = AtomicUsize::new(0);
        let read = || {
            let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|_| !self.is_over.load(Ordering::Relaxed));
            let mut found = Vec::new();
            while let Some((at, piece)) = take().and_then(|at| Some((at, pieces.get(at)?))) {
                found.push((at, piece_digest(&bytes[piece.clone()])));
            }
            found
        };
        let readers = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_READERS);
        let mut found: Vec<(usize, u128)> = std::thread::scope(|scope| {
            // If no further thread can be started, this one reads all of it.
            let start = |_| std::thread::Builder::new().name("folio-verify".into()).spawn_scoped(scope, read).ok();
            let others: Vec<_> = (1..readers).filter_map(start).collect();
            let own = read();
            own.into_iter().chain(others.into_iter().flat_map(|other| other.join().unwrap_or_default())).collect()
        });
        found.sort_unstable();
        let is_whole = found.len() == pieces.len();
        let digest = whole_digest(found.into_iter().map(|(_, digest)| digest));
        stamp.filter(|_| is_whole && digest == self.digest && !self.map.has_failed())
    }
}
