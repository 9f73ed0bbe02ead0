//! The gain of each drafting method over plain decoding.
//!
//! Every prompt is answered by all engines, which take turns, and all must say the same. A method's
//! own terms predict what it should gain: tokens a pass, over what a pass with its drafts takes in
//! plain passes. Answers that run in circles are left out, since any method guesses those. Every
//! round is a pair of each method and none: the median of their ratios is printed with its
//! interval. Files that the model does repeat as asked are counted once more on their own.

mod prompts;
mod repeat;
mod report;
mod synthetic;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use folio_engine::SpeculationStats;
use folio_session::{Method, Session};

use super::streams::{self, Answer, Ask};
use super::{Model, at_least};
use prompts::Prompt;
pub use report::Report;
pub use synthetic::{Report as SyntheticReport, measure as measure_synthetic};

/// The least share of an answer's runs of four tokens that are unlike all others before them.
const DISTINCT: f64 = 0.5;
const RUN: usize = 4;

#[derive(Clone, Debug)]
pub struct Options {
    pub model: Model,
    pub methods: Vec<Method>,
    /// File or folder of texts to continue; by default prompts have no pattern.
    pub text: Option<PathBuf>,
    /// Prompts show a file and the beginning of its copy with one edit.
    pub repeat: Option<Repeat>,
    /// Number of times that such a prompt shows the file.
    pub shown: usize,
    /// Number of rounds of prompts, instead of `prompts`.
    pub pairs: Option<usize>,
    /// Number of prompts in all.
    pub prompts: usize,
    /// Tokens of the text in each prompt.
    pub input_len: usize,
    /// Tokens in each answer.
    pub output_len: usize,
    pub temperature: f32,
    /// Numbers of concurrent streams.
    pub concurrency: Vec<usize>,
    /// Include answers that repeat themselves.
    pub keep_loops: bool,
}

/// Source of the file that a prompt repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// A piece of the text.
    Text,
    /// The model's continuation of a piece's beginning.
    Own,
}

/// Passes on a report for each number of streams, as soon as it is made.
pub fn measure(args: &Options, each: &mut dyn FnMut(&Report) -> Result<()>) -> Result<()> {
    check(args)?;
    for &streams in &args.concurrency {
        // Engines that have heard none of the prompts before: a method may learn from answers.
        let methods = std::iter::once(Method::Off).chain(args.methods.iter().cloned());
        let mut lanes = methods.map(|method| Lane::start(args, method, streams)).collect::<Result<Vec<_>>>()?;
        let prompts = match args.repeat {
            Some(kind) => repeat::read(args, &lanes[0].session, kind, streams)?,
            None => prompts::read(args, &lanes[0].session, streams)?,
        };
        let mut followed = Vec::new();
        for lane in &lanes {
            lane.warm_up(args, streams)?;
        }
        for (number, chunk) in prompts.chunks(streams).enumerate() {
            round(args, &mut lanes, chunk, number, &mut followed)?;
        }
        each(&Report::new(args, streams, &lanes, followed))?;
        lanes.into_iter().for_each(|lane| lane.session.end());
    }
    Ok(())
}

fn check(args: &Options) -> Result<()> {
    at_least("--input-len", args.input_len, 1)?;
    at_least("--output-len", args.output_len, RUN + 1)?;
    at_least("--prompts", args.prompts, 1)?;
    at_least("--pairs", args.pairs.unwrap_or(1), 1)?;
    at_least("--shown", args.shown, 1)?;
    args.concurrency.iter().try_for_each(|&streams| at_least("--concurrency", streams, 1))
}

/// All engines answer the same prompts, in an order that changes. Says in `followed` how far
/// answers did as asked.
fn round(
    args: &Options,
    lanes: &mut [Lane],
    prompts: &[Prompt],
    number: usize,
    followed: &mut Vec<usize>,
) -> Result<()> {
    let mut runs: Vec<Option<Run>> = lanes.iter().map(|_| None).collect();
    for turn in 0..lanes.len() {
        let lane = (turn + number) % lanes.len();
        runs[lane] = Some(lanes[lane].run(args, prompts.iter().map(|prompt| prompt.tokens.clone()).collect())?);
    }
    let runs: Vec<Run> = runs.into_iter().flatten().collect();
    let answers: Vec<_> = runs[0].answers.iter().map(|answer| &answer.tokens).collect();
    let circles = !args.keep_loops && answers.iter().all(|tokens| runs_in_circles(tokens));
    let repeats = !circles && lanes[0].note_followed(&answers, prompts, followed);
    let none = Totals::of(&runs[0], None);
    for (lane, run) in lanes.iter_mut().zip(&runs) {
        let same = run.answers.iter().zip(&answers).filter(|(answer, tokens)| answer.tokens == ***tokens).count();
        lane.different += prompts.len() - same;
        if circles {
            lane.dropped += prompts.len();
            continue;
        }
        let totals = Totals::of(run, none.as_ref());
        if let Some(totals) = totals.as_ref().filter(|_| repeats) {
            lane.repeating.add(totals);
        }
        totals.iter().for_each(|totals| lane.totals.add(totals));
    }
    Ok(())
}

