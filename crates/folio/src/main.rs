//! The `folio` command: flags, configuration and wiring. Environment and flags are read in this crate only, once.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

#[macro_use]
mod print;

mod allocator;
mod args;
mod batch;
mod bench;
mod chat;
mod environment;
mod eval;
mod health;
mod hooks;
mod inspect;
mod plan;
mod progress;
mod pull;
mod quantize;
mod run;
mod serve;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use args::{Command, Folio};

fn main() -> ExitCode {
    allocator::give_back_at_once();
    match run() {
        Ok(code) => code,
        Err(error) if error.is::<print::ReaderLeft>() => ExitCode::SUCCESS,
        Err(error) => {
            say!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let done = |result: Result<()>| result.map(|()| ExitCode::SUCCESS);
    match Folio::parse_from(args::command_line(std::env::args_os())?).command {
        Command::Serve(args) => serve::main(*args),
        Command::Health(args) => health::main(&args),
        Command::Batch(args) => batch::main(*args),
        Command::Run(args) => run::main(args),
        Command::Inspect(args) => done(inspect::main(&args)),
        Command::Plan(args) => done(plan::main(&args)),
        Command::Eval(args) => done(eval::main(&args)),
        Command::Quantize(args) => done(quantize::main(&args)),
        Command::Bench(args) => done(bench::main(args)),
        Command::Pull(args) => done(pull::main(&args)),
    }
}
