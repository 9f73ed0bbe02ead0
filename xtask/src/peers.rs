//! `cargo xtask peers`: Folio and llama.cpp side by side on this machine, on the same files.
//!
//! The two take turns, so that a machine which is shared or throttled slows both; the best of all rounds counts. What
//! the machine could do at best is measured by Folio's benches within the same minutes.

mod load;
mod measure;
mod model;
mod setup;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use crate::{prepare, process};
use load::Watch;
use measure::{Ceilings, Engines, Workload};
use model::Model;
use setup::Peer;

const HELP: &str = "\
cargo xtask peers [--formats bf16,q8_0,q4_0] [--rounds 3] [--threads 2] [--folio BINARY]
cargo xtask peers --context 3500 [--formats q8_0] [...]

Builds llama.cpp's tools and a random model of 1B shape in target/xtask/peers (about 5 GB), then measures Folio and
llama.cpp in turns: decode of one stream from an empty context, a prompt of 512 tokens, decode of 16 streams. Formats:
bf16, q8_0, q4_0, q4_k_m and others that llama-quantize knows.

With --context, Folio alone: decode behind that many tokens, keys and values in bf16 against int8, in turns.

Without --folio the release binary is built first.";

/// How keys and values are kept in the two halves of a pair.
const KV_FORMATS: [&str; 2] = ["bfloat16", "int8"];

#[derive(Debug, PartialEq)]
struct Options {
    formats: Vec<String>,
    rounds: usize,
    threads: usize,
    context: Option<usize>,
    folio: Option<PathBuf>,
}

impl Options {
    fn parse(args: &[String]) -> Result<Self> {
        let mut formats = None;
        let mut options = Self { formats: Vec::new(), rounds: 3, threads: 2, context: None, folio: None };
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            let value = args.next().with_context(|| format!("{flag} needs a value\n\n{HELP}"))?;
            let number = || match value.parse::<usize>() {
                Ok(number) if number > 0 => Ok(number),
                _ => bail!("{flag} is {value}, but must be a number from 1 on"),
            };
            match flag.as_str() {
                "--formats" => formats = Some(value.clone()),
                "--rounds" => options.rounds = number()?,
                "--threads" => options.threads = number()?,
                "--context" => options.context = Some(number()?),
                "--folio" => options.folio = Some(std::path::absolute(value)?),
                _ => bail!("there is no flag {flag}\n\n{HELP}"),
            }
        }
        let usual = if options.context.is_some() { "q8_0" } else { "bf16,q8_0,q4_0" };
        let formats = formats.as_deref().unwrap_or(usual);
        options.formats = formats.split(',').map(str::to_lowercase).collect();
        // They become part of file names.
        let word =
            |format: &String| !format.is_empty() && format.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        ensure!(options.formats.iter().all(word), "--formats is {formats}, but must be names separated by commas");
        Ok(options)
    }
}

pub fn run(args: &[String]) -> Result<()> {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        println!("{HELP}");
        return Ok(());
    }
    let options = Options::parse(args)?;
    let home = prepare::cache().join("peers");
    std::fs::create_dir_all(&home)?;
    let peer = Peer::prepare(&home.join("llama-build"))?;
    let models = options.formats.iter().map(|format| Model::prepare(format, &home, &peer));
    let models: Vec<Model> = models.collect::<Result<_>>()?;
    let folio = match options.folio {
        Some(ref binary) => binary.clone(),
        None => process::folio(&process::root(), None)?,
    };
    let mut engines = Engines { folio, peer, threads: options.threads, ceilings: Ceilings::none() };
    let watch = Watch::start();
    match options.context {
        Some(context) => long_context(&options, context, &mut engines, &models)?,
        None => side_by_side(&options, &mut engines, &models)?,
    }
    let found = &engines.ceilings;
    println!(
        "\n{} threads, best of {} rounds. Ceilings in the same run: read {:.1} GB/s (lowest of a round {:.1}), \
         bf16 {:.0} GFLOP/s, int8 {:.0} GOP/s. Other processes had {} of the CPU in {:.0} s.",
        options.threads,
        options.rounds,
        found.read_bytes_per_s / 1e9,
        found.read_lowest / 1e9,
        found.bf16_flops / 1e9,
        found.int8_ops / 1e9,
        percent(watch.others()),
        watch.started.elapsed().as_secs_f64(),
    );
    Ok(())
}

/// Two that take turns: their rates, a pair for every round.
#[derive(Default)]
struct Pairs(Vec<[f64; 2]>);

impl Pairs {
    fn best(&self, side: usize) -> f64 {
        self.0.iter().map(|pair| pair[side]).fold(0.0, f64::max)
    }