/// One method's engine, and what was measured of it.
pub struct Lane {
    pub method: Method,
    session: Session,
    pub totals: Totals,
    /// Totals of rounds in which all answers repeat a file as asked.
    pub repeating: Totals,
    /// Answers unlike those without guessing, and those that were left out.
    pub different: usize,
    pub dropped: usize,
}

/// Sums over all answers that count.
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
    /// Tokens a second against those without guessing, round by round.
    pub gains: Vec<f64>,
}

/// One engine's answers to some prompts.
struct Run {
    answers: Vec<Answer>,
    speculation: SpeculationStats,
}

impl Lane {
    fn start(args: &Options, method: Method, streams: usize) -> Result<Self> {
        let prompt = if args.repeat.is_some() { repeat::longest(args) } else { args.input_len };
        let max_len = prompt + args.output_len;
        let session = args.model.start(streams, Some(max_len), |options| {
            options.prefix_caching = false;
            options.speculate.method = method.clone();
        })?;
        let (totals, repeating) = (Totals::default(), Totals::default());
        Ok(Self { method, session, totals, repeating, different: 0, dropped: 0 })
    }

    /// Touches all pages, and learns what steps cost.
    fn warm_up(&self, args: &Options, streams: usize) -> Result<()> {
        let vocab = self.session.assets.model.spec.vocab_size;
        let prompt = |stream| streams::prompt(vocab, args.input_len, usize::MAX / 2 - stream);
        self.run(args, (0..streams).map(prompt).collect()).map(drop)
    }

    fn run(&self, args: &Options, prompts: Vec<Vec<u32>>) -> Result<Run> {
        let before = self.session.engine.stats().speculation;
        let asks = prompts.into_iter().map(|prompt| {
            let mut ask = Ask::new(prompt, args.output_len);
            ask.params.temperature = args.temperature;
            ask
        });
        let answers = streams::together(&self.session, asks.collect())?;
        Ok(Run { answers, speculation: self.session.engine.stats().speculation.since(&before) })
    }

    /// How far each answer did as its prompt asked, and whether all of them did.
    fn note_followed(&self, answers: &[&Vec<u32>], prompts: &[Prompt], followed: &mut Vec<usize>) -> bool {
        let Some(tokenizer) = &self.session.assets.tokenizer else { return false };
        let before = followed.len();
        for (answer, prompt) in answers.iter().zip(prompts) {
            let Some(expected) = &prompt.expected else { return false };
            followed.push(repeat::followed(answer, expected, |tokens| tokenizer.decode(tokens, true)));
        }
        let least = |answer: &Vec<u32>| (repeat::REPEATS * answer.len() as f64).ceil() as usize;
        followed[before..].iter().zip(answers).all(|(&followed, answer)| followed >= least(answer))
    }
}

impl Totals {
    /// None where there are too few tokens to tell.
    fn of(run: &Run, none: Option<&Totals>) -> Option<Self> {
        let firsts = run.answers.iter().filter_map(|answer| answer.times.first());
        let lasts = run.answers.iter().filter_map(|answer| answer.times.last());
        let (&began, &ended) = (firsts.max()?, lasts.max()?);
        let within = |time: &&Instant| **time > began;
        let mut totals = Self {
            time: ended - began,
            tokens: run.answers.iter().flat_map(|answer| &answer.times).filter(within).count() as u64,
            passes: run.speculation.passes,
            steps: run.speculation.steps,
            drafting: run.speculation.drafting,
            drafted: run.speculation.draft_tokens,
            accepted: run.speculation.accepted_tokens,
            gains: Vec::new(),
        };
        totals.gains.push(none.map_or(1.0, |none| totals.rate() / none.rate()));
        Some(totals)
    }

    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64()
    }

    fn add(&mut self, other: &Self) {
        self.time += other.time;
        self.tokens += other.tokens;
        self.passes += other.passes;
        self.steps += other.steps;
        self.drafting += other.drafting;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.gains.extend(&other.gains);
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
