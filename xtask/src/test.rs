//! `cargo xtask test`: everything a change must pass, quickest first.

use std::time::Instant;

use anyhow::Result;

use crate::skips::{self, Skips};
use crate::{aarch64, clients, gates, kernels, mutants, prepare, process, tidy};

pub fn run(filter: &[String]) -> Result<()> {
    std::thread::scope(|scope| {
        scope.spawn(fetch_ahead);
        stages(filter)
    })
}

/// On a machine of continuous integration the packages of later stages are fetched while earlier
/// stages compile. An error is ignored here: the stage asks for the package again.
fn fetch_ahead() {
    if skips::is_ci() {
        let _ = kernels::python();
        let _ = prepare::llama_cpp();
        let _ = clients::python();
        let _ = gates::valgrind();
        let _ = aarch64::programs();
    }
}

fn stages(filter: &[String]) -> Result<()> {
    let mut skips = Skips::none();
    stage("house rules", || tidy::run(&[]))?;
    stage("clippy", || {
        process::run(&mut process::cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--quiet",
            "--",
            "-D",
            "warnings",
        ]))
    })?;
    skips.add(stage("kernels", kernels::stage)?);
    let llama_cpp = llama_cpp()?;
    let tests = stage("tests", || {
        // Without examples, which clippy has checked, and documentation, which is the next stage.
        let mut tests = process::cargo(&["test", "--workspace", "--tests"]);
        if let Some(folder) = &llama_cpp {
            tests.env("FOLIO_LLAMA_CPP", folder);
        }
        let log = prepare::cache().join("skipped.txt");
        std::fs::create_dir_all(prepare::cache())?;
        std::fs::write(&log, "")?;
        process::run(tests.env(folio_testing::skip::LOG, &log).args(filter))?;
        Skips::tests(&log)
    })?;
    skips.add(tests);
    stage("examples in documentation", || {
        process::run(&mut process::cargo(&["test", "--doc", "-p", "folio-session", "-p", "folio-engine"]))
    })?;
    skips.add(stage("gates", || gates::run(&[]))?);
    skips.add(stage("clients", clients::stage)?);
    stage("mutants", || mutants::run(&[]))?;
    skips.add(stage("aarch64", aarch64::run)?);
    eprintln!("== all passed; {}", skips.to_text());
    Ok(())
}

/// The package that a few tests need. A machine of continuous integration must have it; on a laptop
/// without a network those tests are skipped.
fn llama_cpp() -> Result<Option<std::path::PathBuf>> {
    match prepare::llama_cpp() {
        Ok(folder) => Ok(Some(folder)),
        Err(error) if !skips::is_ci() => {
            eprintln!("warning: no template and vocabulary files, their tests will be skipped: {error:#}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn stage<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("== {name}");
    let start = Instant::now();
    let result = work()?;
    eprintln!("== {name}: {:.0} s", start.elapsed().as_secs_f64());
    Ok(result)
}
