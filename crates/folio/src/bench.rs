//! `folio bench`: how fast, and how near to what this machine can do at all.
//!
//! Ceilings are measured in the same run, between the rounds: a machine that is shared or throttled then slows both.

mod cost;
mod measure;
mod report;

use anyhow::{Result, bail};

use crate::args::{BenchArgs, BenchKind, BenchRun};
use crate::assets::Assets;
use crate::machine;
use crate::random_model;
use crate::session::Session;
use measure::Measured;

pub fn main(args: BenchArgs) -> Result<()> {
    let (args, concurrency) = match args.kind {
        BenchKind::Latency(run) => (run, vec![1]),
        BenchKind::Throughput(run) => {
            let concurrency = run.concurrency.clone();
            (run, concurrency)
        }
    };
    let session = start(&args, &concurrency)?;
    // Before the ceilings take a buffer of their own.
    let resident = machine::peak_resident();
    let cost = cost::Cost::of(&session.assets.model.spec, session.memory.weights);
    let mut results: Vec<Measured> = concurrency.iter().map(|&streams| Measured::new(streams)).collect();
    let mut ceilings = measure::Ceilings::new(session.plan.threads)?;
    for round in 0..args.rounds {
        for result in &mut results {
            ceilings.measure();
            result.round(&session, &args, round)?;
        }
    }
    ceilings.measure();
    report::print(&args, &session, &cost, &ceilings, resident, &results);
    Ok(())
}

fn start(args: &BenchRun, concurrency: &[usize]) -> Result<Session> {
    if args.rounds == 0 || args.output_len < 2 || args.input_len == 0 || concurrency.contains(&0) {
        bail!("--rounds, --input-len and --concurrency must be at least 1, --output-len at least 2");
    }
    let model = match args.shape {
        Some(shape) => Some(random_model::folder(shape)?.to_string_lossy().into_owned()),
        None => args.model.model.clone(),
    };
    let mut engine = args.model.engine.clone();
    engine.max_num_seqs = concurrency.iter().copied().max().unwrap_or(1);
    let max_model_len = engine.max_model_len.unwrap_or(args.input_len + args.output_len);
    engine.max_model_len = Some(max_model_len);
    let assets = Assets::open(model.as_deref(), engine.max_model_len)?;
    // Every prompt is new, so that what is measured is computing it.
    engine.no_enable_prefix_caching = true;
    Session::start(assets, &engine)
}
