//! `cargo xtask simulate`: the scheduler under seeded traffic and faults; see docs/simulator.md.

use anyhow::Result;

use crate::process;

/// The development profile has assertions and optimizes these two crates, so that it is both strict
/// and quick.
pub fn run(args: &[String]) -> Result<()> {
    process::run(
        process::cargo(&["run", "--quiet", "-p", "folio-simulator", "--bin", "folio-simulate", "--"]).args(args),
    )
}
