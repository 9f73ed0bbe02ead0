//! Chunks of KV blocks as files: found again after a restart, never trusted unread.
//!
//! A store writes one file a chunk, atomically, and deletes the least recently used ones to stay under its size; a
//! fetch believes a file only if every byte of its header is the one expected and the digest of all of it fits. Nothing
//! is synced to the medium: after a crash of the system a file may be torn, which costs a miss, and waiting for the
//! medium would cost every store. When the disk is full or cannot be written, storing pauses and fetching goes on.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime},
};

use folio_model::Fingerprint;
use folio_scheduler::{DiskChunk, HostSlot};

use super::{
    HostTier, TierError,
    chunk_file::{ChunkFile, Refused},
    folder::Folder,
    index::{Index, Place, used_now},
    storing::Storing,
};

/// Full blocks in one file: 128 tokens. Fewer waste files, more leave more of a prompt's end out.
pub const CHUNK_BLOCKS: usize = 8;

#[derive(Clone, Debug)]
pub struct DiskConfig {
    pub folder: PathBuf,
    /// Of the model that computes the blocks.
    pub fingerprint: Fingerprint,
    /// The adapter on top of the model; empty without one.
    pub adapter: String,
    /// Most bytes of chunks in the folder, other models' included.
    pub max_bytes: u64,
    /// Full blocks in one file.
    pub chunk_blocks: usize,
}

impl DiskConfig {
    pub fn new(folder: impl Into<PathBuf>, fingerprint: Fingerprint, max_bytes: u64) -> Self {
        let (folder, adapter) = (folder.into(), String::new());
        Self { folder, fingerprint, adapter, max_bytes, chunk_blocks: CHUNK_BLOCKS }
    }
}

/// How the disk tier fares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Whether the last write worked; true before the first.
    pub is_storing: bool,
    /// Writes that failed, since the start.
    pub store_failures: u64,
    /// Of all chunks in the folder, as far as this process knows.
    pub bytes: u64,
}

/// A handle; clones share one store. Several processes may use one folder: each counts what it found at start and what
/// it wrote since.
#[derive(Clone, Debug)]
pub struct DiskStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: DiskConfig,
    folder: Folder,
    hash_key: [u64; 2],
    index: Mutex<Index>,
    storing: Mutex<Storing>,
}

impl DiskStore {
    /// Lists what is there, removes what dead processes left half written, and brings the folder under its size.
    pub fn open(config: DiskConfig) -> Result<Self, TierError> {
        let folder = Folder::open(&config.folder)?;
        let hash_key = folder.hash_key()?;
        let mut index = Index::default();
        let now = SystemTime::now();
        for chunk in folder.list()? {
            // A time to come would keep a file for ever.
            index.insert(Place::new(chunk.model, chunk.key), chunk.bytes, chunk.modified.min(now), 0);
        }
        let (index, storing) = (Mutex::new(index), Mutex::default());
        let store = Self { shared: Arc::new(Shared { config, folder, hash_key, index, storing }) };
        // What goes here was never told to anybody. If a file cannot go, the first store finds out too, and it is
        // heard.
        let _ = store.make_room(0, &mut Vec::new());
        Ok(store)
    }

    /// The key of the block hashes that name chunks; a secret.
    pub fn hash_key(&self) -> [u64; 2] {
        self.shared.hash_key
    }

    pub fn chunk_blocks(&self) -> usize {
        self.shared.config.chunk_blocks
    }

    /// The chunks of this model, most recently used first, by their names alone.
    pub fn scan(&self) -> Vec<u128> {
        self.index().keys(self.shared.config.fingerprint)
    }

    /// Bytes of all chunks in the folder that this store knows of.
    pub fn bytes(&self) -> u64 {
        self.index().bytes()
    }

    /// False from a write that failed to the next that works.
    pub fn is_storing(&self) -> bool {
        self.storing().is_working()
    }

    pub fn stats(&self) -> DiskStats {
        let storing = self.storing();
        DiskStats { is_storing: storing.is_working(), store_failures: storing.failures(), bytes: self.bytes() }
    }

    /// Writes a chunk from its host slots, or notes that it is used where it is there already. Chunks of this model
    /// that had to go are added to `lost`, also when this fails. `now` is held against the last time that it failed.
    pub fn store(
        &self,
        chunk: &DiskChunk,
        slots: &[Vec<HostSlot>],
        host: &HostTier,
        lost: &mut Vec<u128>,
        now: Instant,
    ) -> Result<(), TierError> {
        let (file, path) = self.expected(chunk, slots, host);
        let there = match fs::symlink_metadata(&path) {
            Ok(about) if !about.is_file() => return Err(TierError::Foreign { path, field: "kind of file" }),
            Ok(about) => File::open(&path).is_ok_and(|there| file.begins(&there, about.len()).unwrap_or(false)),
            Err(_) => false,
        };
        if there {
            self.note_use(chunk, file.len(), &path);
            return Ok(());
        }
        if !self.storing().may_try(now) {
            return Err(TierError::StoringIsPaused);
        }
        let limit = self.shared.config.max_bytes;
        if file.len() > limit {
            return Err(TierError::TooLarge { bytes: file.len(), limit });
        }
        let written = self.make_room(file.len(), lost).and_then(|()| {
            let written = self.write(&file, &path, slots, host);
            self.index().unreserve(file.len());
            written
        });
        match written {
            Ok(()) => {
                self.storing().worked();
                self.note_use(chunk, file.len(), &path);
                Ok(())
            }
            // Another process took the temporary file for a dead one's, or a folder that was empty: only this chunk is
            // lost.
            Err(error @ TierError::Io { action: "create" | "rename", .. }) if is_not_found(&error) => Err(error),
            Err(error) => {
                self.storing().failed(now);
                Err(error)
            }
        }
    }

