//! Gaps between the tokens of running streams while a long prompt is computed beside them.
//!
//! Some streams decode; their gaps are the quiet ones. Then a long prompt arrives, and until its
//! first token every gap of every stream counts. One engine has an inter-token target, a multiple
//! of the quiet gap, and one has none; they take turns.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use folio_session::{InterTokenTarget, Session};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::streams::{self, Ask, Note, ms, note};
use super::{Model, at_least};
use crate::stats::{median, percentile};
use crate::table;

/// Tokens of a stream's own prompt.
const STREAM_PROMPT: usize = 32;
/// Tokens of every stream before gaps count, and tokens whose gaps are the quiet ones.
const WARM_TOKENS: usize = 16;
const QUIET_TOKENS: usize = 64;
/// Rounds whose quiet gaps set the target.
const PROBES: usize = 3;

#[derive(Clone, Debug)]
pub struct Options {
    pub model: Model,
    /// Number of streams that decode when the long prompt arrives.
    pub streams: usize,
    /// Tokens of the long prompt.
    pub prompt_len: usize,
    /// Inter-token target, as a multiple of the inter-token time without a prompt.
    pub target_ratio: f64,
    /// Number of rounds, alternating with and without the target.
    pub rounds: usize,
}

pub fn measure(args: &Options) -> Result<Report> {
    at_least("--streams", args.streams, 1)?;
    at_least("--prompt-len", args.prompt_len, 1)?;
    at_least("--rounds", args.rounds, 1)?;
    if !(args.target_ratio > 0.0 && args.target_ratio < 1e6) {
        bail!("--target-ratio is {}, but must lie above 0", args.target_ratio);
    }
    let free = start_engine(args, None)?;
    // The first touches pages for the first time.
    round(&free, args, 0)?;
    let quiet: Vec<f64> = (1..=PROBES)
        .map(|number| Ok(percentile(&round(&free, args, number)?.quiet, 50.0).unwrap_or_default().as_secs_f64()))
        .collect::<Result<_>>()?;
    let quiet = Duration::from_secs_f64(median(&quiet).middle);
    let target = quiet.mul_f64(args.target_ratio);
    let bound = start_engine(args, Some(target))?;
    round(&bound, args, PROBES + 1)?;
    let mut results = [Figures::new(None), Figures::new(Some(target))];
    for number in 0..args.rounds {
        for (session, figures) in [&free, &bound].into_iter().zip(&mut results) {
            figures.unloaded.push(alone(session, args, number)?);
            figures.rounds.push(round(session, args, PROBES + 2 + number)?);
        }
    }
    let (name, threads) = (free.assets.name.clone(), free.plan.threads);
    Ok(Report { options: args.clone(), name, threads, quiet, results })
}

fn start_engine(args: &Options, target: Option<Duration>) -> Result<Session> {
    // All of the model's context, because streams must outlast the prompt, however slowly it is
    // taken.
    args.model.start(args.streams + 1, None, |options| {
        options.prefix_caching = false;
        options.queue.inter_token_target = target.map_or(InterTokenTarget::Off, InterTokenTarget::Within);
        options.memory.fit = true;
    })
}

/// One arrival of a long prompt among running streams.
#[derive(Clone, Debug)]
struct Round {
    quiet: Vec<Duration>,
    /// Gaps that overlap the time from the long prompt's submission to its first token.
    during: Vec<Duration>,
    first_token: Duration,
}

/// The long prompt's first token when nothing else runs.
fn alone(session: &Session, args: &Options, number: usize) -> Result<Duration> {
    let answers = streams::together(session, vec![long_prompt(session, args, 500_000 + number)])?;
    answers.first().and_then(streams::Answer::first_token).context("the long prompt has a first token")
}

fn long_prompt(session: &Session, args: &Options, number: usize) -> Ask {
    Ask::new(streams::prompt(session.assets.model.spec.vocab_size, args.prompt_len, 1_000_000 + number), 2)
}