    /// The first side's best over the other's, and the lowest and highest of a round.
    fn ratio(&self) -> String {
        let rounds = self.0.iter().map(|[first, second]| first / second);
        let (low, high) = (rounds.clone().fold(f64::INFINITY, f64::min), rounds.fold(0.0, f64::max));
        format!("{:.2} ({low:.2} to {high:.2})", self.best(0) / self.best(1))
    }
}

/// Measures both sides, the one that begins changing from round to round.
fn pair(round: usize, mut measure: impl FnMut(usize) -> Result<f64>) -> Result<[f64; 2]> {
    let mut rates = [0.0; 2];
    for side in [round % 2, (round + 1) % 2] {
        rates[side] = measure(side)?;
    }
    Ok(rates)
}

fn side_by_side(options: &Options, engines: &mut Engines, models: &[Model]) -> Result<()> {
    let cases: Vec<(&Model, Workload)> =
        models.iter().flat_map(|model| Workload::ALL.map(|workload| (model, workload))).collect();
    let mut results: Vec<Pairs> = cases.iter().map(|_| Pairs::default()).collect();
    for round in 0..options.rounds {
        for ((model, workload), result) in cases.iter().zip(&mut results) {
            let watch = Watch::start();
            let rates = pair(round, |side| match side {
                0 => engines.folio(*workload, model),
                _ => engines.peer(*workload, model),
            })?;
            result.0.push(rates);
            let what = format!("round {} {} {}", round + 1, model.format, workload.name());
            let [folio, peer] = rates;
            eprintln!("{what}: Folio {folio:.1}, llama.cpp {peer:.1} tok/s; others {}", percent(watch.others()));
        }
    }
    println!("| weights | workload | Folio tok/s | llama.cpp tok/s | ratio (rounds) | Folio | llama.cpp | of |");
    println!("|---|---|---|---|---|---|---|---|");
    for ((model, workload), result) in cases.iter().zip(&results) {
        let rates = [result.best(0), result.best(1)];
        let [folio, peer] = rates.map(|rate| workload.share(model, rate, &engines.ceilings));
        println!(
            "| {} | {} | {:.1} | {:.1} | {} | {} | {} | {} |",
            model.format,
            workload.name(),
            rates[0],
            rates[1],
            result.ratio(),
            percent(Some(folio.0)),
            percent(Some(peer.0)),
            folio.1,
        );
    }
    Ok(())
}

fn long_context(options: &Options, context: usize, engines: &mut Engines, models: &[Model]) -> Result<()> {
    let mut results: Vec<Pairs> = models.iter().map(|_| Pairs::default()).collect();
    for round in 0..options.rounds {
        for (model, result) in models.iter().zip(&mut results) {
            let watch = Watch::start();
            // The ratio is of int8 over bf16.
            let rates = pair(round, |side| engines.folio_behind(context, KV_FORMATS[1 - side], model))?;
            result.0.push(rates);
            let [int8, bf16] = rates;
            let others = percent(watch.others());
            eprintln!("round {} {}: bf16 {bf16:.2}, int8 {int8:.2} tok/s; others {others}", round + 1, model.format);
        }
    }
    println!("| weights | context | bf16 KV tok/s | int8 KV tok/s | int8 / bf16 (rounds) |");
    println!("|---|---|---|---|---|");
    for (model, result) in models.iter().zip(&results) {
        let [bf16, int8] = [result.best(1), result.best(0)];
        println!("| {} | {context} | {bf16:.2} | {int8:.2} | {} |", model.format, result.ratio());
    }
    Ok(())
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "an unknown part".into(), |share| format!("{:.0}%", 100.0 * share))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options> {
        Options::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn flags() {
        let options = parse("--rounds 5 --formats Q4_0,q4_k_m").unwrap();
        assert_eq!((options.rounds, options.threads, options.context), (5, 2, None));
        assert_eq!(options.formats, ["q4_0", "q4_k_m"]);
        assert_eq!(parse("").unwrap().formats, ["bf16", "q8_0", "q4_0"]);
        assert_eq!(parse("--context 3500").unwrap().formats, ["q8_0"]);
        for wrong in ["--rounds", "--rounds 0", "--formats ../x", "--formats q8_0,", "--fast 1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sides_take_turns_to_begin() {
        for round in 0..2 {
            let mut order = Vec::new();
            let rates = pair(round, |side| {
                order.push(side);
                Ok(side as f64 + 1.0)
            });
            assert_eq!(rates.unwrap(), [1.0, 2.0]);
            assert_eq!(order[0], round);
        }
    }

    #[test]
    fn ratios_are_of_the_best() {
        let pairs = Pairs(vec![[10.0, 8.0], [12.0, 12.0]]);
        assert_eq!(pairs.ratio(), "1.00 (1.00 to 1.25)");
    }
}
