//! Runs other programs, and reports their failures in one line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The repository's root, independent of the current folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_path_buf()
}

/// A command that runs in the repository's root.
pub fn command(program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(root());
    command
}

/// Cargo as from a shell: with the variables that `cargo run` sets for this package, build scripts
/// would run again.
pub fn cargo(args: &[&str]) -> Command {
    let mut cargo = command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), args);
    let is_ours = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.to_str().is_some_and(is_ours)).for_each(|name| _ = cargo.env_remove(name));
    cargo
}

fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Runs it with its output on the terminal; fails when it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let line = line(command);
    let status = command.status().with_context(|| format!("could not start: {line}"))?;
    if !status.success() {
        bail!("failed ({status}): {line}");
    }
    Ok(())
}

/// Runs it and returns what it printed.
pub fn output(command: &mut Command) -> Result<String> {
    let line = line(command);
    let output = command.output().with_context(|| format!("could not start: {line}"))?;
    if !output.status.success() {
        bail!("failed ({}): {line}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    String::from_utf8(output.stdout).with_context(|| format!("output is not UTF-8: {line}"))
}

/// Runs a `cargo build` and returns the programs it made, or found made, by the names of their
/// targets.
pub fn programs(build: &mut Command) -> Result<BTreeMap<String, PathBuf>> {
    let printed = output(build.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit()))?;
    let messages = printed.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let program = |message: serde_json::Value| {
        Some((message["target"]["name"].as_str()?.to_owned(), message["executable"].as_str()?.into()))
    };
    Ok(messages.filter_map(program).collect())
}

/// Folio's release binary of a working tree, built now: compiled into `target`, or cargo's usual
/// place.
pub fn folio(tree: &Path, target: Option<&Path>) -> Result<PathBuf> {
    let mut build = cargo(&["build", "--release", "--package", "folio"]);
    if let Some(target) = target {
        build.env("CARGO_TARGET_DIR", target);
    }
    programs(build.current_dir(tree))?.remove("folio").context("cargo named no folio binary")
}
