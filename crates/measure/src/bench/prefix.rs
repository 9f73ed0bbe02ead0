//! The prefix cache: its cost where it never hits, and its gain where it always does.
//!
//! The cost is a small difference of large numbers on a machine that others use: engines with the
//! cache and without take turns, each pair gives one ratio, and the median of the pairs is printed
//! with its interval.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use folio_engine::tiers::DiskStore;
use folio_session::Session;
use serde_json::{Value, json};

use super::streams::{self, Ask, ms};
use super::{Model, at_least};
use crate::stats::{Median, median};
use crate::table;

#[derive(Clone, Debug)]
pub struct Options {
    pub model: Model,
    /// Tokens of the prompt that all requests share.
    pub prompt_len: usize,
    /// Number of requests with that prompt, cold and cached each; the median counts.
    pub rounds: usize,
    /// Number of alternating pairs of runs without shared prompts, cache on and off.
    pub pairs: usize,
    /// Number of streams in such a run.
    pub streams: usize,
    /// Tokens in each prompt of such a run.
    pub input_len: usize,
    /// Tokens in each answer of such a run.
    pub output_len: usize,
}

pub fn measure(args: &Options) -> Result<Report> {
    for (flag, value) in [("--pairs", args.pairs), ("--rounds", args.rounds), ("--streams", args.streams)] {
        at_least(flag, value, 1)?;
    }
    at_least("--input-len", args.input_len, 1)?;
    at_least("--output-len", args.output_len, 2)?;
    at_least("--prompt-len", args.prompt_len, 2)?;
    let cost = cost(args)?;
    let cached = start_engine(args, true)?;
    let hits = Hits::measure(args, &cached)?;
    let restart = match args.model.options.memory.disk_tier {
        Some(_) => Some(Restart::measure(args, cached)?),
        None => None,
    };
    Ok(Report { options: args.clone(), cost, hits, restart })
}

fn start_engine(args: &Options, caches: bool) -> Result<Session> {
    let max_len = (args.input_len + args.output_len).max(args.prompt_len + 2);
    args.model.start(args.streams, Some(max_len), |options| {
        options.prefix_caching = caches;
        if !caches {
            (options.memory.disk_tier, options.memory.host_tier_bytes) = (None, None);
        }
    })
}

/// How much longer a run takes with the cache, as a share of it without. The placement of an
/// engine's memory makes a difference of its own, so every pair has new engines, in all four orders
/// of starting and running.
fn cost(args: &Options) -> Result<Median> {
    let mut ratios = Vec::new();
    let mut number = 0;
    for pair in 0..args.pairs {
        let cached_first = pair % 2 == 0;
        let first = start_engine(args, cached_first)?;
        let second = start_engine(args, !cached_first)?;
        let (cached, plain) = if cached_first { (&first, &second) } else { (&second, &first) };
        let sessions = if pair / 2 % 2 == 0 { [cached, plain] } else { [plain, cached] };
        // The first of each pays for pages that are touched for the first time.
        for session in sessions {
            run_new_prompts(args, session, &mut number)?;
        }
        let took = [
            run_new_prompts(args, sessions[0], &mut number)?.as_secs_f64(),
            run_new_prompts(args, sessions[1], &mut number)?.as_secs_f64(),
        ];
        let [with, without] = if pair / 2 % 2 == 0 { took } else { [took[1], took[0]] };
        ratios.push(with / without - 1.0);
        first.end();
        second.end();
    }
    Ok(median(&ratios))
}

/// Streams with nothing in common with each other or with those before them.
fn run_new_prompts(args: &Options, session: &Session, number: &mut usize) -> Result<Duration> {
    let vocab = session.assets.model.spec.vocab_size;
    let ask = |stream| Ask::new(streams::prompt(vocab, args.input_len, *number + stream), args.output_len);
    let asks = (0..args.streams).map(ask).collect();
    *number += args.streams;
    let begin = Instant::now();
    let answers = streams::together(session, asks)?;
    anyhow::ensure!(answers.iter().all(|a| a.usage.cached_tokens == 0), "a prompt that is new was found cached");
    Ok(begin.elapsed())
}

/// First-token times of one long prompt.
#[derive(Clone, Debug)]
struct Hits {
    miss: Vec<f64>,
    hit: Vec<f64>,
    cached_tokens: usize,
}