    /// Reads a chunk into its host slots. On an error they hold anything, and the chunk is not known any more; its file
    /// is removed if it is damaged and left alone if it is somebody else's.
    pub fn fetch(&self, chunk: &DiskChunk, slots: &[Vec<HostSlot>], host: &HostTier) -> Result<(), TierError> {
        let (file, path) = self.expected(chunk, slots, host);
        let read = self.read(&file, &path, chunk.key, slots, host);
        match &read {
            Ok(()) => self.note_use(chunk, file.len(), &path),
            Err(error) => {
                if let TierError::Damaged { path, .. } = error {
                    // It will be met again, and refused again.
                    let _ = fs::remove_file(path);
                }
                self.index().remove(self.place(chunk.key));
            }
        }
        read
    }

    fn read(
        &self,
        file: &ChunkFile,
        path: &Path,
        key: u128,
        slots: &[Vec<HostSlot>],
        host: &HostTier,
    ) -> Result<(), TierError> {
        let wrong = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => TierError::Missing { key },
            _ => TierError::io("read", path)(error),
        };
        // Asked before it is opened: a pipe would wait for a writer.
        if !fs::symlink_metadata(path).map_err(wrong)?.is_file() {
            return Err(TierError::Foreign { path: path.to_owned(), field: "kind of file" });
        }
        let there = File::open(path).map_err(wrong)?;
        let len = there.metadata().map_err(wrong)?.len();
        if len > file.len().max(self.shared.config.max_bytes) {
            return Err(TierError::Foreign { path: path.to_owned(), field: "length" });
        }
        file.read(&there, len, slots, host).map_err(|refused| match refused {
            Refused::Damaged(problem) => TierError::Damaged { path: path.to_owned(), problem },
            Refused::Foreign(field) => TierError::Foreign { path: path.to_owned(), field },
            Refused::Io(error) => wrong(error),
        })
    }

    fn write(&self, file: &ChunkFile, path: &Path, slots: &[Vec<HostSlot>], host: &HostTier) -> Result<(), TierError> {
        let (out, temporary) = self.shared.folder.temporary_for(path).map_err(TierError::io("create", path))?;
        file.write(&out, slots, host).map_err(TierError::io("write", path))?;
        drop(out);
        temporary.rename(path).map_err(TierError::io("rename", path))
    }

    /// Deletes the least recently used files until `bytes` more fit, and reserves them.
    fn make_room(&self, bytes: u64, lost: &mut Vec<u128>) -> Result<(), TierError> {
        let Shared { config, folder, .. } = &*self.shared;
        loop {
            let mut index = self.index();
            let oldest = match index.bytes().saturating_add(bytes) > config.max_bytes {
                true => index.oldest(),
                false => None,
            };
            let Some(place) = oldest else {
                index.reserve(bytes);
                return Ok(());
            };
            index.remove(place);
            drop(index);
            let is_own = place.model() == config.fingerprint;
            if is_own {
                lost.push(place.key);
            }
            let path = folder.path(place.model(), place.key);
            folder.remove(place.model(), place.key, is_own).map_err(TierError::io("remove", path))?;
        }
    }

    fn note_use(&self, chunk: &DiskChunk, bytes: u64, path: &Path) {
        let mut index = self.index();
        let depth = index.depth_after(self.place(chunk.parent));
        let used = used_now(depth);
        index.insert(self.place(chunk.key), bytes, used, depth);
        drop(index);
        // For the order after a restart only.
        let _ = File::open(path).and_then(|file| file.set_modified(used));
    }

    fn expected(&self, chunk: &DiskChunk, slots: &[Vec<HostSlot>], host: &HostTier) -> (ChunkFile, PathBuf) {
        let Shared { config, folder, .. } = &*self.shared;
        let file = ChunkFile::new(config.fingerprint, &config.adapter, chunk, slots, host);
        (file, folder.path(config.fingerprint, chunk.key))
    }

    fn place(&self, key: u128) -> Place {
        Place::new(self.shared.config.fingerprint, key)
    }

    fn storing(&self) -> MutexGuard<'_, Storing> {
        self.shared.storing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.shared.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_not_found(error: &TierError) -> bool {
    matches!(error, TierError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
}
