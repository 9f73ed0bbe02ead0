//! `cargo xtask bench --against COMMIT`: this tree and another commit of it, built alike and
//! measured in turns.
//!
//! Every pair runs both within seconds, with alternating order, so that a shared or throttled
//! machine slows both. The median of the pairs' ratios counts, with its 95% interval: a loss is
//! more than noise only if the whole interval is below 0.97.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use folio_measure::stats::{Median, median};
use serde_json::Value;

use crate::peers::load::Watch;
use crate::peers::{percent, turns};
use crate::{prepare, process};

const HELP: &str = "\
cargo xtask bench --against COMMIT [--rounds 15] [--only decode|prompt|streams]

Builds the release binary of this tree and that of COMMIT (its tree and what was compiled stay in target/xtask/against)
and measures both in turns on the built-in model: decode of one stream, a prompt of 512 tokens, decode of 16 streams.
Fails where the 95% interval of the ratio lies under 0.97 altogether; where it reaches to both sides, more rounds tell.";

/// The least acceptable ratio.
const BOUND: f64 = 0.97;
/// With fewer pairs the 95% interval is as wide as all of them.
const LEAST_ROUNDS: usize = 6;
/// Runs inside one process; `folio bench` counts the best of them.
const REPEATS: &str = "3";

struct Workload {
    name: &'static str,
    bench: &'static [&'static str],
    /// Field of the report that counts: tokens per second.
    rate: &'static str,
}

const WORKLOADS: [Workload; 3] = [
    Workload {
        name: "decode",
        bench: &["latency", "--input-len", "16", "--output-len", "128"],
        rate: "decode_tokens_per_s",
    },
    Workload {
        name: "prompt",
        bench: &["latency", "--input-len", "512", "--output-len", "2"],
        rate: "prefill_tokens_per_s",
    },
    Workload {
        name: "streams",
        bench: &["throughput", "--concurrency", "16", "--input-len", "16", "--output-len", "64"],
        rate: "decode_tokens_per_s",
    },
];

#[derive(Debug, PartialEq)]
struct Options {
    against: String,
    rounds: usize,
    only: Option<String>,
}

impl Options {
    fn parse(args: &[String]) -> Result<Self> {
        let (mut against, mut rounds, mut only) = (None, 15, None);
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            let value = args.next().with_context(|| format!("{flag} needs a value\n\n{HELP}"))?;
            match flag.as_str() {
                "--against" => against = Some(value.clone()),
                "--rounds" => {
                    let number = value.parse().ok().filter(|number| *number >= LEAST_ROUNDS);
                    rounds = number
                        .with_context(|| format!("--rounds is {value}, but must be a number from {LEAST_ROUNDS} on"))?;
                }
                "--only" => {
                    let known = WORKLOADS.iter().any(|workload| workload.name == value);
                    ensure!(known, "--only is {value}, but must be decode, prompt or streams");
                    only = Some(value.clone());
                }
                _ => bail!("there is no flag {flag}\n\n{HELP}"),
            }
        }
        let against = against.with_context(|| format!("--against is missing\n\n{HELP}"))?;
        Ok(Self { against, rounds, only })
    }

    fn workloads(&self) -> Vec<&'static Workload> {
        let wanted = |workload: &&Workload| self.only.as_deref().is_none_or(|only| only == workload.name);
        WORKLOADS.iter().filter(wanted).collect()
    }
}

