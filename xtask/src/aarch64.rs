//! The NEON kernels, run for real on a machine that has none: Debian's packages of a Rust compiler with an aarch64
//! standard library, unpacked under `target/xtask` without touching the system, and qemu to run what it builds.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{prepare, process};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

/// Runs the tests of the crates that hold code for aarch64. Says why when it cannot.
pub fn run() -> Result<()> {
    let Some(home) = toolchain()? else { return Ok(()) };
    let usr = home.join("root").join("usr");
    let libraries = [usr.join("lib/x86_64-linux-gnu"), usr.join("lib")];
    // The unpacked compiler finds its own libraries by this path; a wrapper keeps it away from every other program.
    let wrapper = home.join("rustc");
    let paths = libraries.map(|path| path.display().to_string()).join(":");
    let script = format!(
        "#!/bin/sh\nLD_LIBRARY_PATH={paths} exec {}/bin/rustc --sysroot {} \"$@\"\n",
        usr.display(),
        usr.display()
    );
    std::fs::write(&wrapper, script)?;
    process::run(process::command("chmod", &["+x"]).arg(&wrapper))?;
    let mut tests = process::cargo(&["test", "--target", TARGET, "-p", "folio-formats", "-p", "folio-device"]);
    tests.args(["--lib", "--tests"]).arg("--target-dir").arg(process::root().join("target").join("aarch64"));
    tests.env("RUSTC", &wrapper);
    tests.env_remove("RUSTUP_TOOLCHAIN");
    tests.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    tests.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{EMULATOR} -L /usr/aarch64-linux-gnu"));
    process::run(&mut tests)
}

/// The folder of the unpacked compiler, or none where this system cannot have it.
fn toolchain() -> Result<Option<PathBuf>> {
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) || !found("apt-get") || !found("dpkg-deb") {
        eprintln!("skipped: the aarch64 tests need an x86-64 Debian with apt");
        return Ok(None);
    }
    if !found(LINKER) || !found(EMULATOR) {
        if std::env::var_os("CI").is_none() {
            eprintln!("skipped: the aarch64 tests need the packages gcc-aarch64-linux-gnu and qemu-user");
            return Ok(None);
        }
        process::run(&mut process::command("apt-get", &["-qq", "update"]))?;
        process::run(&mut process::command("apt-get", &["-qq", "install", "-y", "gcc-aarch64-linux-gnu", "qemu-user"]))?;
    }
    let home = prepare::cache().join("aarch64");
    if !home.join("complete").exists() {
        match fetch(&home) {
            Ok(()) => {}
            Err(error) => {
                eprintln!("skipped: no aarch64 standard library could be had: {error:#}");
                return Ok(None);
            }
        }
    }
    Ok(Some(home))
}

fn found(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Downloads the compiler and both standard libraries with a private package list, and unpacks them.
fn fetch(home: &Path) -> Result<()> {
    for folder in ["lists/partial", "cache/archives/partial", "debs", "root"] {
        std::fs::create_dir_all(home.join(folder))?;
    }
    let apt = Apt { home };
    process::run(apt.command("apt-get").args(["-qq", "update"]))?;
    let runtime = apt.dependency("libstd-rust-web-dev:amd64", "libstd-rust-web-")?;
    let llvm = apt.dependency(&format!("{runtime}:amd64"), "libllvm")?;
    let packages = [
        "rustc-web:amd64".to_string(),
        "libstd-rust-web-dev:amd64".to_string(),
        format!("libstd-rust-web-dev:arm64"),
        format!("{runtime}:amd64"),
        format!("{llvm}:amd64"),
    ];
    process::run(apt.command("apt-get").args(["-qq", "download"]).args(&packages).current_dir(home.join("debs")))?;
    for entry in std::fs::read_dir(home.join("debs"))? {
        process::run(process::command("dpkg-deb", &["-x"]).arg(entry?.path()).arg(home.join("root")))?;
    }
    std::fs::write(home.join("complete"), "")?;
    Ok(())
}

/// apt with its lists and cache under `home`, for both architectures.
struct Apt<'a> {
    home: &'a Path,
}

impl Apt<'_> {
    fn command(&self, program: &str) -> Command {
        let mut command = process::command(program, &[]);
        let path = |name: &str| self.home.join(name).display().to_string();
        for option in [
            "APT::Architectures::=amd64".to_string(),
            "APT::Architectures::=arm64".to_string(),
            format!("Dir::State::Lists={}", path("lists")),
            format!("Dir::Cache={}", path("cache")),
            "APT::Sandbox::User=root".to_string(),
            "Debug::NoLocking=1".to_string(),
        ] {
            command.arg("-o").arg(option);
        }
        command
    }

    /// The package that `package` depends on whose name starts so.
    fn dependency(&self, package: &str, prefix: &str) -> Result<String> {
        let text = process::output(self.command("apt-cache").args(["depends", package]))?;
        let names = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let found = names.map(str::trim).find(|name| name.starts_with(prefix)).map(str::to_string);
        match found.with_context(|| format!("{package} depends on no {prefix}*")) {
            Ok(name) => Ok(name.trim_end_matches(":amd64").to_string()),
            Err(error) => bail!(error),
        }
    }
}
