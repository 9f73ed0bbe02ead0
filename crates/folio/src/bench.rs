//! `folio bench`: how fast, how near to what this machine can do at all, and what the scheduler promises.
//!
//! What is compared is measured in the same run and takes turns: a machine that is shared or throttled then slows both.

mod ceilings;
mod cost;
mod fairness;
mod http;
mod interference;
mod measure;
mod prefix;
mod profile;
mod report;
mod serve;
mod speculate;
mod streams;
mod waste;

use anyhow::{Result, bail};
use folio_session::{Assets, LoadFormat, Options, Session, WeightBytes, machine, random_model};

use crate::args::{BenchArgs, BenchKind, BenchModel, BenchRun};
use crate::{environment, hooks};
use measure::Measured;

pub fn main(args: BenchArgs) -> Result<()> {
    match args.kind {
        BenchKind::Latency(run) => rates(&run, &[1]),
        BenchKind::Throughput(run) => rates(&run, &run.concurrency),
        BenchKind::Prefix(bench) => prefix::main(&bench),
        BenchKind::Interference(bench) => interference::main(&bench),
        BenchKind::Fairness(bench) => fairness::main(&bench),
        BenchKind::Speculate(bench) => speculate::main(&bench),
        BenchKind::Http(bench) => http::main(&bench),
        BenchKind::Serve(bench) => serve::main(&bench),
    }
}

/// Prefill and decode rates beside the machine's ceilings, which are measured between the rounds: reads last, right
/// before a round, and first, right after it.
fn rates(args: &BenchRun, concurrency: &[usize]) -> Result<()> {
    at_least("--rounds", args.rounds, 1)?;
    at_least("--input-len", args.input_len, 1)?;
    at_least("--output-len", args.output_len, 1)?;
    concurrency.iter().try_for_each(|&streams| at_least("--concurrency", streams, 1))?;
    let most = concurrency.iter().copied().max().unwrap_or(1);
    let session = start(&args.common, most, Some(args.input_len + args.output_len), |options| {
        // Every prompt is new, so that what is measured is computing it.
        options.prefix_caching = false;
    })?;
    profile::check(args, &session)?;
    // Before the ceilings take a buffer of their own.
    let resident = machine::peak_resident();
    let cost = cost::Cost::of(&session.assets.model.spec, &WeightBytes::of(&session.assets.model, &session.target)?);
    session.phases.notes.iter().for_each(|note| say!("warning: {note}"));
    let mut results: Vec<Measured> = concurrency.iter().map(|&streams| Measured::new(streams)).collect();
    let mut ceilings = ceilings::Ceilings::new(&session.target)?;
    for round in 0..args.rounds {
        for result in &mut results {
            ceilings.measure()?;
            let before = ceilings.read();
            let decode = result.round(&session, args, round)?;
            result.pair(decode, [before, ceilings.read()]);
        }
    }
    ceilings.measure()?;
    let printed = report::print(args, &session, &cost, &ceilings.best, resident, &results);
    drop(ceilings);
    // A file that was asked for is written even if nobody reads the table.
    match &args.profile {
        Some(file) => profile::main(args, file, session, &results).and(printed),
        None => printed,
    }
}

/// An engine for sequences of at most `max_len` (unless a flag says otherwise; else the model's), `max_seqs` at once.
fn start(
    common: &BenchModel,
    max_seqs: usize,
    max_len: Option<usize>,
    change: impl FnOnce(&mut Options),
) -> Result<Session> {
    let model = match common.shape {
        Some(shape) => {
            let folder = random_model::folder(shape.into(), &environment::cache_folder())?;
            Some(folder.to_string_lossy().into_owned())
        }
        None => common.model.model.clone(),
    };
    let mut options = common.model.engine.options()?;
    let on_device = common.shape.is_some_and(|shape| random_model::is_made_on_device(shape.into()));
    if on_device && !options.device.load_format.is_dummy() {
        options.device.load_format = LoadFormat::Dummy;
    }
    options.max_num_seqs = Some(max_seqs);
    options.max_model_len = options.max_model_len.or(max_len);
    change(&mut options);
    Session::start(Assets::open(model.as_deref(), &options)?, &options, hooks::hooks())
}

fn at_least(flag: &str, value: usize, least: usize) -> Result<()> {
    if value < least {
        bail!("{flag} is {value}, but must be at least {least}");
    }
    Ok(())
}
