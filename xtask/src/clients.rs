//! `cargo xtask clients`: the server as real clients use it, and as Schemathesis reads its
//! description.
//!
//! The tests are Python, in `tests/clients`; they start the binary themselves, since many need
//! flags of their own. This module builds it and installs the packages, each at the version that
//! `requirements.txt` names.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::skips::Skips;
use crate::{prepare, process};

const FOLDER: &str = "tests/clients";

/// `only`: arguments for pytest, such as `-k chat`; or `schemas`, and arguments for Schemathesis.
pub fn run(only: &[String]) -> Result<()> {
    let python = python()?;
    let binary = binary()?;
    match only.split_first() {
        None => {
            tests(&python, &binary, &[])?;
            schemas(&python, &binary, &[])
        }
        Some((first, rest)) if first == "schemas" => schemas(&python, &binary, rest),
        Some(_) => tests(&python, &binary, only),
    }
}

/// As a stage of the tests.
pub fn stage() -> Result<Skips> {
    match python() {
        Ok(_) => run(&[]).map(|()| Skips::none()),
        Err(error) => Skips::stage("clients", &format!("no Python clients: {error:#}")),
    }
}

/// The Python environment of the tests, with the packages that they need.
pub fn python() -> Result<PathBuf> {
    let path = process::root().join(FOLDER).join("requirements.txt");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    prepare::venv("clients", &lines.collect::<Vec<_>>())
}

/// The binary that tests run, built as a dependency of one of them: after the other tests nothing
/// is left to compile.
fn binary() -> Result<PathBuf> {
    let mut build = process::cargo(&["test", "--quiet", "--workspace", "--no-run", "--test", "blackbox"]);
    process::programs(&mut build)?.remove("folio").context("cargo named no folio binary")
}

fn tests(python: &Path, binary: &Path, more: &[String]) -> Result<()> {
    let fixed = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:schemathesis", "--quiet", "--durations=5", FOLDER];
    process::run(set_up(&mut process::command(python, &fixed), binary).args(more))
}

fn schemas(python: &Path, binary: &Path, more: &[String]) -> Result<()> {
    process::run(set_up(&mut process::command(python, &["tests/clients/schemas.py"]), binary).args(more))
}

fn set_up<'a>(command: &'a mut std::process::Command, binary: &Path) -> &'a mut std::process::Command {
    // Nothing of the tests asks the network, and no library may phone home.
    let proxies = ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];
    proxies.iter().fold(&mut *command, |command, name| command.env_remove(name));
    command.env("FOLIO_BIN", binary).env("PYTHONDONTWRITEBYTECODE", "1").env("LANGSMITH_TRACING", "false")
}
