//! The `folio` command: flags, configuration and wiring. Environment and flags are read in this crate only, once.

mod args;
mod assets;
mod bench;
mod embedded;
mod eval;
mod inspect;
mod kv_events;
mod machine;
mod model_ref;
mod plan;
mod pull;
mod random_model;
mod run;
mod serve;
mod session;
mod table;

use std::process::ExitCode;

use clap::Parser;

use args::{Command, Folio};

fn main() -> ExitCode {
    let result = match Folio::parse().command {
        Command::Run(args) => run::main(args),
        Command::Serve(args) => serve::main(args),
        Command::Inspect(args) => inspect::main(&args),
        Command::Plan(args) => plan::main(&args),
        Command::Eval(args) => eval::main(&args),
        Command::Bench(args) => bench::main(args),
        Command::Pull(args) => pull::main(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
