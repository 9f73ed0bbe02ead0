//! `cargo xtask attacker`: one key guesses another's questions, on every method; see
//! tests/blackbox/attacker.rs.

use anyhow::Result;

use crate::process;
use crate::soak::numbers;

const HELP: &str = "\
cargo xtask attacker [--questions 200] [--seed 7]

FOLIO_BIN names another binary to attack.";

pub fn run(args: &[String]) -> Result<()> {
    let [questions, seed] = numbers(args, HELP, [("--questions", 200), ("--seed", 7)])?;
    let name = "nobody_learns_what_another_key_asked";
    let mut test = process::cargo(&["test", "-p", "folio", "--test", "blackbox", "--", "--nocapture", name]);
    test.env("FOLIO_ATTACKER_QUESTIONS", questions.to_string()).env("FOLIO_ATTACKER_SEED", seed.to_string());
    process::run(&mut test)
}
