//! `folio bench speculate`: what each method of guessing ahead is worth here, against no guessing.
//!
//! Every prompt is answered by all engines, which take turns, and all must say the same. A method's own terms predict
//! what it should gain: tokens a pass, over what a pass with its drafts takes in plain passes. Answers that run in
//! circles are left out, since any method guesses those.

mod prompts;
mod report;
mod synthetic;

use std::time::{Duration, Instant};

use anyhow::Result;
use folio_engine::SpeculationStats;

use super::streams::{self, Answer, Ask};
use super::{at_least, start};
use crate::args::{Method, SpeculateBench};
use crate::session::Session;

/// Of an answer's runs of four tokens, those that are unlike all others before them must be this share.
const DISTINCT: f64 = 0.5;
const RUN: usize = 4;

pub fn main(args: &SpeculateBench) -> Result<()> {
    at_least("--input-len", args.input_len, 1)?;
    at_least("--output-len", args.output_len, RUN + 1)?;
    at_least("--prompts", args.prompts, 1)?;
    args.concurrency.iter().try_for_each(|&streams| at_least("--concurrency", streams, 1))?;
    if let Some(agreement) = args.agreement {
        return synthetic::main(args, agreement);
    }
    for &streams in &args.concurrency {
        // Engines that have heard none of the prompts before: a method may learn from answers.
        let methods = std::iter::once(Method::Off).chain(args.methods.iter().cloned());
        let mut lanes = methods.map(|method| Lane::start(args, method, streams)).collect::<Result<Vec<_>>>()?;
        let prompts = prompts::read(args, &lanes[0].session)?;
        for lane in &lanes {
            lane.warm_up(args, streams)?;
        }
        for (number, chunk) in prompts.chunks(streams).enumerate() {
            round(args, &mut lanes, chunk, number)?;
        }
        report::print(args, streams, &lanes);
        lanes.into_iter().for_each(|lane| lane.session.end());
    }
    Ok(())
}

/// All engines answer the same prompts, in an order that changes.
fn round(args: &SpeculateBench, lanes: &mut [Lane], prompts: &[Vec<u32>], number: usize) -> Result<()> {
    let mut runs: Vec<Option<Run>> = lanes.iter().map(|_| None).collect();
    for turn in 0..lanes.len() {
        let lane = (turn + number) % lanes.len();
        runs[lane] = Some(lanes[lane].run(args, prompts.to_vec())?);
    }
    let runs: Vec<Run> = runs.into_iter().flatten().collect();
    let answers: Vec<_> = runs[0].answers.iter().map(|answer| &answer.tokens).collect();
    let circles = !args.keep_loops && answers.iter().all(|tokens| runs_in_circles(tokens));
    for (lane, run) in lanes.iter_mut().zip(&runs) {
        let same = run.answers.iter().zip(&answers).filter(|(answer, tokens)| answer.tokens == ***tokens).count();
        lane.different += prompts.len() - same;
        if circles {
            lane.dropped += prompts.len();
        } else {
            lane.add(run);
        }
    }
    Ok(())
}

/// One method's engine, and what was measured of it.
pub struct Lane {
    pub method: Method,
    session: Session,
    pub totals: Totals,
    /// Answers unlike those without guessing, and those that were left out.
    pub different: usize,
    pub dropped: usize,
}

/// Of all answers that count.
#[derive(Default)]
pub struct Totals {
    /// From the last of the first tokens to the last token, and tokens in between.
    pub time: Duration,
    pub tokens: u64,
    /// Steps without rows of prompts, what they took, and of that in drafting.
    pub passes: u64,
    pub steps: Duration,
    pub drafting: Duration,
    pub drafted: u64,
    pub accepted: u64,
}

/// What one engine made of some prompts.
struct Run {
    answers: Vec<Answer>,
    speculation: SpeculationStats,
}

impl Lane {
    fn start(args: &SpeculateBench, method: Method, streams: usize) -> Result<Self> {
        // A repeated text is an eighth longer.
        let max_len = args.input_len * 9 / 8 + 2 + args.output_len;
        let session = start(&args.common, streams, Some(max_len), |engine| {
            engine.no_enable_prefix_caching = true;
            engine.speculate.speculate = method.clone();
        })?;
        let totals = Totals::default();
        Ok(Self { method, session, totals, different: 0, dropped: 0 })
    }

    /// Touches all pages, and learns what steps cost.
    fn warm_up(&self, args: &SpeculateBench, streams: usize) -> Result<()> {
        let vocab = self.session.assets.model.spec.vocab_size;
        let prompt = |stream| streams::prompt(vocab, args.input_len, usize::MAX / 2 - stream);
        self.run(args, (0..streams).map(prompt).collect()).map(drop)
    }

    fn run(&self, args: &SpeculateBench, prompts: Vec<Vec<u32>>) -> Result<Run> {
        let before = self.session.engine.stats().speculation;
        let asks = prompts.into_iter().map(|prompt| {
            let mut ask = Ask::new(prompt, args.output_len);
            ask.params.temperature = args.temperature;
            ask
        });
        let answers = streams::together(&self.session, asks.collect())?;
        Ok(Run { answers, speculation: self.session.engine.stats().speculation.since(&before) })
    }

    fn add(&mut self, run: &Run) {
        let firsts = run.answers.iter().filter_map(|answer| answer.times.first());
        let lasts = run.answers.iter().filter_map(|answer| answer.times.last());
        let (Some(&began), Some(&ended)) = (firsts.max(), lasts.max()) else { return };
        let within = |time: &&Instant| **time > began;
        let totals = &mut self.totals;
        totals.tokens += run.answers.iter().flat_map(|answer| &answer.times).filter(within).count() as u64;
        totals.time += ended - began;
        totals.passes += run.speculation.passes;
        totals.steps += run.speculation.steps;
        totals.drafting += run.speculation.drafting;
        totals.drafted += run.speculation.draft_tokens;
        totals.accepted += run.speculation.accepted_tokens;
    }
}

fn runs_in_circles(tokens: &[u32]) -> bool {
    let all = tokens.windows(RUN).count();
    let distinct: std::collections::HashSet<_> = tokens.windows(RUN).collect();
    (distinct.len() as f64) < DISTINCT * all as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn circles() {
        assert!(runs_in_circles(&[1, 2, 3].repeat(20)));
        assert!(!runs_in_circles(&(0..60).collect::<Vec<_>>()));
        assert!(!runs_in_circles(&[]));
    }
}
