//! `folio-simulate`: many seeds with figures, or one seed with its trace.

use std::{process::ExitCode, time::Duration};

use folio_simulator::{
    Mode, Scenario, Violation, play,
    shrink::shrink,
    sweep::{Report, Sweep},
};

const HELP: &str = "\
folio-simulate [options]

  --seeds N        runs, each with its own seed (2000)
  --steps N        ticks of each run (2000)
  --first-seed N   the first seed (0)
  --threads N      threads (as many as there are)
  --seed N         this one seed; if it fails, it is shrunk and told
  --perturb        flips table entries with probability 1e-4: every run that reads through one must fail
  --stop           stops at the first failure
  --seconds N      begins no new run after so long
  --json           figures as JSON";

/// One table entry in this number is flipped by --perturb.
const PERTURB_ONE_IN: usize = 10_000;

struct Args {
    sweep: Sweep,
    seed: Option<u64>,
    json: bool,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let sweep =
        Sweep { first_seed: 0, seeds: 2000, steps: 2000, threads, perturb: None, stop_at_first: false, at_most: None };
    let mut parsed = Args { sweep, seed: None, json: false };
    while let Some(arg) = args.next() {
        let mut number = || -> Result<u64, String> {
            let text = args.next().ok_or_else(|| format!("{arg} needs a number"))?;
            text.parse().map_err(|_| format!("{arg} needs a number, but got {text}"))
        };
        match arg.as_str() {
            "--seeds" => parsed.sweep.seeds = number()?,
            "--steps" => parsed.sweep.steps = number()?,
            "--first-seed" => parsed.sweep.first_seed = number()?,
            "--threads" => parsed.sweep.threads = number()?.clamp(1, 1024) as usize,
            "--seed" => parsed.seed = Some(number()?),
            "--perturb" => parsed.sweep.perturb = Some(PERTURB_ONE_IN),
            "--seconds" => parsed.sweep.at_most = Some(Duration::from_secs(number()?)),
            "--stop" => parsed.sweep.stop_at_first = true,
            "--json" => parsed.json = true,
            "--help" | "-h" => return Ok(None),
            other => return Err(format!("there is no option {other}")),
        }
    }
    Ok(Some(parsed))
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    let good = match args.seed {
        Some(seed) => one(&args, seed),
        None => many(&args),
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn many(args: &Args) -> bool {
    let report = args.sweep.run();
    if args.json {
        println!("{}", json(&report));
    } else {
        print!("{}", report.table());
        for (seed, violation) in report.failures.iter().take(if args.sweep.perturb.is_some() { 0 } else { 20 }) {
            println!("seed {seed}: {violation}");
        }
    }
    let perturbed = report.perturbed;
    if args.sweep.perturb.is_some() {
        eprintln!(
            "{} flips, {} read through; runs with such a read: {}, caught: {}, missed: {}",
            perturbed.flips, perturbed.effective_flips, perturbed.effective_runs, perturbed.caught, perturbed.missed
        );
        return perturbed.missed == 0 && perturbed.effective_runs > 0;
    }
    if let Some((seed, _)) = report.failures.first().filter(|_| !args.json) {
        println!("\ntell its story with: cargo xtask simulate --seed {seed} --steps {}", args.sweep.steps);
    }
    report.failures.is_empty()
}

fn one(args: &Args, seed: u64) -> bool {
    let scenario = Scenario::random(seed, args.sweep.steps);
    let mode = args.sweep.mode(seed);
    let outcome = play(&scenario, mode.clone());
    let Some(violation) = &outcome.violation else {
        println!("seed {seed}: no violation in {} steps, trace {:016x}", outcome.coverage.steps, outcome.trace);
        return true;
    };
    println!("seed {seed}: {violation}\nshrinking ...");
    tell(&scenario, violation, &mode);
    false
}

fn tell(scenario: &Scenario, violation: &Violation, mode: &Mode) {
    let (small, outcome) = shrink(scenario, violation, mode);
    println!("{:#?}\n{} events:", small.setup, small.events.len());
    for event in &small.events {
        println!("  tick {}: {:?}", event.tick, event.action);
    }
    println!("what happened:");
    let skipped = outcome.lines.len().saturating_sub(80);
    if skipped > 0 {
        println!("  ... {skipped} lines");
    }
    for line in &outcome.lines[skipped..] {
        println!("  {line}");
    }
    if let Some(violation) = outcome.violation {
        println!("  {violation}");
    }
}

/// JSON of names and numbers, and of messages with their quotes removed.
fn json(report: &Report) -> String {
    let counts: Vec<String> = report.coverage.rows().iter().map(|(name, n)| format!("\"{name}\":{n}")).collect();
    let failure = |(seed, v): &(u64, Violation)| {
        let plain: String = v.what.chars().filter(|c| !matches!(c, '"' | '\\') && !c.is_control()).collect();
        format!("{{\"seed\":{seed},\"invariant\":\"{:?}\",\"tick\":{},\"what\":\"{plain}\"}}", v.invariant, v.tick)
    };
    format!(
        "{{\"seeds\":{},\"seconds\":{:.3},\"steps_per_second\":{:.0},\"trace\":\"{:016x}\",\"counts\":{{{}}},\"failures\":[{}]}}",
        report.seeds,
        report.elapsed.as_secs_f64(),
        report.steps_per_second(),
        report.trace,
        counts.join(","),
        report.failures.iter().map(failure).collect::<Vec<_>>().join(",")
    )
}