fn round(session: &Session, args: &Options, number: usize) -> Result<Round> {
    let vocab = session.assets.model.spec.vocab_size;
    let room = session.plan.max_model_len - STREAM_PROMPT;
    let long = args.streams;
    let mut log = Log { times: vec![Vec::new(); long + 1], ended: vec![false; long + 1], submitted: None };
    streams::reader()?.block_on(async {
        let (notes, mut inbox) = mpsc::unbounded_channel();
        let mut readers = JoinSet::new();
        for stream in 0..long {
            let prompt = streams::prompt(vocab, STREAM_PROMPT, number * long + stream);
            readers.spawn(note(Ask::new(prompt, room).submit(session)?, stream, notes.clone()));
        }
        while !log.is_complete() {
            let (stream, told) = inbox.recv().await.context("the readers went on")?;
            log.take(stream, told?);
            if log.submitted.is_none() && log.is_quiet() {
                log.submitted = Some(Instant::now());
                readers.spawn(note(long_prompt(session, args, number).submit(session)?, long, notes.clone()));
            }
        }
        // Readers that are dropped drop their streams, which aborts them.
        readers.shutdown().await;
        log.round()
    })
}

/// Arrivals of all streams, and last of the long prompt.
struct Log {
    times: Vec<Vec<Instant>>,
    ended: Vec<bool>,
    /// When the long prompt was.
    submitted: Option<Instant>,
}

impl Log {
    fn take(&mut self, stream: usize, note: Note) {
        match note {
            Some(arrival) => self.times[stream].push(arrival),
            None => self.ended[stream] = true,
        }
    }

    fn parts(&self) -> (&Vec<Instant>, &[Vec<Instant>]) {
        let (long, streams) = self.times.split_last().expect("the long prompt's entry is always there");
        (long, streams)
    }

    fn is_quiet(&self) -> bool {
        self.parts().1.iter().all(|times| times.len() > WARM_TOKENS + QUIET_TOKENS)
    }

    /// The long prompt has its first token, and every stream one at or after it.
    fn is_complete(&self) -> bool {
        let (long, streams) = self.parts();
        let Some(&first) = long.first() else { return false };
        let passed = |times: &Vec<Instant>| times.last().is_some_and(|&last| last >= first);
        streams.iter().zip(&self.ended).all(|(times, &ended)| ended || passed(times))
    }

    fn round(&self) -> Result<Round> {
        let (long, streams) = self.parts();
        let (Some(submitted), Some(&first)) = (self.submitted, long.first()) else {
            bail!("the long prompt has no first token");
        };
        let gaps = |keep: &dyn Fn(Instant, Instant) -> bool| -> Vec<Duration> {
            let pairs = streams.iter().flat_map(|times| times[WARM_TOKENS..].windows(2));
            pairs.filter(|pair| keep(pair[0], pair[1])).map(|pair| pair[1] - pair[0]).collect()
        };
        Ok(Round {
            quiet: gaps(&|_, end| end <= submitted),
            during: gaps(&|begin, end| end > submitted && begin < first),
            first_token: first - submitted,
        })
    }
}

/// One engine, over all rounds.
#[derive(Clone, Debug)]
struct Figures {
    target: Option<Duration>,
    rounds: Vec<Round>,
    unloaded: Vec<Duration>,
}

/// The median and the best of some rounds' values, in milliseconds.
struct Spread {
    median: f64,
    best: f64,
}

impl Figures {
    fn new(target: Option<Duration>) -> Self {
        Self { target, rounds: Vec::new(), unloaded: Vec::new() }
    }

    fn spread(&self, value: impl Fn(&Round) -> Duration) -> Spread {
        spread(self.rounds.iter().map(value))
    }

    fn percentile(&self, percent: f64) -> Spread {
        self.spread(|round| percentile(&round.during, percent).unwrap_or_default())
    }

    /// Over the gaps of all rounds together.
    fn pooled(&self, percent: f64) -> f64 {
        let all: Vec<Duration> = self.rounds.iter().flat_map(|round| round.during.iter().copied()).collect();
        ms(percentile(&all, percent).unwrap_or_default())
    }

    fn name(&self) -> String {
        self.target.map_or("off".into(), |target| format!("{:.2} ms", ms(target)))
    }

