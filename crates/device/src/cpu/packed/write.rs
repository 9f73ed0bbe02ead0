//! Writes packed weights to a file: in a thread of the lowest priority, under another name until
//! the file is complete.
//!
//! Any fault costs only the file. The writer locks a file while it writes, so that other processes
//! can tell a partial file that was left behind; the system releases the lock with the process.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use folio_formats::Mapped;

use super::super::weight::PartShape;
use super::layout::{Layout, pages_digest, piece_digest, whole_digest};
use super::{PackedFile, PackedParts, PartMemory};

/// Bytes between two checks whether to go on; each piece is synced to the disk.
const PIECE: usize = 32 << 20;
/// The smallest page size of any system.
const PAGE: usize = 4 << 10;
/// Divisor of the disk's free space: the share that the file may take.
const FREE_SHARE: u64 = 4;
const ENDING: &str = ".packed";
const PARTIAL: &str = ".partial";

/// Folder, name and key of one model's packed weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedPlace {
    pub folder: PathBuf,
    /// The model's name; files of that name with other keys are out of date.
    pub name: String,
    /// Key of everything that the packed bytes depend on, except their shapes.
    pub key: u128,
}

/// A file being written; dropping this stops the writer.
pub struct PackedWriter {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PackedPlace {
    pub fn path(&self) -> PathBuf {
        self.folder.join(format!("{}-{:032x}{ENDING}", self.name, self.key))
    }

    /// The existing file, if there is one; [`PackedFile::new`] decides whether it is valid.
    pub fn open(&self) -> Option<Arc<Mapped>> {
        Mapped::open_whole(&self.path()).ok()
    }

    /// Removes a file that was found to be damaged, so that the next start packs anew and writes it
    /// again. A file that was put in its place meanwhile stays.
    pub fn remove(&self, file: &PackedFile) -> io::Result<()> {
        match file.is_in_place() {
            true => fs::remove_file(self.path()),
            false => Ok(()),
        }
    }

    /// Starts to write packed weights. `failed` receives the reason if no file results, and is
    /// dropped if one does.
    pub fn write(
        self,
        parts: &PackedParts,
        failed: impl FnOnce(io::Error) + Send + 'static,
    ) -> io::Result<PackedWriter> {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let (shapes, parts): (Vec<_>, Vec<_>) = parts.take().into_iter().unzip();
        let body = move || {
            give_way();
            if let Err(error) = self.write_now(&shapes, &parts, &over)
                && !over.load(Ordering::Relaxed)
            {
                failed(error);
            }
        };
        let thread = std::thread::Builder::new().name("folio-packed".into()).spawn(body)?;
        Ok(PackedWriter { is_over, thread: Some(thread) })
    }

