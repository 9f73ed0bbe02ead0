//! `cargo xtask kernels`: the GPU kernels compiled for every architecture, with NVRTC from PyPI; no GPU is needed.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::{prepare, process};

/// The compiler whose code travels in the binary.
const PACKAGES: &[&str] = &["nvidia-cuda-nvrtc==13.0.88"];
const SCRIPT: &str = "crates/device/src/cuda/kernels/compile.py";

/// Writes the archives; `--check` writes nothing and fails on a warning, and so does it with names of files.
pub fn run(args: &[String]) -> Result<()> {
    compile(&python()?, args)
}

/// As a stage of the tests: everything still compiles, without a warning. What did not change since the last time is
/// not compiled again. On a laptop without a network it says that it skips.
pub fn stage() -> Result<()> {
    match python() {
        Ok(python) => compile(&python, &["--check".to_owned()]),
        Err(error) if std::env::var_os("CI").is_none() => {
            eprintln!("warning: no compiler for kernels, they are not compiled: {error:#}");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// What the compiler is installed in.
pub fn python() -> Result<PathBuf> {
    prepare::venv("nvrtc", PACKAGES)
}

fn compile(python: &Path, args: &[String]) -> Result<()> {
    let objects = prepare::cache().join("kernel-objects");
    process::run(process::command(python, &[SCRIPT]).arg(objects).args(args))
}