    /// How many times longer the first token takes among streams.
    fn slowdown(&self) -> f64 {
        self.spread(|round| round.first_token).median / spread(self.unloaded.iter().copied()).median
    }

    fn to_json(&self) -> Value {
        let both = |s: Spread| json!({"median": s.median, "best": s.best});
        json!({
            "target_ms": self.target.map(ms),
            "quiet_ms_p50": both(self.spread(|round| percentile(&round.quiet, 50.0).unwrap_or_default())),
            "quiet_ms_p99": both(self.spread(|round| percentile(&round.quiet, 99.0).unwrap_or_default())),
            "during_ms_p50": both(self.percentile(50.0)), "during_ms_p99": both(self.percentile(99.0)),
            "during_ms_max": both(self.percentile(100.0)), "during_ms_p99_all_rounds": self.pooled(99.0),
            "first_token_ms": both(self.spread(|round| round.first_token)),
            "first_token_unloaded_ms": both(spread(self.unloaded.iter().copied())),
            "first_token_ratio": self.slowdown(),
        })
    }

    fn row(&self) -> Vec<String> {
        let both = |s: Spread| format!("{:.2} ({:.2})", s.median, s.best);
        vec![
            self.name(),
            both(self.spread(|round| percentile(&round.quiet, 50.0).unwrap_or_default())),
            both(self.percentile(50.0)),
            both(self.percentile(99.0)),
            format!("{:.2}", self.pooled(99.0)),
            both(self.percentile(100.0)),
            both(self.spread(|round| round.first_token)),
            both(spread(self.unloaded.iter().copied())),
            format!("{:.2}x", self.slowdown()),
        ]
    }
}

fn spread(values: impl Iterator<Item = Duration>) -> Spread {
    let values: Vec<f64> = values.map(ms).collect();
    Spread { median: median(&values).middle, best: values.iter().copied().fold(f64::INFINITY, f64::min) }
}

/// Figures of the engine without a target and of the one with it.
#[derive(Clone, Debug)]
pub struct Report {
    options: Options,
    name: String,
    threads: usize,
    quiet: Duration,
    results: [Figures; 2],
}

impl Report {
    pub fn json(&self) -> Value {
        let options = &self.options;
        json!({
            "model": self.name, "threads": self.threads, "streams": options.streams,
            "prompt_len": options.prompt_len, "rounds": options.rounds, "target_ratio": options.target_ratio,
            "quiet_ms": ms(self.quiet), "results": self.results.iter().map(Figures::to_json).collect::<Vec<_>>(),
        })
    }

    pub fn text(&self) -> String {
        let head =
            ["target", "quiet p50", "gap p50", "gap p99", "p99 of all", "gap max", "first token", "unloaded", "slower"];
        let mut rows = vec![head.map(String::from).to_vec()];
        rows.extend(self.results.iter().map(Figures::row));
        format!(
            "{}: {} threads; {} streams decode, a prompt of {} tokens arrives; {} rounds, milliseconds, median of rounds \
             (best); the target is {} quiet gaps of {:.2} ms\n{}",
            self.name,
            self.threads,
            self.options.streams,
            self.options.prompt_len,
            self.options.rounds,
            self.options.target_ratio,
            ms(self.quiet),
            table::render(&rows)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_belong_to_quiet_or_to_the_prompt() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        // A token every 2 ms until 200, then one every 5 ms until the long prompt's first token at
        // 221.
        let quiet = (0..=100).map(|token| at(2 * token));
        let loaded = (1..=5).map(|token| at(200 + 5 * token));
        let stream: Vec<Instant> = quiet.chain(loaded).collect();
        let mut log = Log { times: vec![stream, Vec::new()], ended: vec![false; 2], submitted: None };
        assert!(log.is_quiet() && !log.is_complete());
        log.submitted = Some(at(201));
        log.take(1, Some(at(221)));
        assert!(log.is_complete());
        let round = log.round().expect("complete");
        assert_eq!(round.first_token, Duration::from_millis(20));
        assert_eq!(round.quiet, [Duration::from_millis(2)].repeat(100 - WARM_TOKENS));
        assert_eq!(round.during, [Duration::from_millis(5)].repeat(5), "the one that straddles the end counts");
    }
}
