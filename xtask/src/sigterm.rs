//! `cargo xtask sigterm`: tells servers under load to end, at many random moments; see
//! tests/soak/sigterm.rs.

use anyhow::Result;

use crate::process;
use crate::soak::{numbers, test};

const HELP: &str = "cargo xtask sigterm [--rounds 100] [--seed 7]";

pub fn run(args: &[String]) -> Result<()> {
    let [rounds, seed] = numbers(args, HELP, [("--rounds", 100), ("--seed", 7)])?;
    let mut test = test("a_signal_at_any_moment_truncates_nothing_silently");
    test.env("FOLIO_SIGTERM_ROUNDS", rounds.to_string()).env("FOLIO_SIGTERM_SEED", seed.to_string());
    process::run(&mut test)
}
