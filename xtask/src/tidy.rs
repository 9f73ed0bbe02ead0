//! House rules that a machine can check in seconds.

mod language;
mod repeats;

use std::path::Path;

use anyhow::{Result, bail};

use crate::{graph, process};

/// The tracked tree must travel to a GPU machine beside a binary.
const TREE_MIB: u64 = 48;
const MODELS_MIB: u64 = 38;
const GOLDENS_MIB: u64 = 1;
/// Past this a file usually holds two ideas.
const FILE_LINES: usize = 600;

/// `--write` renews the table of the language rule, `--lines CRATE` lists the lines that it counts.
/// `--repeats` lists lines that stand in the tree more than once, or in the checkout FOLDER.
pub fn run(args: &[String]) -> Result<()> {
    let files = process::output(&mut process::command("git", &["ls-files", "-z"]))?;
    let files: Vec<&str> = files.split('\0').filter(|file| !file.is_empty()).collect();
    match args {
        [] => check(&files),
        [flag] if flag == "--write" => language::check(&files, true),
        [flag, name] if flag == "--lines" => {
            language::list(&files, name);
            Ok(())
        }
        [flag] if flag == "--repeats" => repeats::list(&process::root()),
        [flag, folder] if flag == "--repeats" => repeats::list(Path::new(folder)),
        _ => bail!("expected --write, --lines CRATE, --repeats [FOLDER] or nothing; found {}", args.join(" ")),
    }
}

fn check(files: &[&str]) -> Result<()> {
    process::run(&mut process::cargo(&["fmt", "--all", "--check"]))?;
    graph::check()?;
    let mut wrong = Vec::new();
    for (folder, limit) in [("", TREE_MIB), ("models/", MODELS_MIB), ("tests/golden/models/", GOLDENS_MIB)] {
        let bytes: u64 = files.iter().filter(|file| file.starts_with(folder)).map(|file| size(file)).sum();
        if bytes > limit << 20 {
            wrong.push(format!("{}: {} KiB tracked, the limit is {limit} MiB", display(folder), bytes >> 10));
        }
    }
    for file in files.iter().filter(|file| file.ends_with(".rs")) {
        let Ok(text) = std::fs::read_to_string(process::root().join(file)) else { continue };
        let lines = text.lines().count();
        if lines > FILE_LINES {
            wrong.push(format!("{file}: {lines} lines; past {FILE_LINES} look for the second idea"));
        }
        if text.contains("#[ignore") && !file.starts_with("xtask/") {
            wrong.push(format!("{file}: a test is switched off"));
        }
    }
    if !wrong.is_empty() {
        bail!("house rules:\n  {}", wrong.join("\n  "));
    }
    language::check(files, false)
}

fn size(file: &str) -> u64 {
    std::fs::symlink_metadata(process::root().join(file)).map_or(0, |meta| meta.len())
}

fn display(folder: &str) -> &str {
    if folder.is_empty() { "the tree" } else { folder }
}
