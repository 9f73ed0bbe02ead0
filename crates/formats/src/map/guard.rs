//! Handles pages of a mapped file that cannot be read any more, because another process truncated
//! the file or its disk failed. The system sends SIGBUS to a thread that reads such a page, which
//! would end the process. Here the whole mapping becomes zeros, and is marked as different from the
//! file from then on: [`Watch::has_failed`].
//!
//! The handler may interrupt any code, so it takes no lock and no memory: it walks a list with
//! entries that are never freed, calls `mmap`, and returns to the read, which then gives zeros. A
//! fault at any other address goes to the previous handler.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Watches a mapping as long as it lives. It must be dropped before the mapping.
#[derive(Debug)]
pub(super) struct Watch(&'static Place);

/// One mapping, or none while `start` is 0.
#[derive(Debug)]
struct Place {
    start: AtomicUsize,
    len: AtomicUsize,
    has_failed: AtomicBool,
    is_taken: AtomicBool,
    next: AtomicPtr<Place>,
}

static PLACES: AtomicPtr<Place> = AtomicPtr::new(std::ptr::null_mut());

impl Watch {
    /// Watches the mapping with these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        handler::install();
        let place = places().find(|place| !place.is_taken.swap(true, Ordering::AcqRel)).unwrap_or_else(add_place);
        place.has_failed.store(false, Ordering::Relaxed);
        place.len.store(bytes.len(), Ordering::Relaxed);
        // Stored last: the handler uses an entry once it has a start.
        place.start.store(bytes.as_ptr() as usize, Ordering::Release);
        Self(place)
    }

    /// Whether a page could not be read. All bytes may be zeros then.
    pub fn has_failed(&self) -> bool {
        self.0.has_failed.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
        self.0.is_taken.store(false, Ordering::Release);
    }
}

fn places() -> impl Iterator<Item = &'static Place> {
    let at = |place: &AtomicPtr<Place>| {
        // SAFETY: null, or from `add_place`, which leaks it.
        unsafe { place.load(Ordering::Acquire).as_ref() }
    };
    std::iter::successors(at(&PLACES), move |place| at(&place.next))
}

/// A new entry, already in use. The list has as many entries as there were mappings at the same
/// time.
fn add_place() -> &'static Place {
    let place: &'static mut Place = Box::leak(Box::new(Place {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        has_failed: AtomicBool::new(false),
        is_taken: AtomicBool::new(true),
        next: AtomicPtr::default(),
    }));
    let place: *mut Place = place;
    // SAFETY: leaked just now.
    let shared: &'static Place = unsafe { &*place };
    let _ = PLACES.fetch_update(Ordering::AcqRel, Ordering::Acquire, |first| {
        shared.next.store(first, Ordering::Release);
        Some(place)
    });
    shared
}

#[cfg(target_os = "linux")]
mod handler {
    use std::ffi::{c_int, c_void};
    use std::mem::MaybeUninit;
    use std::ptr::null_mut;
    use std::sync::atomic::Ordering;
    use std::sync::{Once, OnceLock};

    use super::places;

    /// The previous handling of the signal.
    static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

    pub fn install() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let mut before = MaybeUninit::<libc::sigaction>::zeroed();
            // SAFETY: only reads the current action, and zeros are a valid value of the result.
            let before = unsafe {
                libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr());
                before.assume_init()
            };
            let _ = BEFORE.set(before);
            // SAFETY: zeros are a valid value: no signal is blocked in the handler.
            let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
            action.sa_sigaction = on_fault as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            // SAFETY: the handler has the signature that the flags declare, and does only what is
            // allowed in one. If the system refuses it, such a fault ends the process, as before.
            unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) };
        });
    }

    extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the system passes a filled-in structure, which has an address for faults.
        let (code, at) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
        // A signal sent by a process has no address.
        if code > 0 && become_zeros(at) {
            return;
        }
        match BEFORE.get() {
            Some(before) if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN => {
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
                    // SAFETY: it was registered as a handler of this kind.
                    let handler = unsafe { std::mem::transmute::<usize, Handler>(before.sa_sigaction) };
                    handler(signal, info, context);
                } else {
                    // SAFETY: as above.
                    let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(before.sa_sigaction) };
                    handler(signal);
                }
            }
            // SAFETY: the fault comes again as soon as this returns, and then ends the process.
            _ => unsafe {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
            },
        }
    }

    /// Replaces the mapping with this address by zeros; false if there is none.
    fn become_zeros(at: usize) -> bool {
        for place in places() {
            let (start, len) = (place.start.load(Ordering::Acquire), place.len.load(Ordering::Relaxed));
            // The mapping covers its last page to the end.
            let page = super::super::page_size();
            if start == 0 || !(start..start + len.next_multiple_of(page)).contains(&at) {
                continue;
            }
            // Set first: a thread that reads a zero finds it set.
            place.has_failed.store(true, Ordering::Release);
            // SAFETY: the range is one mapping, which exists as long as it has an entry, and it is
            // only handed out as `&[u8]`. Its bytes change under these slices, as they do under a
            // truncation. The functions called here are allowed in a handler.
            unsafe {
                let errno = *libc::__errno_location();
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
                let zeros = libc::mmap(start as *mut c_void, len, libc::PROT_READ, flags, -1, 0);
                *libc::__errno_location() = errno;
                return zeros != libc::MAP_FAILED;
            }
        }
        false
    }
}

/// On other systems such a fault ends the process.
#[cfg(not(target_os = "linux"))]
mod handler {
    pub fn install() {}
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs::File;

    use folio_testing::Folder;

    use super::super::Mapped;

    /// Without the handler, the first read behind the new end kills this process.
    #[test]
    fn a_file_truncated_under_its_mapping_reads_as_zeros_and_says_so() {
        let folder = Folder::new("guard");
        let (path, other) = (folder.join("file"), folder.join("other"));
        let check = |keep: u64, open: fn(&std::path::Path) -> crate::Result<std::sync::Arc<Mapped>>| {
            std::fs::write(&path, vec![7; 1 << 20]).unwrap();
            std::fs::write(&other, vec![8; 1 << 20]).unwrap();
            let (map, whole) = (open(&path).unwrap(), open(&other).unwrap());
            assert!(map.check().is_ok() && map.bytes()[(1 << 20) - 1] == 7);
            File::options().write(true).open(&path).unwrap().set_len(keep).unwrap();
            // `check` reports it before any read, too.
            let told = map.check().unwrap_err().to_string();
            assert!(told.contains(path.to_str().unwrap()) && told.contains("1048576"), "{told}");
            assert!(!map.has_failed());
            let readers: Vec<u64> = std::thread::scope(|scope| {
                let sum = || map.bytes().iter().map(|&byte| u64::from(byte)).sum();
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(sum)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(readers.iter().all(|&sum| sum <= 7 * keep), "{readers:?} of {keep} bytes");
            assert!(map.has_failed(), "cut to {keep}");
            let told = map.check().unwrap_err().to_string();
            assert!(told.contains(path.to_str().unwrap()), "{told}");
            assert!(whole.check().is_ok() && whole.bytes().iter().all(|&byte| byte == 8), "a neighbour is as it was");
            // A later mapping at the same address is a file of its own.
            drop(map);
            assert!(open(&other).unwrap().check().is_ok());
        };
        for keep in [0, 4096, 300_000] {
            check(keep, Mapped::open);
            check(keep, Mapped::open_whole);
        }
    }
}