pub fn run(args: &[String]) -> Result<()> {
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        println!("{HELP}");
        return Ok(());
    }
    let options = Options::parse(args)?;
    let names = ["this tree", options.against.as_str()];
    let other = build_commit(&options.against)?;
    let programs = [process::folio(&process::root(), None)?, other];
    let workloads = options.workloads();
    let mut results: Vec<Vec<[f64; 2]>> = workloads.iter().map(|_| Vec::new()).collect();
    let watch = Watch::start();
    for round in 0..options.rounds {
        for (workload, pairs) in workloads.iter().zip(&mut results) {
            let mut rates = [0.0; 2];
            for side in turns(&[0, 1], round) {
                rates[side] = measure(&programs[side], workload)
                    .with_context(|| format!("{} cannot be measured in {}", names[side], workload.name))?;
            }
            eprintln!("pair {} {}: {:.1} against {:.1} tok/s", round + 1, workload.name, rates[0], rates[1]);
            pairs.push(rates);
        }
    }
    println!("| workload | this tok/s | {} tok/s | ratio | 95% interval | |", options.against);
    println!("|---|---|---|---|---|---|");
    let mut losses = Vec::new();
    for (workload, pairs) in workloads.iter().zip(&results) {
        let [this, other] = [0, 1].map(|side| median(&pairs.iter().map(|pair| pair[side]).collect::<Vec<_>>()).middle);
        let ratio = median(&pairs.iter().map(|[this, other]| this / other).collect::<Vec<_>>());
        let (Median { middle, low, high }, verdict) = (ratio, Verdict::of(&ratio));
        println!("| {} | {this:.1} | {other:.1} | {middle:.3} | {low:.3} to {high:.3} | {verdict:?} |", workload.name);
        if verdict == Verdict::Loss {
            losses.push(workload.name);
        }
    }
    println!("\n{} pairs; other processes had {} of the CPU.", options.rounds, percent(watch.others()));
    ensure!(losses.is_empty(), "slower than {} by more than noise: {}", options.against, losses.join(", "));
    Ok(())
}

#[derive(Debug, PartialEq)]
enum Verdict {
    Holds,
    /// The interval reaches to both sides of the bound.
    Unclear,
    Loss,
}

impl Verdict {
    fn of(ratio: &Median) -> Self {
        match ratio {
            Median { high, .. } if *high < BOUND => Self::Loss,
            Median { low, .. } if *low < BOUND => Self::Unclear,
            _ => Self::Holds,
        }
    }
}

/// Tokens per second.
fn measure(program: &Path, workload: &Workload) -> Result<f64> {
    let mut bench = process::command(program, &["bench"]);
    let printed = process::output(bench.args(workload.bench).args(["--json", "--rounds", REPEATS]))?;
    let report: Value = serde_json::from_str(&printed).context("folio bench printed no JSON")?;
    report["results"][0][workload.rate].as_f64().with_context(|| format!("folio bench printed no {}", workload.rate))
}

/// The release binary of a commit, from a separate working tree.
fn build_commit(commit: &str) -> Result<PathBuf> {
    let home = prepare::cache().join("against");
    let tree = home.join("tree");
    let git = |args: &[&str]| process::output(&mut process::command("git", args));
    let hash = git(&["rev-parse", "--verify", "--quiet", &format!("{commit}^{{commit}}")]);
    let hash = hash.with_context(|| format!("there is no commit {commit}"))?.trim().to_owned();
    if tree.join("Cargo.toml").exists() {
        process::run(
            process::command("git", &["checkout", "--quiet", "--force", "--detach", &hash]).current_dir(&tree),
        )?;
    } else {
        git(&["worktree", "prune"])?;
        let mut add = process::command("git", &["worktree", "add", "--quiet", "--force", "--detach"]);
        process::run(add.arg(&tree).arg(&hash))?;
    }
    process::folio(&tree, Some(&home.join("build")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options> {
        Options::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn flags() {
        let options = parse("--against main~3 --rounds 21 --only prompt").unwrap();
        assert_eq!((options.against.as_str(), options.rounds), ("main~3", 21));
        assert_eq!(options.workloads().iter().map(|workload| workload.name).collect::<Vec<_>>(), ["prompt"]);
        assert_eq!(parse("--against x").unwrap().workloads().len(), 3);
        for wrong in ["", "--against", "--rounds 15", "--against x --rounds 5", "--against x --only all"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_loss_is_more_than_noise() {
        let verdict = |slow: usize, by: f64| {
            Verdict::of(&median(&(0..15).map(|i| if i < slow { 1.0 - by } else { 1.0 }).collect::<Vec<_>>()))
        };
        assert_eq!(verdict(12, 0.05), Verdict::Loss);
        // Four to eleven of fifteen pairs may be this slow by chance.
        assert_eq!([11, 4].map(|slow| verdict(slow, 0.05)), [Verdict::Unclear, Verdict::Unclear]);
        assert_eq!(verdict(3, 0.05), Verdict::Holds);
        // Three in a hundred are allowed.
        assert_eq!(verdict(15, 0.025), Verdict::Holds);
    }
}