    pub(super) fn write_now(&self, shapes: &[PartShape], parts: &[PartMemory], is_over: &AtomicBool) -> io::Result<()> {
        let layout = Layout::new(self.key, shapes).ok_or(ErrorKind::FileTooLarge)?;
        // Another process may have been faster.
        let there = self.open().and_then(|map| PackedFile::new(map, self.key, shapes));
        if there.is_some_and(|file| file.check().is_ok()) {
            return Ok(());
        }
        fs::create_dir_all(&self.folder)?;
        self.clear();
        check_room(&self.folder, layout.total as u64)?;
        let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let partial = self.path().with_added_extension(format!("{}-{nanoseconds}{PARTIAL}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&partial)?;
        let written = file
            .try_lock()
            .map_err(io::Error::from)
            .and_then(|()| fill(&file, &layout, parts, is_over))
            .and_then(|()| fs::rename(&partial, self.path()));
        match &written {
            Ok(()) => fetch_anew(&file, &self.path(), is_over),
            Err(_) => drop(fs::remove_file(&partial)),
        }
        written
    }

    /// Removes files of this model with other keys, and partial files that were left behind. Files
    /// that cannot be removed stay.
    fn clear(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(&self.name)) else { continue };
            let is_left_over = match Leftover::of(rest) {
                Some(Leftover::Whole(key)) => key != self.key,
                Some(Leftover::Partial) => File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()),
                None => false,
            };
            if is_left_over {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

impl Drop for PackedWriter {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // A panic in the thread was reported already.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A file of this model, classified by the part of its name behind the model's.
enum Leftover {
    Whole(u128),
    Partial,
}

impl Leftover {
    fn of(rest: &str) -> Option<Self> {
        let (key, rest) = rest.strip_prefix('-')?.split_at_checked(32)?;
        let key = u128::from_str_radix(key, 16).ok()?;
        match rest.strip_prefix(ENDING)? {
            "" => Some(Self::Whole(key)),
            rest => rest.ends_with(PARTIAL).then_some(Self::Partial),
        }
    }
}

/// The header is written last, so that a file with a header is complete.
fn fill(mut file: &File, layout: &Layout, parts: &[PartMemory], is_over: &AtomicBool) -> io::Result<()> {
    let mut unsynced = 0;
    for (place, part) in layout.parts.iter().zip(parts) {
        let factors: Vec<u8> = part.factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        for (bytes, at) in [(&part.data[..], place.data.start), (&factors, place.factors.start)] {
            file.seek(SeekFrom::Start(at as u64))?;
            for piece in bytes.chunks(PIECE) {
                if is_over.load(Ordering::Relaxed) {
                    return Err(ErrorKind::Interrupted.into());
                }
                file.write_all(piece)?;
                unsynced += piece.len();
                if unsynced >= PIECE {
                    file.sync_data()?;
                    unsynced = 0;
                }
            }
        }
    }
    file.set_len(layout.total as u64)?;
    let mut pages = pages_digest();
    for page in layout.sampled_pages() {
        pages.update(&read(file, &page)?);
    }
    let mut pieces = Vec::new();
    for piece in layout.pieces() {
        if is_over.load(Ordering::Relaxed) {
            return Err(ErrorKind::Interrupted.into());
        }
        pieces.push(piece_digest(&read(file, &piece)?));
    }
    // Everything but the header is on the disk before the header is written.
    file.sync_data()?;
    file.rewind()?;
    file.write_all(&layout.header(pages.finish(), whole_digest(pieces)))?;
    file.sync_all()
}

fn read(mut file: &File, place: &Range<usize>) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; place.len()];
    file.seek(SeekFrom::Start(place.start as u64))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Written files lie on small pages in memory, files read through a mapping that asks for huge
/// pages on huge ones: the next start shall find the latter.
fn fetch_anew(file: &File, path: &Path, is_over: &AtomicBool) {
    #[cfg(target_os = "linux")]
    // SAFETY: advice about a file that is open; it touches no memory of ours, and a refusal costs
    // speed alone.
    unsafe {
        libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(file), 0, 0, libc::POSIX_FADV_DONTNEED);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
    let Ok(map) = Mapped::open_whole(path) else { return };
    // Pages that are not prefetched are not mapped beside the memory of this process, which holds
    // all of them already.
    map.rest();
    for start in (0..map.bytes().len()).step_by(PIECE) {
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        let piece = start..map.bytes().len().min(start + PIECE);
        let pages = map.bytes()[piece.clone()].iter().step_by(PAGE);
        std::hint::black_box(pages.fold(0, |all, byte| all ^ byte));
        map.release(piece);
    }
}

pub(super) fn check_room(folder: &Path, bytes: u64) -> io::Result<()> {
    let free = free_bytes(folder)?;
    if bytes > free / FREE_SHARE {
        let why = format!("{bytes} bytes are more than a quarter of the {free} that are free");
        return Err(io::Error::new(ErrorKind::StorageFull, why));
    }
    Ok(())
}

/// Bytes of the folder's disk that this user may take.
#[cfg(unix)]
fn free_bytes(folder: &Path) -> io::Result<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    let mut about = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path ends with a zero byte, and the kernel writes at most the size of the
    // structure.
    if unsafe { libc::statvfs(path.as_ptr(), about.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeros are a valid value, and the call filled it in.
    let about = unsafe { about.assume_init() };
    #[allow(clippy::unnecessary_cast, reason = "the types differ between systems")]
    let [free, unit] = [about.f_bavail as u64, about.f_frsize as u64];
    Ok(free.saturating_mul(unit))
}

#[cfg(not(unix))]
fn free_bytes(_: &Path) -> io::Result<u64> {
    Err(io::Error::new(ErrorKind::Unsupported, "this system does not say how much of the disk is free"))
}

/// Lowers the priority of this thread below all others.
fn give_way() {
    #[cfg(target_os = "linux")]
    // SAFETY: takes three numbers and touches no memory of ours; 0 is the calling thread. A refusal
    // costs other threads time.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 19);
    }
}
