//! The runtime compiler, for architectures without prebuilt kernels and for changed sources.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::archive::Cubin;
use super::error::CudaError;
use super::library::Library;
use super::sources::{self, SOURCES, Source};
use crate::Result;

type Program = *mut c_void;

/// The functions of libnvrtc that are used.
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    message: unsafe extern "C" fn(c_int) -> *const c_char,
}

const ADVICE: &str = "there are no prebuilt kernels for this GPU and driver, so NVIDIA's run-time compiler is needed: \
                      install the CUDA toolkit or the Python package nvidia-cuda-nvrtc, and put its folder on the \
                      loader's path";

impl Nvrtc {
    /// `newest`: the CUDA version of the driver; code of a later compiler may not load.
    pub fn open(newest: u32) -> Result<Nvrtc> {
        let files: &[&str] = if newest >= 13_000 {
            &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
        } else {
            &["libnvrtc.so.12", "libnvrtc.so"]
        };
        let library = Library::open("NVRTC", files, ADVICE)?;
        load_builtins(&library)?;
        // SAFETY: the types are those of nvrtc.h, the same in all versions since 11.1.
        unsafe {
            Ok(Nvrtc {
                create: library.function("nvrtcCreateProgram")?,
                compile: library.function("nvrtcCompileProgram")?,
                log_size: library.function("nvrtcGetProgramLogSize")?,
                log: library.function("nvrtcGetProgramLog")?,
                cubin_size: library.function("nvrtcGetCUBINSize")?,
                cubin: library.function("nvrtcGetCUBIN")?,
                destroy: library.function("nvrtcDestroyProgram")?,
                message: library.function("nvrtcGetErrorString")?,
            })
        }
    }

    /// Compiles all files for the architecture, several at a time.
    pub fn compile_all(&self, architecture: &str) -> Result<Vec<Cubin>> {
        let files: Vec<&Source> = SOURCES.iter().filter(|source| source.is_for(architecture)).collect();
        let next = AtomicUsize::new(0);
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(files.len());
        let work = || -> Result<Vec<(usize, Cubin)>> {
            let mut done = Vec::new();
            while let Some((index, file)) = take(&next, &files) {
                done.push((index, self.compile(file, architecture)?));
            }
            Ok(done)
        };
        let mut cubins = std::thread::scope(|scope| -> Result<Vec<(usize, Cubin)>> {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let mut all = Vec::new();
            for worker in workers {
                all.extend(worker.join().expect("a compiling thread does not panic")?);
            }
            Ok(all)
        })?;
        cubins.sort_by_key(|(index, _)| *index);
        Ok(cubins.into_iter().map(|(_, cubin)| cubin).collect())
    }

    fn compile(&self, source: &Source, architecture: &str) -> Result<Cubin> {
        let headers: Vec<&Source> = SOURCES.iter().filter(|source| source.is_header()).collect();
        let header_texts = c_strings(headers.iter().map(|header| header.text));
        let header_names = c_strings(headers.iter().map(|header| header.name));
        let (texts, names) = (pointers(&header_texts), pointers(&header_names));
        let (text, name) = (c_string(source.text), c_string(source.name));
        let mut program = Compilation { nvrtc: self, program: std::ptr::null_mut() };
        // SAFETY: all strings and arrays live during the call, which copies them.
        let code = unsafe {
            let count = headers.len() as c_int;
            (self.create)(&mut program.program, text.as_ptr(), name.as_ptr(), count, texts.as_ptr(), names.as_ptr())
        };
        self.check(code, "nvrtcCreateProgram")?;
        let target = format!("--gpu-architecture={architecture}");
        let mut options = vec![c_string(&target)];
        options.extend(sources::options().map(c_string));
        let option_pointers = pointers(&options);
        // SAFETY: a program and strings that live during the call.
        let code = unsafe { (self.compile)(program.program, options.len() as c_int, option_pointers.as_ptr()) };
        if code != 0 {
            let log = format!("{}\n{}", self.text_of(code), program.log());
            let (file, architecture) = (source.name.to_owned(), architecture.to_owned());
            return Err(CudaError::Compile { file, architecture, log }.into());
        }
        let mut bytes = 0;
        // SAFETY: a compiled program; writes one size.
        self.check(unsafe { (self.cubin_size)(program.program, &mut bytes) }, "nvrtcGetCUBINSize")?;
        let mut image = vec![0; bytes];
        // SAFETY: the buffer has the size that was just requested.
        self.check(unsafe { (self.cubin)(program.program, image.as_mut_ptr().cast()) }, "nvrtcGetCUBIN")?;
        Ok(Cubin { name: source.name.to_owned(), image })
    }

    fn check(&self, code: c_int, what: &'static str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        Err(CudaError::Library { library: "NVRTC", what, message: self.text_of(code) }.into())
    }

    fn text_of(&self, code: c_int) -> String {
        // SAFETY: returns a constant string for any code.
        unsafe { CStr::from_ptr((self.message)(code)) }.to_string_lossy().into_owned()
    }
}

/// NVRTC looks for a second library by its bare name, which fails if the loader does not know the
/// folder.
fn load_builtins(library: &Library) -> Result<()> {
    // SAFETY: the type is that of nvrtc.h.
    let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = unsafe { library.function("nvrtcVersion")? };
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two numbers.
    unsafe { version(&mut major, &mut minor) };
    if let Some(file) = Library::file_of(version as *const c_void)
        && let Some(folder) = Path::new(&file).parent()
    {
        let path = folder.join(format!("libnvrtc-builtins.so.{major}.{minor}"));
        // If it is elsewhere, NVRTC finds it itself or reports that when it compiles.
        let _ = Library::open("NVRTC's builtins", &[&path.to_string_lossy()], ADVICE);
    }
    Ok(())
}

/// A program of the compiler, destroyed with it.
struct Compilation<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Compilation<'_> {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: a program; writes one size.
        if unsafe { (self.nvrtc.log_size)(self.program, &mut bytes) } != 0 || bytes == 0 {
            return String::new();
        }
        let mut text = vec![0_u8; bytes];
        // SAFETY: the buffer has the size that was just requested; the last byte is zero.
        unsafe { (self.nvrtc.log)(self.program, text.as_mut_ptr().cast()) };
        text.pop();
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Drop for Compilation<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: made by `create`, destroyed once.
            unsafe { (self.nvrtc.destroy)(&mut self.program) };
        }
    }
}

fn take<'a>(next: &AtomicUsize, files: &[&'a Source]) -> Option<(usize, &'a Source)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    files.get(index).map(|file| (index, *file))
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("sources and options have no zero byte")
}

fn c_strings<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<CString> {
    texts.map(c_string).collect()
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}
