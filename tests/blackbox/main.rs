//! Black-box tests: start the binary and check its behaviour. All tests use only the built-in model
//! and this machine.

mod attacker;
mod bad_input;
mod batch;
#[cfg(target_os = "linux")]
mod chat;
mod commands;
mod context;
mod disk;
#[cfg(unix)]
mod ending;
mod flags;
mod generation;
mod health;
mod http;
mod hub;
mod memory;
mod names;
#[cfg(target_os = "linux")]
mod packed;
#[cfg(unix)]
mod pipes;
mod pull;
#[cfg(target_os = "linux")]
mod screen;
mod serve;
mod server;
mod speculate;

use std::path::PathBuf;
use std::process::{Command, Output};

/// The binary under test, isolated from the environment.
fn folio(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_folio"));
    command.args(args).env("HF_HOME", scratch("hf-empty"));
    for name in ["HF_TOKEN", "HF_HUB_OFFLINE", "FOLIO_API_KEY", "VLLM_API_KEY", "FOLIO_CONFIG"] {
        command.env_remove(name);
    }
    command
}

fn output(args: &[&str]) -> Output {
    folio(args).output().expect("the binary starts")
}

/// Output of a successful run.
fn stdout(args: &[&str]) -> String {
    let output = output(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("output is UTF-8")
}

/// Message of a failing run.
fn refusal(args: &[&str]) -> String {
    let output = output(args);
    assert!(!output.status.success(), "{args:?} succeeded: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).expect("output is UTF-8")
}

/// A folder of this run's own.
fn scratch(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the scratch folder can be made");
    folder
}
