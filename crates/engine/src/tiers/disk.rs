//! Chunks of KV blocks as files: found after a restart, and verified when read.
//!
//! A store writes one file for each chunk, atomically, and deletes the least recently used ones to
//! stay within its size. A fetch accepts a file only if every byte of its header and the digest of
//! the whole are as expected. Files are not synced to the medium: after a crash of the system a
//! file may be torn, which costs a miss, while syncing would slow every store. When the disk is
//! full or cannot be written, storing pauses and fetching continues.

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

/// Full blocks in one file: 128 tokens. A smaller number needs more files, a larger one leaves out
/// more of a prompt's end.
pub const CHUNK_BLOCKS: usize = 8;

#[derive(Clone, Debug)]
pub struct DiskConfig {
    pub folder: PathBuf,
    /// Fingerprint of the model that computes the blocks.
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

/// Figures of the disk tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Whether the last write worked; true before the first.
    pub is_storing: bool,
    /// Failed writes since the start.
    pub store_failures: u64,
    /// Bytes of all chunks in the folder that this process knows of.
    pub bytes: u64,
}

/// A handle; clones share one store. Several processes may use one folder: each counts the files
/// that it found at its start and those it wrote since.
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
    /// Lists the chunks of the folder, removes temporary files of dead processes, and deletes
    /// chunks until the folder is within its size.
    pub fn open(config: DiskConfig) -> Result<Self, TierError> {
        let folder = Folder::open(&config.folder)?;
        let hash_key = folder.hash_key()?;
        let mut index = Index::default();
        let now = SystemTime::now();
        for chunk in folder.list()? {
            // A time in the future would keep a file for ever.
            index.insert(Place::new(chunk.model, chunk.key), chunk.bytes, chunk.modified.min(now), 0);
        }
        let (index, storing) = (Mutex::new(index), Mutex::default());
        let store = Self { shared: Arc::new(Shared { config, folder, hash_key, index, storing }) };
        // No scheduler knows the chunks that are deleted here. If a file cannot be deleted, the
        // first store reports it.
        let _ = store.make_room(0, &mut Vec::new());
        Ok(store)
    }

    /// The secret key of the block hashes that name chunks.
    pub fn hash_key(&self) -> [u64; 2] {
        self.shared.hash_key
    }

    pub fn chunk_blocks(&self) -> usize {
        self.shared.config.chunk_blocks
    }

    /// The chunks of this model by file name, most recently used first.
    pub fn scan(&self) -> Vec<u128> {
        self.index().keys(self.shared.config.fingerprint)
    }

    /// Bytes of all chunks in the folder that this store knows of.
    pub fn bytes(&self) -> u64 {
        self.index().bytes()
    }

    /// False from a failed write to the next successful one.
    pub fn is_storing(&self) -> bool {
        self.storing().is_working()
    }

    pub fn stats(&self) -> DiskStats {
        let storing = self.storing();
        DiskStats { is_storing: storing.is_working(), store_failures: storing.failures(), bytes: self.bytes() }
    }

    /// Writes a chunk from its host slots, or notes its use if it has a file. Chunks of this model
    /// that were deleted are added to `lost`, even on an error. `now` is compared with the time of
    /// the last failure.
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
            // Another process removed the temporary file, or an empty folder, as a dead process's:
            // only this chunk is lost.
            Err(error @ TierError::Io { action: "create" | "rename", .. }) if is_not_found(&error) => Err(error),
            Err(error) => {
                self.storing().failed(now);
                Err(error)
            }
        }
    }

    /// Reads a chunk into its host slots. After an error their contents are undefined and the chunk
    /// is forgotten; its file is removed if it is damaged, and left alone if another writer made
    /// it.
    pub fn fetch(&self, chunk: &DiskChunk, slots: &[Vec<HostSlot>], host: &HostTier) -> Result<(), TierError> {
        let (file, path) = self.expected(chunk, slots, host);
        let read = self.read(&file, &path, chunk.key, slots, host);
        match &read {
            Ok(()) => self.note_use(chunk, file.len(), &path),
            Err(error) => {
                if let TierError::Damaged { path, .. } = error {
                    // If the removal fails, the file is refused again at its next use.
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
        // The kind is checked before opening: opening a pipe would wait for a writer.
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
        // Sets the time that orders the files after a restart.
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
