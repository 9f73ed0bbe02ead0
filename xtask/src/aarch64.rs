//! The NEON kernels, run for real on a machine that has none: built for aarch64 and run by qemu.

use std::process::Command;

use anyhow::Result;

use crate::process;

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

/// Runs the tests of the crate that holds the kernels. Says why when it cannot; on a continuous-integration machine the
/// packages it needs are installed.
pub fn run() -> Result<()> {
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        eprintln!("skipped: the emulated tests are for x86-64 Linux");
        return Ok(());
    }
    if !found(LINKER) || !found(EMULATOR) {
        if std::env::var_os("CI").is_none() {
            eprintln!("skipped: the aarch64 tests need the packages gcc-aarch64-linux-gnu and qemu-user");
            return Ok(());
        }
        process::run(&mut process::command("apt-get", &["-qq", "update"]))?;
        process::run(&mut process::command(
            "apt-get",
            &["-qq", "install", "-y", "gcc-aarch64-linux-gnu", "qemu-user"],
        ))?;
    }
    if let Err(error) = process::run(&mut process::command("rustup", &["--quiet", "target", "add", TARGET])) {
        eprintln!("skipped: no aarch64 standard library could be had: {error:#}");
        return Ok(());
    }
    let mut tests = process::cargo(&["test", "--quiet", "--target", TARGET, "-p", "folio-device", "--lib"]);
    tests.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    tests.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{EMULATOR} -L /usr/aarch64-linux-gnu"));
    process::run(&mut tests)
}

fn found(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}
