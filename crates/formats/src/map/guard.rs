//! Pages of a mapped file that cannot be had any more: the file was truncated by another process, or its disk failed. The system
//! tells whoever reads such a page by SIGBUS, which would end the process. Here the mapping becomes zeros as a whole, and it is
//! known from then on that its bytes are not the file's: [`Watch::has_failed`].
//!
//! The handler runs in the middle of anything, so it takes no lock and no memory: it walks a list whose places are never freed, calls
//! `mmap`, and returns to the read, which then gives zeros. A fault anywhere else goes to the handler that was there before.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// A mapping that is watched for as long as this lives. It must go before the mapping does.
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
    /// Watches the mapping that has those bytes.
    pub fn new(bytes: &[u8]) -> Self {
        handler::install();
        let place = places().find(|place| !place.is_taken.swap(true, Ordering::AcqRel)).unwrap_or_else(add_place);
        place.has_failed.store(false, Ordering::Relaxed);
        place.len.store(bytes.len(), Ordering::Relaxed);
        // Last: the handler looks at a place once it has a start.
        place.start.store(bytes.as_ptr() as usize, Ordering::Release);
        Self(place)
    }

    /// Whether there was a page that could not be had. All bytes may be zeros then.
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

/// A place of its own, which is taken. There are as many as there were mappings at once.
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

    /// What was done about the signal before.
    static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

    pub fn install() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let mut before = MaybeUninit::<libc::sigaction>::zeroed();
            // SAFETY: asks alone, and zeros are a value of what is filled in.
            let before = unsafe {
                libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr());
                before.assume_init()
            };
            let _ = BEFORE.set(before);
            // SAFETY: zeros are a value of it: no signal is blocked meanwhile.
            let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
            action.sa_sigaction = on_fault as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            // SAFETY: the handler is of the kind that the flags say, and does only what is allowed in one. If it is refused,
            // such a fault ends the process, as it would have.
            unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) };
        });
    }

    extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the system hands over what it has filled in, with an address for faults.
        let (code, at) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
        // One that a process sent has no address.
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

    /// Replaces the mapping that has this address by zeros; false if there is none.
    fn become_zeros(at: usize) -> bool {
        for place in places() {
            let (start, len) = (place.start.load(Ordering::Acquire), place.len.load(Ordering::Relaxed));
            // The last page is the mapping's to its end.
            let page = super::super::page_size();
            if start == 0 || !(start..start + len.next_multiple_of(page)).contains(&at) {
                continue;
            }
            // First: whoever reads a zero finds it set.
            place.has_failed.store(true, Ordering::Release);
            // SAFETY: the range is one mapping, there for as long as it has a place, of which only `&[u8]`s are handed out; bytes
            // change under them, as they do for whoever truncates the file. What is called here may be called in a handler.
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

/// Elsewhere such a fault ends the process.
#[cfg(not(target_os = "linux"))]
mod handler {
    pub fn install() {}
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs::File;

    use folio_testing::Folder;

    use super::super::Mapped;

    /// Unless somebody takes care of it, the first read behind the new end kills this process.
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
            // Told before anybody meets it, too.
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
            // What comes to lie in the same place is a file of its own.
            drop(map);
            assert!(open(&other).unwrap().check().is_ok());
        };
        for keep in [0, 4096, 300_000] {
            check(keep, Mapped::open);
            check(keep, Mapped::open_whole);
        }
    }
}
