//! `cargo xtask test`: everything a change must pass, quickest first.

use std::time::Instant;

use anyhow::Result;

use crate::{aarch64, clients, gates, kernels, mutants, prepare, process, tidy};

pub fn run(filter: &[String]) -> Result<()> {
    std::thread::scope(|scope| {
        scope.spawn(fetch_ahead);
        stages(filter)
    })
}

/// On a continuous-integration machine later stages' packages come while earlier ones compile. What could not be had is
/// told by the stage that asks for it again.
fn fetch_ahead() {
    if std::env::var_os("CI").is_some() {
        let _ = kernels::python();
        let _ = prepare::llama_cpp();
        let _ = clients::python();
        let _ = gates::valgrind();
        let _ = aarch64::programs();
    }
}

fn stages(filter: &[String]) -> Result<()> {
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
    stage("kernels", kernels::stage)?;
    let llama_cpp = llama_cpp()?;
    stage("tests", || {
        // But for examples, which clippy has seen, and documentation, which has none to run.
        let mut tests = process::cargo(&["test", "--workspace", "--tests"]);
        if let Some(folder) = &llama_cpp {
            tests.env("FOLIO_LLAMA_CPP", folder);
        }
        process::run(tests.args(filter))
    })?;
    stage("gates", || gates::run(&[]))?;
    stage("clients", clients::stage)?;
    stage("mutants", || mutants::run(&[]))?;
    stage("aarch64", aarch64::run)
}

/// The package is needed for two tests only. On a continuous-integration machine it must be there; on a laptop without
/// a network those tests say that they skip.
fn llama_cpp() -> Result<Option<std::path::PathBuf>> {
    match prepare::llama_cpp() {
        Ok(folder) => Ok(Some(folder)),
        Err(error) if std::env::var_os("CI").is_none() => {
            eprintln!("warning: no template and vocabulary files, their tests will skip: {error:#}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn stage(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    eprintln!("== {name}");
    let start = Instant::now();
    work()?;
    eprintln!("== {name}: {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}
