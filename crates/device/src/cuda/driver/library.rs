//! Optional libraries of a machine, loaded when they are needed.

use std::ffi::{CStr, CString, c_void};

use super::error::CudaError;
use crate::Result;

/// Toolkits' folders, for a loader that does not know them.
const FOLDERS: &[&str] = &[
    "",
    "/usr/local/cuda/lib64/",
    "/usr/local/cuda/targets/x86_64-linux/lib/",
    "/usr/local/cuda/targets/sbsa-linux/lib/",
    "/opt/cuda/lib64/",
];

/// A loaded library. It stays loaded, because its background work may not outlive it.
#[derive(Clone, Copy)]
pub(crate) struct Library {
    name: &'static str,
    handle: *mut c_void,
}

// SAFETY: a handle of the loader, never closed.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// The first of these files that can be loaded, by the loader's own search or from a toolkit's
    /// folder.
    pub fn open(name: &'static str, files: &[&str], advice: &'static str) -> Result<Library> {
        for folder in FOLDERS {
            for file in files {
                let Ok(path) = CString::new(format!("{folder}{file}")) else { continue };
                // SAFETY: a valid string; the library's makers answer for its initialisers. Global,
                // since libraries of a toolkit look for each other's symbols.
                let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
                if !handle.is_null() {
                    return Ok(Library { name, handle });
                }
            }
        }
        Err(CudaError::NoLibrary { library: name, looked_for: files.join(", "), advice }.into())
    }

    /// The address of a function.
    ///
    /// # Safety
    /// `F` must be the function's type.
    pub unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F> {
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>(), "{symbol} is no function pointer");
        let text = CString::new(symbol).expect("a symbol has no zero byte");
        // SAFETY: a loaded library and a valid string.
        let address = unsafe { libc::dlsym(self.handle, text.as_ptr()) };
        if address.is_null() {
            return Err(CudaError::NoSymbol { library: self.name.to_owned(), symbol }.into());
        }
        // SAFETY: not null, as large as a pointer, and the caller promises the type.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }

    /// The file that a function was loaded from.
    pub fn file_of(function: *const c_void) -> Option<String> {
        // SAFETY: all fields are pointers, for which zero is valid.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: an address of this process; fills `info`.
        if unsafe { libc::dladdr(function, &mut info) } == 0 || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the loader's own string, which lives as long as the library.
        Some(unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
    }
}
