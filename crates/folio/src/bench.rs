//! `folio bench`: flags become options of `folio-measure`, and its reports are printed.

mod serve;
mod server;

use anyhow::{Context, Result};
use folio_measure::bench::rates::{self, Measurement};
use folio_measure::bench::{fairness, http, interference, prefix, speculate};
use serde_json::Value;

use crate::args::{BenchArgs, BenchKind, BenchRun, SpeculateBench};
use server::Loopback;

pub fn main(args: BenchArgs) -> Result<()> {
    match args.kind {
        BenchKind::Latency(run) => rates(&run, vec![1]),
        BenchKind::Throughput(run) => rates(&run, run.concurrency.clone()),
        BenchKind::Prefix(bench) => {
            let report = prefix::measure(&bench.options()?)?;
            print(bench.common.json, || report.json(), || report.text())
        }
        BenchKind::Interference(bench) => {
            let report = interference::measure(&bench.options()?)?;
            print(bench.common.json, || report.json(), || report.text())
        }
        BenchKind::Fairness(bench) => {
            let report = fairness::measure(&bench.options()?)?;
            print(bench.common.json, || report.json(), || report.text())
        }
        BenchKind::Speculate(bench) => speculate(&bench),
        BenchKind::Http(bench) => {
            let serve = |session: &_| Loopback::start(session, bench.concurrency);
            let report = http::measure(&bench.options()?, serve)?;
            print(bench.common.json, || report.json(), || report.text())
        }
        BenchKind::Serve(bench) => serve::main(&bench),
    }
}

fn print(as_json: bool, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) -> Result<()> {
    match as_json {
        true => outln!("{}", json()),
        false => out!("{}", text()),
    }
}

fn rates(args: &BenchRun, concurrency: Vec<usize>) -> Result<()> {
    let measured = rates::measure(&args.options(concurrency)?)?;
    let report = &measured.report;
    let printed = print(args.common.json, || report.json(), || report.text());
    // A file that was asked for is written even if the reader of the table has left.
    match args.profile {
        Some(_) => profile(args, measured).and(printed),
        None => printed,
    }
}

fn profile(args: &BenchRun, measured: Measurement) -> Result<()> {
    let Some(file) = &args.profile else { return Ok(()) };
    let text = measured.profile()?;
    std::fs::write(file, &text).with_context(|| format!("--profile {}", file.display()))?;
    if args.common.json { Ok(()) } else { out!("\n{text}") }
}

fn speculate(args: &SpeculateBench) -> Result<()> {
    let (options, as_json) = (args.options()?, args.common.json);
    let Some(agreement) = args.agreement else {
        return speculate::measure(&options, &mut |report| print(as_json, || report.json(), || report.text()));
    };
    let report = speculate::measure_synthetic(&options, agreement)?;
    match as_json {
        true => report.json().iter().try_for_each(|line| outln!("{line}")),
        false => out!("{}", report.text()),
    }
}
