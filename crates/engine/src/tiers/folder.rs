//! The folder of the disk tier: names, permissions, the hash key, and files that dead processes
//! left.
//!
//! `<folder>/hash-key`, and `<folder>/<fingerprint>/<first two digits>/<key>.kv`, all names in
//! lower-case hexadecimal. A file is written under a temporary name next to its final one and
//! renamed, so that a writer never leaves a partial file under a final name. Other entries of the
//! folder are ignored, and links are not followed.

use std::{
    fs::{self, DirBuilder, DirEntry, File, OpenOptions},
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use folio_model::Fingerprint;

use super::TierError;

const HASH_KEY: &str = "hash-key";
const CHUNK: &str = "kv";
const TEMPORARY: &str = "tmp";
/// No write takes this long: the writer of an older temporary file has ended, even if the system
/// cannot say so.
const DEAD_AFTER: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub(super) struct Folder {
    root: PathBuf,
    /// Distinguishes the temporary files of two stores in one process.
    nonce: u64,
    next_temporary: AtomicU64,
}

/// A chunk's file as the folder lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub model: Fingerprint,
    pub key: u128,
    pub bytes: u64,
    pub modified: SystemTime,
}

impl Folder {
    /// Makes the folder if it is missing. Keys and values reveal prompts, so only the owner may
    /// read it.
    pub fn open(root: &Path) -> Result<Self, TierError> {
        create_folders(root).map_err(TierError::io("create", root))?;
        Ok(Self { root: root.to_owned(), nonce: fresh_bits()[0], next_temporary: AtomicU64::new(0) })
    }

    /// The secret key of the block hashes: made once, the same for every process that uses this
    /// folder.
    pub fn hash_key(&self) -> Result<[u64; 2], TierError> {
        let path = self.root.join(HASH_KEY);
        match read_small(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            text => return parse_hash_key(text, &path),
        }
        let (mut file, temporary) = self.temporary(&self.root).map_err(TierError::io("create", &path))?;
        let [high, low] = fresh_bits();
        // Synced, unlike chunks: a torn key would make every later start fail.
        let written = writeln!(file, "{high:016x}{low:016x}").and_then(|()| file.sync_all());
        written.map_err(TierError::io("write", &path))?;
        // If two processes start at once, one links first, and both read its key.
        let linked = fs::hard_link(&temporary.path, &path);
        if let Err(error) = linked
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            // Without hard links on this file system the last one wins, and chunks of the other are
            // not found again.
            fs::rename(&temporary.path, &path).map_err(TierError::io("create", &path))?;
        }
        parse_hash_key(read_small(&path), &path)
    }

    pub fn path(&self, model: Fingerprint, key: u128) -> PathBuf {
        let name = format!("{key:032x}");
        self.root.join(model.to_string()).join(&name[..2]).join(name).with_extension(CHUNK)
    }

    /// A new file next to `path`, to be renamed to it.
    pub fn temporary_for(&self, path: &Path) -> io::Result<(File, Temporary)> {
        let folder = path.parent().unwrap_or(&self.root);
        match self.temporary(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create_folders(folder)?;
                self.temporary(folder)
            }
            made => made,
        }
    }

    fn temporary(&self, folder: &Path) -> io::Result<(File, Temporary)> {
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        let (pid, process, store) = (std::process::id(), process_nonce(), self.nonce);
        let path = folder.join(format!("{pid}.{process:016x}.{store:016x}.{number}.{TEMPORARY}"));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        Ok((options.open(&path)?, Temporary { path, is_renamed: false }))
    }

    /// Removes a chunk's file, and its folders if they are empty. A file that does not exist counts
    /// as removed.
    pub fn remove(&self, model: Fingerprint, key: u128, is_own: bool) -> io::Result<()> {
        let path = self.path(model, key);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ if is_own => {}
            // A folder of another model, perhaps of weights that no longer exist: no other process
            // would remove it.
            _ => drop(path.ancestors().skip(1).take(2).try_for_each(fs::remove_dir)),
        }
        Ok(())
    }

    /// Every chunk of every model, by name and without opening it. Temporary files of dead
    /// processes are removed.
    pub fn list(&self) -> Result<Vec<Listed>, TierError> {
        let mut found = Vec::new();
        for entry in entries(&self.root)? {
            if is_dead_temporary(&entry) {
                // If the removal fails, the next start tries again.
                let _ = fs::remove_file(entry.path());
            }
            let Some(model) = folder_name(&entry).and_then(|name| hex(&name, 32)) else { continue };
            // A folder that another process removes at the same time is empty.
            for part in entries(&entry.path()).unwrap_or_default() {
                let Some(prefix) = folder_name(&part).filter(|name| hex(name, 2).is_some()) else { continue };
                for file in entries(&part.path()).unwrap_or_default() {
                    match listed(&file, Fingerprint(model), &prefix) {
                        Some(chunk) => found.push(chunk),
                        None if is_dead_temporary(&file) => drop(fs::remove_file(file.path())),
                        None => {}
                    }
                }
            }
        }
        Ok(found)
    }
}

