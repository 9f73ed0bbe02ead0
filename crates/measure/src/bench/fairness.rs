//! Two tenants: one sends a multiple of the other's requests. While both wait, each
//! should get its weight of the tokens, however many requests it has in the queue.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use folio_engine::RequestOptions;
use folio_session::Session;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::streams::{self, Ask, note};
use super::{Model, at_least};
use crate::table;

#[derive(Clone, Debug)]
pub struct Options {
    pub model: Model,
    /// Weights of the flooding tenant and of the other.
    pub weights: Vec<u32>,
    /// Requests of the flooding tenant, as a multiple of the other's.
    pub flood: usize,
    /// Number of requests of the other tenant.
    pub requests: usize,
    /// Tokens in each prompt.
    pub input_len: usize,
    /// Tokens in each answer.
    pub output_len: usize,
    /// Maximum number of requests that run at once.
    pub streams: usize,
}

/// The flooding tenant, and the other.
const TENANTS: [&str; 2] = ["flooding", "other"];

pub fn measure(args: &Options) -> Result<Report> {
    let &[first, second] = &args.weights[..] else {
        bail!("--weights has {} numbers, but two are needed, as in 1:1", args.weights.len());
    };
    for (flag, value) in [("--flood", args.flood), ("--requests", args.requests), ("--streams", args.streams)] {
        at_least(flag, value, 1)?;
    }
    at_least("--weights", first.min(second) as usize, 1)?;
    at_least("--input-len", args.input_len, 1)?;
    at_least("--output-len", args.output_len, 1)?;
    let counts = [args.requests.saturating_mul(args.flood), args.requests];
    let session = args.model.start(args.streams, Some(args.input_len + args.output_len), |options| {
        options.prefix_caching = false;
        options.queue.max_waiting = Some(counts[0].saturating_add(counts[1]));
    })?;
    let vocab = session.assets.model.spec.vocab_size;
    // In the order of a flood: several of the one for each of the other.
    let tenants = (0..args.requests).flat_map(|_| std::iter::repeat_n(0, args.flood).chain([1]));
    let tenants: Vec<usize> = tenants.collect();
    let asks = tenants.iter().enumerate().map(|(number, &tenant)| Ask {
        options: RequestOptions {
            tenant: tenant as u64 + 1,
            weight: args.weights[tenant],
            ..RequestOptions::default()
        },
        ..Ask::new(streams::prompt(vocab, args.input_len, number), args.output_len)
    });
    let served = Served::measure(&session, &tenants, asks.collect())?;
    Ok(Report { options: args.clone(), served, counts })
}

/// Tokens of each tenant while both had requests waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Served {
    tokens: [usize; 2],
    waited_ms: u128,
}

impl Served {
    /// Reads until one of them has nothing left to wait for; the rest is aborted.
    fn measure(session: &Session, tenants: &[usize], asks: Vec<Ask>) -> Result<Self> {
        let begin = Instant::now();
        let mut count = Count::new(tenants, asks.iter().map(|ask| ask.prompt.len()).collect());
        streams::reader()?.block_on(async {
            let (notes, mut inbox) = mpsc::unbounded_channel();
            let mut readers = JoinSet::new();
            for (number, ask) in asks.into_iter().enumerate() {
                readers.spawn(note(ask.submit(session)?, number, notes.clone()));
            }
            while !count.is_over() {
                let (number, told) = inbox.recv().await.context("the readers went on")?;
                if told?.is_some() {
                    count.token(number);
                }
            }
            readers.shutdown().await;
            Ok(Self { tokens: count.tokens, waited_ms: begin.elapsed().as_millis() })
        })
    }

    fn share(&self, tenant: usize) -> f64 {
        self.tokens[tenant] as f64 / self.tokens.iter().sum::<usize>().max(1) as f64
    }
}

/// A prompt counts when its first token comes. A tenant waits until its last request has begun.
struct Count {
    /// The tenant of each request.
    tenants: Vec<usize>,
    /// Tokens of each prompt, until it is counted.
    prompts: Vec<usize>,
    waiting: [usize; 2],
    tokens: [usize; 2],
}

impl Count {
    fn new(tenants: &[usize], prompts: Vec<usize>) -> Self {
        let waiting = [0, 1].map(|tenant| tenants.iter().filter(|owner| **owner == tenant).count());
        Self { tenants: tenants.to_vec(), prompts, waiting, tokens: [0, 0] }
    }

    fn token(&mut self, request: usize) {
        let tenant = self.tenants[request];
        let prompt = std::mem::take(&mut self.prompts[request]);
        if prompt > 0 {
            self.waiting[tenant] -= 1;
        }
        self.tokens[tenant] += prompt + 1;
    }

    fn is_over(&self) -> bool {
        self.waiting.contains(&0)
    }
}

/// Tokens that each tenant got, beside its due.
#[derive(Clone, Debug)]
pub struct Report {
    options: Options,
    served: Served,
    /// Requests of each tenant.
    counts: [usize; 2],
}

impl Report {
    fn due(&self, tenant: usize) -> f64 {
        f64::from(self.options.weights[tenant]) / f64::from(self.options.weights.iter().sum::<u32>())
    }

    pub fn json(&self) -> Value {
        let tenant = |tenant: usize| {
            json!({
                "tenant": TENANTS[tenant], "requests": self.counts[tenant], "weight": self.options.weights[tenant],
                "tokens": self.served.tokens[tenant], "share": self.served.share(tenant), "due": self.due(tenant),
            })
        };
        json!({"backlogged_ms": self.served.waited_ms as u64, "tenants": [tenant(0), tenant(1)]})
    }

    pub fn text(&self) -> String {
        let Self { options, served, counts } = self;
        let head = ["tenant", "requests", "weight", "tokens served", "share", "due", "off by"];
        let mut rows = vec![head.map(String::from).to_vec()];
        for tenant in 0..2 {
            let percent = |share: f64| format!("{:.1}%", share * 100.0);
            rows.push(vec![
                TENANTS[tenant].into(),
                counts[tenant].to_string(),
                options.weights[tenant].to_string(),
                served.tokens[tenant].to_string(),
                percent(served.share(tenant)),
                percent(self.due(tenant)),
                format!("{:+.1}%", (served.share(tenant) / self.due(tenant) - 1.0) * 100.0),
            ]);
        }
        format!(
            "two tenants, {} requests at once, {} in / {} out; both waited for {:.1} s\n{}",
            options.streams,
            options.input_len,
            options.output_len,
            served.waited_ms as f64 / 1e3,
            table::render(&rows)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_count_once_and_the_first_to_run_out_ends_it() {
        let mut count = Count::new(&[0, 1, 0, 0, 1], vec![100; 5]);
        for request in [0, 1, 0, 2] {
            count.token(request);
        }
        assert_eq!((count.tokens, count.is_over()), ([203, 101], false));
        count.token(4);
        assert_eq!((count.tokens, count.is_over()), ([203, 202], true), "the second tenant has none waiting");
        let served = Served { tokens: [300, 100], waited_ms: 1 };
        assert!((served.share(0) - 0.75).abs() < 1e-12);
    }
}