impl Hits {
    fn measure(args: &Options, session: &Session) -> Result<Self> {
        let mut hits = Self { miss: Vec::new(), hit: Vec::new(), cached_tokens: usize::MAX };
        for round in 0..args.rounds {
            let (miss, cached) = first_token(args, session, round)?;
            anyhow::ensure!(cached == 0, "a prompt that is new was found cached");
            let (hit, cached) = first_token(args, session, round)?;
            hits.miss.push(miss);
            hits.hit.push(hit);
            hits.cached_tokens = hits.cached_tokens.min(cached);
        }
        Ok(hits)
    }

    fn ratio(&self) -> f64 {
        median(&self.miss).middle / median(&self.hit).middle
    }
}

/// Milliseconds to the first token of the shared prompt of that number, and how much of it was
/// cached.
fn first_token(args: &Options, session: &Session, number: usize) -> Result<(f64, usize)> {
    // Far from the numbers of the runs without anything shared.
    let prompt = streams::prompt(session.assets.model.spec.vocab_size, args.prompt_len, 1_000_000 + number);
    let answers = streams::together(session, vec![Ask::new(prompt, 2)])?;
    let answer = answers.first().context("one answer")?;
    Ok((ms(answer.first_token().context("a first token")?), answer.usage.cached_tokens))
}

/// The same prompts after the process's engine ended and another began on the same folder.
#[derive(Clone, Debug)]
struct Restart {
    first: Vec<f64>,
    cached_tokens: usize,
}

impl Restart {
    fn measure(args: &Options, session: Session) -> Result<Self> {
        session.disk.as_ref().into_iter().for_each(settle);
        session.end();
        let session = start_engine(args, true)?;
        let mut restart = Self { first: Vec::new(), cached_tokens: usize::MAX };
        for round in 0..args.rounds {
            let (first, cached) = first_token(args, &session, round)?;
            restart.first.push(first);
            restart.cached_tokens = restart.cached_tokens.min(cached);
        }
        Ok(restart)
    }
}

/// Chunks are written beside the answers, and an engine that ends leaves those that wait: until no
/// more come.
fn settle(disk: &DiskStore) {
    let mut before = None;
    while before != Some(disk.bytes()) {
        before = Some(disk.bytes());
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// The cost without hits, the gain with them, and what a restart leaves of it.
#[derive(Clone, Debug)]
pub struct Report {
    options: Options,
    cost: Median,
    hits: Hits,
    restart: Option<Restart>,
}

impl Report {
    pub fn json(&self) -> Value {
        let Self { options, cost, hits, restart } = self;
        let (miss, hit) = (median(&hits.miss), median(&hits.hit));
        json!({
            "cost_at_no_hit": {
                "median": cost.middle, "low": cost.low, "high": cost.high, "pairs": options.pairs,
                "streams": options.streams, "input_len": options.input_len, "output_len": options.output_len,
            },
            "prompt_len": options.prompt_len, "rounds": options.rounds,
            "first_token_ms": {"miss": miss.middle, "hit": hit.middle, "ratio": hits.ratio()},
            "cached_tokens": hits.cached_tokens,
            "after_restart": restart.as_ref().map(|restart| json!({
                "first_token_ms": median(&restart.first).middle, "cached_tokens": restart.cached_tokens,
            })),
        })
    }

    pub fn text(&self) -> String {
        let Self { options, cost, hits, restart } = self;
        let (miss, hit) = (median(&hits.miss), median(&hits.hit));
        let row = |name: &str, time: Median, cached: usize, ratio: f64| {
            let range = format!("{:.1} to {:.1}", time.low, time.high);
            let cells = [format!("{:.2} ms", time.middle), range, cached.to_string(), format!("{ratio:.1}x")];
            [vec![name.to_string()], cells.to_vec()].concat()
        };
        let prompt = format!("prompt of {} tokens", options.prompt_len);
        let head = [&prompt, "first token", "95% interval", "cached", "faster"];
        let mut rows = vec![head.map(str::to_string).to_vec()];
        rows.push(row("new", miss, 0, 1.0));
        rows.push(row("seen before", hit, hits.cached_tokens, hits.ratio()));
        if let Some(restart) = restart {
            let first = median(&restart.first);
            rows.push(row("after a restart", first, restart.cached_tokens, miss.middle / first.middle));
        }
        format!(
            "cost at a hit rate of 0%: {:+.2}% of the time, 95% interval {:+.2}% to {:+.2}% ({} pairs of {} streams, {} \
             in / {} out)\n{}",
            cost.middle * 100.0,
            cost.low * 100.0,
            cost.high * 100.0,
            options.pairs,
            options.streams,
            options.input_len,
            options.output_len,
            table::render(&rows)
        )
    }
}
