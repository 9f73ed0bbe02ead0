//! The other engine, built for this machine: llama.cpp's benchmark tools from its published sources.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::{prepare, process};

/// Where CMake comes from if the machine has none.
const CMAKE: &str = "cmake>=3.28,<5";

/// As fast as llama.cpp's authors make it for this machine, and nothing beyond the tools that are run.
const FLAGS: [&str; 8] = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
];

/// llama.cpp's programs.
pub struct Peer {
    pub bench: PathBuf,
    pub batched_bench: PathBuf,
    pub quantize: PathBuf,
}

impl Peer {
    /// Builds them in `folder` on first use.
    pub fn prepare(folder: &Path) -> Result<Self> {
        let program = |name: &str| folder.join("bin").join(name);
        let (bench, batched_bench) = (program("llama-bench"), program("llama-batched-bench"));
        let peer = Self { bench, batched_bench, quantize: program("llama-quantize") };
        if [&peer.bench, &peer.batched_bench, &peer.quantize].iter().all(|path| path.exists()) {
            return Ok(peer);
        }
        require_compiler()?;
        let cmake = cmake()?;
        let sources = prepare::llama_cpp()?;
        eprintln!("== building llama.cpp in {}: some minutes, once", folder.display());
        process::run(process::command(&cmake, &["-S"]).arg(sources).arg("-B").arg(folder).args(FLAGS))?;
        let mut build = process::command(&cmake, &["--build"]);
        build.arg(folder).args(["--parallel", "--target", "llama-bench", "llama-batched-bench", "llama-quantize"]);
        process::run(&mut build)?;
        Ok(peer)
    }
}

fn require_compiler() -> Result<()> {
    for (variable, usual) in [("CC", "cc"), ("CXX", "c++")] {
        let compiler = std::env::var(variable).unwrap_or_else(|_| usual.to_owned());
        if process::output(&mut process::command(&compiler, &["--version"])).is_err() {
            bail!(
                "building llama.cpp needs a C and a C++ compiler, but {compiler} does not run; install g++, or set CC and CXX"
            );
        }
    }
    if process::output(&mut process::command("make", &["--version"])).is_err() {
        bail!("building llama.cpp needs make");
    }
    Ok(())
}

/// The machine's, else one from a Python wheel.
fn cmake() -> Result<PathBuf> {
    let own = PathBuf::from("cmake");
    if process::output(&mut process::command(&own, &["--version"])).is_ok() {
        return Ok(own);
    }
    let python = prepare::venv("cmake", &[CMAKE]).context("there is no cmake, and it could not be installed by pip")?;
    Ok(python.with_file_name("cmake"))
}
