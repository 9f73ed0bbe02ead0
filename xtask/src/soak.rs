//! `cargo xtask soak`: the soak of tests/soak for longer than a test may take, on the release
//! build.

use anyhow::{Result, bail};

use crate::process;

const HELP: &str = "\
cargo xtask soak [--seconds 600] [--seed 4]

Memory may grow by 2 MiB in all but the first 30% of a run of 600 s or more; from 3600 s on, by 1 MiB an hour.
FOLIO_BIN names another binary to test, FOLIO_SOAK_MODEL another model than models/folio-rust-7m.gguf: a file, or
`built-in`.";

pub fn run(args: &[String]) -> Result<()> {
    let [seconds, seed] = numbers(args, HELP, [("--seconds", 600), ("--seed", 4)])?;
    let mut test = test("answers_under_load_are_those_of_an_idle_server");
    test.env("FOLIO_SOAK_SECONDS", seconds.to_string()).env("FOLIO_SOAK_SEED", seed.to_string());
    process::run(&mut test)
}

/// One test of the soak target, optimised, with what it prints.
pub fn test(name: &str) -> std::process::Command {
    process::cargo(&["test", "--release", "-p", "folio", "--test", "soak", "--", "--nocapture", name])
}

/// Reads flags that take a number each.
pub fn numbers<const N: usize>(args: &[String], help: &str, flags: [(&str, u64); N]) -> Result<[u64; N]> {
    let mut values = flags.map(|(_, value)| value);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let Some(at) = flags.iter().position(|(flag, _)| flag == arg) else { bail!("{help}") };
        let Some(value) = args.next().and_then(|value| value.parse().ok()) else {
            bail!("{arg} needs a number\n\n{help}");
        };
        values[at] = value;
    }
    Ok(values)
}
