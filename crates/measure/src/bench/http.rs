//! The cost of an HTTP server over the engine that it serves, in one process.
//!
//! The same requests go to the engine directly and over a loopback socket, in turns, since the cost
//! of HTTP is a small difference of large numbers on a machine that others use. The engine computes
//! on all cores, so that whatever the server's thread takes, tokens lose; the client's thread takes
//! some too, which it would elsewhere not: hence CPU time.

mod client;
mod cpu;
mod report;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use folio_session::Session;

use super::streams::{self, Ask};
use super::{Model, at_least};
use client::{Client, Message};
use cpu::{CpuTime, Snapshot};
pub use report::Report;

/// Tokens of an answer whose first one is timed: the second shows that the first came by itself.
const FIRST_TOKENS: usize = 2;
/// A first token that ends within a character makes no event: such a prompt is left out, as long as
/// they are few.
const MAX_SILENT_SHARE: usize = 4;

/// Name of the thread that serves, by which its CPU time is told apart.
pub const SERVER_THREAD: &str = "http-server";

#[derive(Clone, Debug)]
pub struct Options {
    pub model: Model,
    /// Number of concurrent streams.
    pub concurrency: usize,
    /// Tokens in each answer.
    pub tokens: usize,
    /// Tokens in each prompt.
    pub prompt_tokens: usize,
    /// Number of alternating pairs of runs, engine alone and over HTTP.
    pub pairs: usize,
    /// Number of single requests of either kind that measure the time to first token.
    pub rounds: usize,
}

/// A running HTTP server over the engine of a session.
pub trait Server {
    fn address(&self) -> SocketAddr;

    fn end(self);
}

/// `serve` starts the server, with room for all streams, on a thread called [`SERVER_THREAD`].
pub fn measure<S: Server>(args: &Options, serve: impl FnOnce(&Session) -> Result<S>) -> Result<Report> {
    for (flag, value) in [
        ("--concurrency", args.concurrency),
        ("--prompt-tokens", args.prompt_tokens),
        ("--pairs", args.pairs),
        ("--rounds", args.rounds),
    ] {
        at_least(flag, value, 1)?;
    }
    at_least("--tokens", args.tokens, 2)?;
    let session = args.model.start(args.concurrency, Some(args.prompt_tokens + args.tokens), |options| {
        // Every prompt is asked twice, and must be computed both times.
        options.prefix_caching = false;
    })?;
    let server = serve(&session)?;
    let client = Client::connect(server.address(), args.concurrency)?;
    let mut bench = Bench { args, session: &session, client, prompts: 0 };
    // The first of each pays for pages that are touched for the first time.
    bench.pair(0)?;
    let pairs = (0..args.pairs).map(|pair| bench.pair(pair)).collect::<Result<Vec<_>>>()?;
    let firsts = bench.first_tokens()?;
    let report = Report::new(args, &session, &pairs, &firsts);
    drop(bench);
    server.end();
    session.end();
    Ok(report)
}

/// One run of all streams.
#[derive(Clone, Copy, Debug, Default)]
pub struct Run {
    pub tokens: usize,
    pub took: Duration,
    pub cpu: CpuTime,
}

impl Run {
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.took.as_secs_f64()
    }
}

/// The same requests both ways.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pair {
    pub direct: Run,
    pub http: Run,
    /// Events of all answers over HTTP.
    pub events: usize,
    pub bytes: usize,
}

/// Times to the first token, of the same prompts.
#[derive(Default)]
pub struct FirstTokens {
    pub direct: Vec<Duration>,
    pub http: Vec<Duration>,
}

struct Bench<'a> {
    args: &'a Options,
    session: &'a Session,
    client: Client,
    /// Number of prompts made so far; no two are alike.
    prompts: usize,
}

impl Bench<'_> {
    fn new_prompt(&mut self) -> Vec<u32> {
        self.prompts += 1;
        streams::prompt(self.session.assets.model.spec.vocab_size, self.args.prompt_tokens, self.prompts)
    }

    fn message(&self, prompt: &[u32], tokens: usize) -> Message {
        Message::new(self.client.address(), &self.session.assets.name, prompt, tokens)
    }

    fn pair(&mut self, number: usize) -> Result<Pair> {
        let prompts: Vec<Vec<u32>> = (0..self.args.concurrency).map(|_| self.new_prompt()).collect();
        let mut pair = Pair::default();
        if number.is_multiple_of(2) {
            pair.direct = self.direct(&prompts)?;
            self.http(&prompts, &mut pair)?;
        } else {
            self.http(&prompts, &mut pair)?;
            pair.direct = self.direct(&prompts)?;
        }
        Ok(pair)
    }

    fn direct(&self, prompts: &[Vec<u32>]) -> Result<Run> {
        let asks: Vec<Ask> = prompts.iter().map(|prompt| Ask::new(prompt.clone(), self.args.tokens)).collect();
        let before = Snapshot::take()?;
        let answers = streams::together(self.session, asks)?;
        let cpu = Snapshot::take()?.since(&before);
        let began = answers.iter().map(|answer| answer.submitted).min().context("one stream at least")?;
        let ended = answers.iter().filter_map(|answer| answer.times.last()).max().context("a token at least")?;
        let tokens = answers.iter().map(|answer| answer.times.len()).sum();
        Ok(Run { tokens, took: *ended - began, cpu })
    }

    fn http(&mut self, prompts: &[Vec<u32>], pair: &mut Pair) -> Result<()> {
        let messages = prompts.iter().map(|prompt| self.message(prompt, self.args.tokens)).collect();
        let before = Snapshot::take()?;
        let (began, answers) = self.client.together(messages)?;
        let cpu = Snapshot::take()?.since(&before);
        let ended = answers.iter().map(|answer| answer.ended).max().context("one stream at least")?;
        pair.events = answers.iter().map(|answer| answer.events).sum();
        pair.bytes = answers.iter().map(|answer| answer.bytes).sum();
        // Each ended by its length, which the client has seen.
        pair.http = Run { tokens: prompts.len() * self.args.tokens, took: ended - began, cpu };
        Ok(())
    }

    fn first_tokens(&mut self) -> Result<FirstTokens> {
        let mut firsts = FirstTokens::default();
        let mut silent = 0;
        while firsts.direct.len() < self.args.rounds {
            let prompt = self.new_prompt();
            let (direct, http);
            if firsts.direct.len().is_multiple_of(2) {
                direct = self.first_direct(&prompt)?;
                http = self.first_http(&prompt)?;
            } else {
                http = self.first_http(&prompt)?;
                direct = self.first_direct(&prompt)?;
            }
            let Some(http) = http else {
                silent += 1;
                if silent > MAX_SILENT_SHARE * self.args.rounds {
                    bail!("{silent} first tokens had no event of their own");
                }
                continue;
            };
            firsts.direct.push(direct);
            firsts.http.push(http);
        }
        Ok(firsts)
    }

    fn first_direct(&self, prompt: &[u32]) -> Result<Duration> {
        let answers = streams::together(self.session, vec![Ask::new(prompt.to_vec(), FIRST_TOKENS)])?;
        answers.first().and_then(streams::Answer::first_token).context("a first token")
    }

    /// None if not every token had an event: the first event may not be the first token's then.
    fn first_http(&mut self, prompt: &[u32]) -> Result<Option<Duration>> {
        let message = self.message(prompt, FIRST_TOKENS);
        let (_, answers) = self.client.together(vec![message])?;
        let answer = answers.first().context("an answer")?;
        Ok((answer.events == FIRST_TOKENS).then(|| answer.first_event - answer.sent))
    }
}
