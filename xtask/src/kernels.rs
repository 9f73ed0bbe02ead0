//! `cargo xtask kernels`: compiles the GPU kernels for every architecture, with NVRTC from PyPI; no
//! GPU is needed.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::skips::Skips;
use crate::{prepare, process};

/// The compiler of the archives in the binary.
const PACKAGES: &[&str] = &["nvidia-cuda-nvrtc==13.0.88"];
const SCRIPT: &str = "crates/device/src/cuda/kernels/compile.py";

/// Writes the archives. With `--check`, or names of files, it writes nothing and fails on a
/// warning.
pub fn run(args: &[String]) -> Result<()> {
    compile(&python()?, args)
}

/// As a stage of the tests: everything still compiles, without a warning. Kernels that did not
/// change since the last time are not compiled again.
pub fn stage() -> Result<Skips> {
    match python() {
        Ok(python) => compile(&python, &["--check".to_owned()]).map(|()| Skips::none()),
        Err(error) => Skips::stage("kernels", &format!("no compiler: {error:#}")),
    }
}

/// The Python environment of the compiler.
pub fn python() -> Result<PathBuf> {
    prepare::venv("nvrtc", PACKAGES)
}

fn compile(python: &Path, args: &[String]) -> Result<()> {
    let objects = prepare::cache().join("kernel-objects");
    process::run(process::command(python, &[SCRIPT]).arg(objects).args(args))
}
