//! The tests of the NEON kernels on an x86-64 machine: built for aarch64 and run by qemu.

use anyhow::Result;

use crate::skips::Skips;
use crate::{prepare, process};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

const STAGE: &str = "aarch64";

/// Runs the tests of the crate that holds the kernels.
pub fn run() -> Result<Skips> {
    if let Some(skips) = programs()? {
        return Ok(skips);
    }
    if let Err(error) = process::run(&mut process::command("rustup", &["--quiet", "target", "add", TARGET])) {
        return Skips::stage(STAGE, &format!("no standard library for {TARGET}: {error:#}"));
    }
    // The kernels and their references are optimized as usual; the small rest need not be.
    let mut tests = process::cargo(&["test", "--quiet", "--target", TARGET, "-p", "folio-device", "--lib"]);
    tests.args(["--config", "profile.dev.opt-level=0"]);
    tests.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    tests.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{EMULATOR} -L /usr/aarch64-linux-gnu"));
    process::run(&mut tests)?;
    Ok(Skips::none())
}

/// `None`: a cross compiler and an emulator are here. A machine of continuous integration installs
/// them.
pub fn programs() -> Result<Option<Skips>> {
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        return Skips::stage(STAGE, "the emulator is for x86-64 Linux").map(Some);
    }
    prepare::programs(STAGE, &[LINKER, EMULATOR], &["gcc-aarch64-linux-gnu", "qemu-user"])
}
