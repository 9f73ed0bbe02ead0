//! The project's own chores: `cargo xtask <command>`.

mod aarch64;
mod attacker;
mod bench;
mod clients;
mod gates;
mod goldens;
mod graph;
mod kernels;
mod models;
mod mutants;
mod outliers;
mod peers;
mod prepare;
mod process;
mod sigterm;
mod simulate;
mod skips;
mod slowhttp;
mod soak;
mod test;
mod tidy;

use anyhow::{Result, bail};

const HELP: &str = "\
cargo xtask <command>

  test             everything: format, lints, crate graph, tree size, and all tests; prepares what they need
  aarch64          the kernels' tests on an emulated aarch64
  clients [...]    the Python clients' tests, and Schemathesis; arguments go to pytest, or after `schemas` to Schemathesis
  tidy [...]       the quick half of it: format, crate graph, tree size, house rules, language; --write renews the
                   table of the language rule, --lines CRATE lists what it counts; --repeats [FOLDER] lists runs of
                   six lines or more that stand in the tree, or in another checkout, more than once
  graph            which crate depends on which, by their manifests
  gates [...]      instructions of the CPU kernels' inner loops (kernels) and of the code around the model (counts)
                   against committed tables; --write renews them
  simulate [...]   the scheduler under seeded traffic and faults; --help says more
  mutants [NAME]   plants other engines' bugs in the scheduler, one at a time: the simulator must catch each
  soak [...]       the server under ten minutes of bad clients and too little memory; --seconds 3600 for an hour
  sigterm [...]    servers under load told to end, at 100 random moments
  slowhttp [...]   1,000 connections of slowhttptest in its four modes; the server must stay healthy
  attacker [...]   one key guesses from its own counts what another asked: 200 questions on every method of guessing ahead
  bench [...]      this tree against another commit, in turns; fails on a loss; --help says more
  peers [...]      Folio, llama.cpp and OpenVINO side by side on this machine, on the same files; --help says more
  kernels [...]    compiles the GPU kernels and writes their archives; --check only compiles, and fails on a warning
  goldens          makes the committed golden files anew with Hugging Face transformers (installs it in target/)
  models FOLDER    makes models/ anew from the trained models in FOLDER
  outliers IN OUT  a copy of a model with planted outlier channels, to measure what quantizing activations costs";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rest = args.get(1..).unwrap_or_default();
    match args.first().map(String::as_str) {
        Some("test") => test::run(rest),
        Some("aarch64") => aarch64::run().map(|skips| skips.print()),
        Some("attacker") => attacker::run(rest),
        Some("clients") => clients::run(rest),
        Some("tidy") => tidy::run(rest),
        Some("bench") => bench::run(rest),
        Some("graph") => graph::print(),
        Some("gates") => gates::run(rest).map(|skips| skips.print()),
        Some("simulate") => simulate::run(rest),
        Some("soak") => soak::run(rest),
        Some("sigterm") => sigterm::run(rest),
        Some("slowhttp") => slowhttp::run(rest),
        Some("mutants") => mutants::run(rest),
        Some("peers") => peers::run(rest),
        Some("kernels") => kernels::run(rest),
        Some("goldens") => goldens::run(),
        Some("models") => models::run(rest),
        Some("outliers") => outliers::run(rest),
        Some("help" | "--help" | "-h") => {
            println!("{HELP}");
            Ok(())
        }
        Some(other) => bail!("there is no command {other}\n\n{HELP}"),
        None => bail!("no command given\n\n{HELP}"),
    }
}
