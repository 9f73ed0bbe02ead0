//! Prefill and decode rates of some numbers of concurrent streams, beside the machine's peak rates.

use anyhow::Result;
use folio_session::{Session, WeightBytes, machine};

use super::ceilings::Ceilings;
use super::cost::Cost;
use super::rounds::Measured;
use super::{Model, at_least, profile};
use crate::rates::{Memory, Rates};

#[derive(Clone, Debug)]
pub struct Options {
    pub model: Model,
    /// Tokens in each prompt.
    pub input_len: usize,
    /// Tokens in each answer.
    pub output_len: usize,
    /// Numbers of streams.
    pub concurrency: Vec<usize>,
    /// The best round counts, and for the share of read bandwidth the median.
    pub rounds: usize,
    /// Note a GPU's own times of steps, for [`Measurement::profile`].
    pub profile: bool,
}

/// A report, and the session that it is about.
pub struct Measurement {
    pub report: Rates,
    options: Options,
    session: Session,
    results: Vec<Measured>,
}

/// Peak rates are measured between the rounds: reads last, right before a round, and first, right
/// after it.
pub fn measure(options: &Options) -> Result<Measurement> {
    at_least("--rounds", options.rounds, 1)?;
    at_least("--input-len", options.input_len, 1)?;
    at_least("--output-len", options.output_len, 1)?;
    options.concurrency.iter().try_for_each(|&streams| at_least("--concurrency", streams, 1))?;
    let most = options.concurrency.iter().copied().max().unwrap_or(1);
    let session = options.model.start(most, Some(options.input_len + options.output_len), |options| {
        // Every prompt is new, so that it is computed.
        options.prefix_caching = false;
    })?;
    profile::check(options, &session)?;
    // Before the ceilings take a buffer of their own.
    let resident = machine::peak_resident();
    let cost = Cost::of(&session.assets.model.spec, &WeightBytes::of(&session.assets.model, &session.target)?);
    if let Some(warn) = (options.model.hooks)().load_warning {
        session.phases.notes.iter().for_each(|note| warn(format_args!("{note}")));
    }
    let mut results: Vec<Measured> = options.concurrency.iter().map(|&streams| Measured::new(streams)).collect();
    let mut ceilings = Ceilings::new(&session.target)?;
    for round in 0..options.rounds {
        for result in &mut results {
            ceilings.measure()?;
            let before = ceilings.read();
            let decode = result.round(&session, options, round)?;
            result.pair(decode, [before, ceilings.read()]);
        }
    }
    ceilings.measure()?;
    let peaks = ceilings.best.report();
    let figures = results.iter().map(|result| result.figures(options, &cost, &peaks)).collect();
    let bytes = &session.plan.bytes;
    let report = Rates {
        model: session.assets.name.clone(),
        device: session.plan.device.clone(),
        start: session.phases.json(),
        start_described: session.phases.describe(),
        threads: session.plan.threads,
        input_len: options.input_len,
        output_len: options.output_len,
        rounds: options.rounds,
        ceilings: peaks,
        memory: Memory {
            weights: bytes.weights,
            kv: bytes.kv,
            activations: bytes.activations,
            resident_peak_loading: resident,
        },
        decode_bytes: cost.decode_bytes(1) as u64,
        results: figures,
    };
    Ok(Measurement { report, options: options.clone(), session, results })
}

impl Measurement {
    /// Times of the kernels of a step, as tables. Ends the session, whose memory is needed.
    pub fn profile(self) -> Result<String> {
        profile::tables(&self.options, self.session, &self.results)
    }
}
