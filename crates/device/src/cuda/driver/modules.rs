//! The kernels of a device: prebuilt ones if they fit, otherwise from this machine's cache,
//! otherwise compiled now.

use std::ffi::CString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUmodule, CUresult};

use super::archive::{self, Cubin};
use super::context::{Context, DeviceInfo};
use super::error::check;
use super::nvrtc::Nvrtc;
use super::sources;
use crate::Result;

/// CUDA version of the prebuilt kernels; a driver of an older version cannot load them.
const PREBUILT_VERSION: u32 = 13_000;

/// Origin of a device's kernels.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    Prebuilt { architecture: String },
    Cached { file: PathBuf },
    Compiled { architecture: String, seconds: f32 },
}

impl fmt::Display for Origin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Prebuilt { architecture } => write!(out, "prebuilt for {architecture}"),
            Origin::Cached { file } => write!(out, "from {}", file.display()),
            Origin::Compiled { architecture, seconds } => {
                write!(out, "compiled for {architecture} in {seconds:.1} s")
            }
        }
    }
}

/// The requested kind of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernels {
    /// Prebuilt kernels if they fit the device.
    Prebuilt,
    /// PTX, as used on devices of later generations.
    Translated,
    CompiledHere,
}

/// All loaded modules. The context unloads them when it ends.
pub(super) struct Modules {
    handles: Vec<CUmodule>,
    origin: Origin,
    context: Arc<Context>,
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Modules {}
// SAFETY: as above.
unsafe impl Sync for Modules {}

impl Modules {
    pub fn load(context: &Arc<Context>, info: &DeviceInfo, cache: Option<&Path>, kernels: Kernels) -> Result<Modules> {
        let (cubins, origin) = find(info, cache, kernels)?;
        let mut modules = Modules { handles: Vec::new(), origin, context: context.clone() };
        context.bind()?;
        for cubin in &cubins {
            let mut handle = std::ptr::null_mut();
            // SAFETY: a whole cubin of this architecture, or PTX with a zero byte at its end, which
            // the driver copies; unloaded in `drop`.
            let code = unsafe { sys::cuModuleLoadData(&mut handle, cubin.image.as_ptr().cast()) };
            check(code, &format!("loading the kernels of {}", cubin.name))?;
            modules.handles.push(handle);
        }
        Ok(modules)
    }

    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The function of this name, from whichever module has it.
    pub fn function(&self, name: &str) -> Option<CUfunction> {
        let text = CString::new(name).ok()?;
        self.handles.iter().find_map(|module| {
            let mut function = std::ptr::null_mut();
            // SAFETY: a loaded module and a valid string; writes one handle.
            let code = unsafe { sys::cuModuleGetFunction(&mut function, *module, text.as_ptr()) };
            (code == CUresult::CUDA_SUCCESS).then_some(function)
        })
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            for module in &self.handles {
                // SAFETY: loaded in `load`, unloaded once; kernels are used through the device that
                // owns this.
                unsafe { sys::cuModuleUnload(*module) };
            }
        }
    }
}

fn find(info: &DeviceInfo, cache: Option<&Path>, kernels: Kernels) -> Result<(Vec<Cubin>, Origin)> {
    let prebuilt = match kernels {
        Kernels::Prebuilt => prebuilt_architecture(info.capability),
        Kernels::Translated => Some(PTX),
        Kernels::CompiledHere => None,
    };
    if info.driver_version >= PREBUILT_VERSION
        && let Some(architecture) = prebuilt
        && let Some(cubins) = archive::prebuilt(architecture)
    {
        return Ok((cubins, Origin::Prebuilt { architecture: architecture.to_owned() }));
    }
    compiled_here(&own_architecture(info.capability), info.driver_version, cache)
}

/// Kernels from the cache, or compiled and stored there.
pub(super) fn compiled_here(
    architecture: &str,
    driver_version: u32,
    cache: Option<&Path>,
) -> Result<(Vec<Cubin>, Origin)> {
    let file = cache.map(|folder| cache_file(folder, architecture));
    if let Some(file) = &file
        && let Ok(bytes) = std::fs::read(file)
        && let Some(cubins) = archive::unpack(&bytes)
    {
        return Ok((cubins, Origin::Cached { file: file.clone() }));
    }
    let start = std::time::Instant::now();
    let cubins = Nvrtc::open(driver_version)?.compile_all(architecture)?;
    let seconds = start.elapsed().as_secs_f32();
    if let Some(file) = &file {
        // A cache that cannot be written costs the next start some seconds, no more.
        let _ = write_whole(file, &archive::pack(&cubins));
    }
    Ok((cubins, Origin::Compiled { architecture: architecture.to_owned(), seconds }))
}

/// The name has everything that the content depends on; the sources' hash covers the options.
fn cache_file(folder: &Path, architecture: &str) -> PathBuf {
    let hash: String = sources::hash()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    folder.join("kernels").join(format!("{architecture}-{hash}.bin"))
}

/// Written beside it and renamed: another process sees the whole file or none.
fn write_whole(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let draft = file.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&draft, bytes)?;
    std::fs::rename(&draft, file).inspect_err(|_| _ = std::fs::remove_file(&draft))
}

/// The driver of any device from 9.0 on translates this when it loads it, and stores the result in
/// its own cache.
const PTX: &str = "compute_90";

/// Code for 8.0 runs on all later 8.x, and those from 8.9 on have eight-bit floats; code for 9.0a
/// runs there alone.
fn prebuilt_architecture(capability: (u32, u32)) -> Option<&'static str> {
    Some(match capability {
        (8, 0..=8) => "sm_80",
        (8, _) => "sm_89",
        (9, 0) => "sm_90a",
        (10.., _) => PTX,
        _ => return None,
    })
}

/// The architecture that NVRTC compiles for.
fn own_architecture(capability: (u32, u32)) -> String {
    let (major, minor) = capability;
    let own_instructions = if matches!(major, 9..=11) { "a" } else { "" };
    format!("sm_{major}{minor}{own_instructions}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_capability_gets_code_that_runs_there() {
        let cases = [
            ((8, 0), Some("sm_80"), "sm_80"),
            ((8, 6), Some("sm_80"), "sm_86"),
            ((8, 7), Some("sm_80"), "sm_87"),
            ((8, 9), Some("sm_89"), "sm_89"),
            ((9, 0), Some("sm_90a"), "sm_90a"),
            ((10, 3), Some("compute_90"), "sm_103a"),
            ((12, 1), Some("compute_90"), "sm_121"),
            ((7, 5), None, "sm_75"),
        ];
        for (capability, prebuilt, own) in cases {
            assert_eq!(prebuilt_architecture(capability), prebuilt, "{capability:?}");
            assert_eq!(own_architecture(capability), own, "{capability:?}");
        }
    }

    #[test]
    fn a_cache_is_read_where_its_sources_are_the_same() {
        let folder = std::env::temp_dir().join(format!("folio-kernels-{}", std::process::id()));
        let cubins = vec![Cubin { name: "probe.cu".to_owned(), image: vec![7; 100] }];
        let file = cache_file(&folder, "sm_90a");
        write_whole(&file, &archive::pack(&cubins)).unwrap();
        let found = compiled_here("sm_90a", 13_000, Some(&folder)).unwrap();
        assert_eq!(found, (cubins, Origin::Cached { file: file.clone() }));
        assert_eq!(std::fs::read_dir(file.parent().unwrap()).unwrap().count(), 1, "no drafts are left");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
