//! The NEON kernels, run for real on a machine that has none: built for aarch64 and run by qemu.

use anyhow::Result;

use crate::{prepare, process};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

/// Runs the tests of the crate that holds the kernels. Says why when it cannot.
pub fn run() -> Result<()> {
    if !programs()? {
        return Ok(());
    }
    if let Err(error) = process::run(&mut process::command("rustup", &["--quiet", "target", "add", TARGET])) {
        eprintln!("skipped: no aarch64 standard library could be had: {error:#}");
        return Ok(());
    }
    // The kernels and what they are compared with are optimised as ever, what little else there is need not be.
    let mut tests = process::cargo(&["test", "--quiet", "--target", TARGET, "-p", "folio-device", "--lib"]);
    tests.args(["--config", "profile.dev.opt-level=0"]);
    tests.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    tests.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{EMULATOR} -L /usr/aarch64-linux-gnu"));
    process::run(&mut tests)
}

/// Whether a compiler and an emulator are here; on a continuous-integration machine they are installed.
pub fn programs() -> Result<bool> {
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        eprintln!("skipped: the emulated tests are for x86-64 Linux");
        return Ok(false);
    }
    prepare::programs(&[LINKER, EMULATOR], &["gcc-aarch64-linux-gnu", "qemu-user"], "the aarch64 tests")
}
