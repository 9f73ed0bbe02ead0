//! The engines that Folio is compared with, built for this machine: llama.cpp's tools from its
//! published sources, and OpenVINO GenAI from its wheel.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{prepare, process};

/// Source of CMake if the machine has none.
const CMAKE: &str = "cmake>=3.28,<5";
const OPENVINO: &str = "openvino-genai==2026.4.1.0";

/// The fastest build for this machine by llama.cpp's own options, without unused tools: the server
/// comes without its web page, which npm would fetch or build.
const FLAGS: [&str; 9] = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
];

/// GCC 12 assumes that the intrinsic reads eight bytes and writes the other 56 behind it, and a
/// machine with AMX then ends llama.cpp at an illegal instruction.
const TILES: &str = "\
#pragma once
#ifdef __AMX_TILE__
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile(\"ldtilecfg %0\" ::\"m\"(*(const char(*)[64])(config)) : \"memory\")
#endif
";

const PROGRAMS: [&str; 4] = ["llama-bench", "llama-batched-bench", "llama-quantize", "llama-server"];

/// llama.cpp's programs.
pub struct LlamaCpp {
    pub bench: PathBuf,
    pub batched_bench: PathBuf,
    pub quantize: PathBuf,
    pub server: PathBuf,
}

impl LlamaCpp {
    /// Their paths, before or after they are built.
    pub fn under(home: &Path) -> Self {
        let [bench, batched_bench, quantize, server] =
            PROGRAMS.map(|name| home.join("llama-build").join("bin").join(name));
        Self { bench, batched_bench, quantize, server }
    }

    /// Builds them on first use.
    pub fn prepare(&self, home: &Path) -> Result<()> {
        if [&self.bench, &self.batched_bench, &self.quantize, &self.server].iter().all(|path| path.exists()) {
            return Ok(());
        }
        let (cmake, folder) = (cmake(home)?, home.join("llama-build"));
        let sources = prepare::llama_cpp_at(&home.join("llama-cpp"))?;
        eprintln!("== building llama.cpp in {}: many minutes, once", folder.display());
        let mut configure = process::command(&cmake, &["-S"]);
        configure.arg(sources).arg("-B").arg(&folder).args(FLAGS);
        if cfg!(target_arch = "x86_64") {
            let header = home.join("tiles.h");
            std::fs::write(&header, TILES)?;
            configure.arg(format!("-DCMAKE_CXX_FLAGS=-include {}", header.display()));
        }
        process::run(&mut configure)?;
        process::run(&mut build(&cmake, &folder))
    }
}

/// As many compilers at a time as there are cores: without a number CMake leaves it to make, which
/// starts as many as there are files.
fn build(cmake: &Path, folder: &Path) -> Command {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut build = process::command(cmake, &["--build"]);
    build.arg(folder).arg("--parallel").arg(cores.to_string()).arg("--target").args(PROGRAMS);
    build
}

/// The machine's CMake, else one from a Python wheel.
fn cmake(home: &Path) -> Result<PathBuf> {
    let own = PathBuf::from("cmake");
    if process::output(&mut process::command(&own, &["--version"])).is_ok() {
        return Ok(own);
    }
    let python = prepare::venv_at(&home.join("cmake"), &[CMAKE]);
    Ok(python.context("there is no cmake, and it could not be installed by pip")?.with_file_name("cmake"))
}

/// OpenVINO's settings for this machine. If the processor has AMX but a hypervisor hides the
/// permitted tile shapes, it would otherwise end at an illegal instruction.
pub fn openvino_settings() -> Option<(&'static str, &'static str)> {
    #[cfg(target_arch = "x86_64")]
    {
        let (features, palettes) = (std::arch::x86_64::__cpuid_count(7, 0).edx, std::arch::x86_64::__cpuid(0x1d).eax);
        if features & 1 << 24 != 0 && palettes == 0 {
            return Some(("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"));
        }
    }
    None
}

/// A Python that has OpenVINO GenAI; made under `home` on first use.
pub fn openvino(home: &Path) -> Result<PathBuf> {
    prepare::venv_at(&home.join("openvino"), &[OPENVINO])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_cpp_is_built_by_as_many_compilers_as_there_are_cores() {
        let build = build(Path::new("cmake"), Path::new("/build"));
        let words: Vec<_> = build.get_args().map(|word| word.to_string_lossy()).collect();
        let parallel = words.iter().position(|word| word == "--parallel").expect("it says how many");
        let number = words[parallel + 1].parse().expect("a number");
        assert_eq!(std::thread::available_parallelism().map(usize::from).ok(), Some(number), "{words:?}");
    }
}