/// A file under a temporary name; removed when this is dropped, unless it was renamed.
#[derive(Debug)]
pub(super) struct Temporary {
    path: PathBuf,
    is_renamed: bool,
}

impl Temporary {
    pub fn rename(mut self, path: &Path) -> io::Result<()> {
        fs::rename(&self.path, path)?;
        self.is_renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_renamed {
            // If the removal fails, a later start tries again.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn create_folders(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

fn entries(folder: &Path) -> Result<Vec<DirEntry>, TierError> {
    let entries = fs::read_dir(folder).map_err(TierError::io("list", folder))?;
    Ok(entries.filter_map(|entry| entry.ok()).collect())
}

/// The name of an entry that is a folder and not a link.
fn folder_name(entry: &DirEntry) -> Option<String> {
    entry.file_type().ok()?.is_dir().then(|| entry.file_name().into_string().ok())?
}

/// The value of a string of exactly `digits` hexadecimal digits in lower case.
fn hex(text: &str, digits: usize) -> Option<u128> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_hex = text.len() == digits && text.bytes().all(is_digit);
    is_hex.then(|| u128::from_str_radix(text, 16).ok())?
}

fn listed(entry: &DirEntry, model: Fingerprint, prefix: &str) -> Option<Listed> {
    let name = entry.file_name();
    let (stem, ending) = name.to_str()?.split_once('.')?;
    if ending != CHUNK || !stem.starts_with(prefix) {
        return None;
    }
    let key = hex(stem, 32)?;
    // Metadata of the entry itself: a link is no file.
    let about = entry.metadata().ok().filter(|about| about.is_file())?;
    Some(Listed { model, key, bytes: about.len(), modified: about.modified().ok()? })
}

/// Whether this is a temporary file whose writer has ended.
fn is_dead_temporary(entry: &DirEntry) -> bool {
    let name = entry.file_name();
    let parts: Vec<&str> = name.to_str().unwrap_or_default().split('.').collect();
    let &[pid, process, store, number, TEMPORARY] = &*parts else { return false };
    let (Ok(pid), Some(process)) = (pid.parse::<u32>(), hex(process, 16)) else { return false };
    if hex(store, 16).is_none() || number.parse::<u64>().is_err() {
        return false;
    }
    let Some(about) = entry.metadata().ok().filter(|about| about.is_file()) else { return false };
    let age = about.modified().ok().and_then(|modified| SystemTime::now().duration_since(modified).ok());
    if age.is_some_and(|age| age > DEAD_AFTER) {
        return true;
    }
    match pid == std::process::id() {
        // Process ids are reused, soonest in containers.
        true => process != u128::from(process_nonce()),
        false => Path::new("/proc/self").exists() && !Path::new(&format!("/proc/{pid}")).exists(),
    }
}

fn read_small(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(100).read_to_string(&mut text)?;
    Ok(text)
}

fn parse_hash_key(text: io::Result<String>, path: &Path) -> Result<[u64; 2], TierError> {
    let wrong = || TierError::BadHashKey { path: path.to_owned() };
    let text = match text {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(wrong()),
        text => text.map_err(TierError::io("read", path))?,
    };
    let key = hex(text.trim_end(), 32).ok_or_else(wrong)?;
    Ok([(key >> 64) as u64, key as u64])
}

/// Constant through the life of a process, and different in the next.
fn process_nonce() -> u64 {
    static NONCE: OnceLock<u64> = OnceLock::new();
    *NONCE.get_or_init(|| fresh_bits()[0])
}

/// Random bits from the system, or from the source of std's hash keys if the system's cannot be
/// read.
fn fresh_bits() -> [u64; 2] {
    let mut bytes = [0; 16];
    match File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)) {
        Ok(()) => {
            let bits = u128::from_le_bytes(bytes);
            [(bits >> 64) as u64, bits as u64]
        }
        Err(_) => [(); 2].map(|()| RandomState::new().build_hasher().finish()),
    }
}
