//! The project's own chores: `cargo xtask <command>`.

mod aarch64;
mod goldens;
mod graph;
mod models;
mod mutants;
mod prepare;
mod process;
mod simulate;
mod test;
mod tidy;

use anyhow::{Result, bail};

const HELP: &str = "\
cargo xtask <command>

  test             everything: format, lints, crate graph, tree size, and all tests; prepares what they need
  aarch64          the kernels' tests on an emulated aarch64
  tidy             the quick half of it: format, crate graph, tree size, house rules
  simulate [...]   the scheduler under seeded traffic and faults; --help says more
  mutants [NAME]   plants other engines' bugs in the scheduler, one at a time: the simulator must catch each
  goldens          makes the committed golden files anew with Hugging Face transformers (installs it in target/)
  models FOLDER    makes models/ anew from the trained models in FOLDER";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rest = args.get(1..).unwrap_or_default();
    match args.first().map(String::as_str) {
        Some("test") => test::run(rest),
        Some("aarch64") => aarch64::run(),
        Some("tidy") => tidy::run(),
        Some("simulate") => simulate::run(rest),
        Some("mutants") => mutants::run(rest),
        Some("goldens") => goldens::run(),
        Some("models") => models::run(rest),
        Some("help" | "--help" | "-h") => {
            println!("{HELP}");
            Ok(())
        }
        Some(other) => bail!("there is no command {other}\n\n{HELP}"),
        None => bail!("no command given\n\n{HELP}"),
    }
}
