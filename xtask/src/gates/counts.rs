//! The gate of the code around the model: instructions for fixed work of the scheduler, the
//! sampler, the detokenizer and the server, counted by callgrind.
//!
//! Compiled as for the tests, whose artifacts are nearly all there already: the gate catches
//! unneeded work, such as one copy more a step. Valgrind has no AVX-512 and reports that to code
//! that asks the processor.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::table::{Count, Table};
use crate::process;

pub const EXAMPLE: &str = "instructions";
/// The example's parts of the code and kinds of work.
const WORK: [[&str; 2]; 7] = [
    ["scheduler", "decode"],
    ["scheduler", "arrivals"],
    ["sampler", "greedy"],
    ["sampler", "drawn"],
    ["detokenizer", "stops"],
    ["server", "stream"],
    ["server", "chat"],
];

/// As for the tests of continuous integration, in any environment: incremental compilation divides
/// the code differently, and the division decides what is inlined.
pub fn as_tested(build: &mut Command) {
    build.env("CARGO_INCREMENTAL", "0");
}

pub fn measure(program: &Path, table: &mut Table) -> Result<()> {
    for [part, work] in WORK {
        let mut valgrind = process::command("valgrind", &["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
        valgrind.arg("--toggle-collect=instructions::counted*").arg("--log-fd=1").arg(program).args([part, work]);
        let count = count(&process::output(&mut valgrind)?);
        table.insert(part, work, count.with_context(|| format!("callgrind did not count {part} {work}"))?);
    }
    Ok(())
}

/// Callgrind's collected count, divided by the example's number of operations.
fn count(printed: &str) -> Option<Count> {
    let collected = printed.lines().find_map(|line| line.split_once("Collected :"))?.1;
    let operations = printed.lines().find_map(|line| line.trim().parse().ok())?;
    let instructions = collected.trim().parse().ok().filter(|&instructions: &u64| instructions > 0)?;
    Some(Count { instructions, per: operations })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_callgrind_prints() {
        let printed =
            |collected: &str| format!("==7== Callgrind\n64\n==7== Events    : Ir\n==7== Collected : {collected}\n");
        assert_eq!(count(&printed("6400")), Some(Count { instructions: 6400, per: 64 }));
        // The function that switches counting on was not found.
        assert_eq!(count(&printed("0")), None);
        assert_eq!(count("64\n"), None);
    }
}
