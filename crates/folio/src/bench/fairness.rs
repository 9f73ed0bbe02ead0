//! `folio bench fairness`: two tenants, one of which sends many times what the other does. While both wait, each is to
//! get its weight of the tokens, however many requests it has in the queue.

use std::time::Instant;

use anyhow::{Result, bail};
use folio_engine::RequestOptions;
use serde_json::json;

use super::streams::{self, Answer, Ask};
use super::{at_least, start};
use crate::args::FairnessBench;
use crate::table;

/// The flooding tenant, and the other.
const TENANTS: [&str; 2] = ["flooding", "other"];

pub fn main(args: &FairnessBench) -> Result<()> {
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
    let session = start(&args.common, args.streams, Some(args.input_len + args.output_len), |engine| {
        engine.no_enable_prefix_caching = true;
        engine.queue.max_waiting = counts[0].saturating_add(counts[1]);
    })?;
    let vocab = session.assets.model.spec.vocab_size;
    // As they would come: so many of the one for each of the other.
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
    let answers = streams::together(&session, asks.collect())?;
    report(args, &Served::of(args.input_len, &tenants, &answers), counts);
    Ok(())
}

/// Tokens of each tenant while both had requests waiting.
#[derive(Debug, PartialEq, Eq)]
struct Served {
    tokens: [usize; 2],
    waited_ms: u64,
}

impl Served {
    /// A prompt counts when its first token comes. A tenant waits until its last request has begun.
    fn of(input_len: usize, tenants: &[usize], answers: &[Answer]) -> Self {
        let both = || tenants.iter().zip(answers);
        let last_begun = |tenant: usize| {
            let firsts = both().filter(|(owner, _)| **owner == tenant).filter_map(|(_, answer)| answer.times.first());
            firsts.max().copied()
        };
        let begin = answers.iter().map(|answer| answer.submitted).min();
        let end = last_begun(0).into_iter().chain(last_begun(1)).min();
        let (Some(begin), Some(end)) = (begin, end) else { return Self { tokens: [0, 0], waited_ms: 0 } };
        let mut tokens = [0, 0];
        for (&tenant, answer) in both() {
            let arrived = answer.times.iter().filter(|time: &&Instant| **time < end).count();
            tokens[tenant] += arrived + if arrived > 0 { input_len } else { 0 };
        }
        Self { tokens, waited_ms: (end - begin).as_millis() as u64 }
    }

    fn share(&self, tenant: usize) -> f64 {
        self.tokens[tenant] as f64 / self.tokens.iter().sum::<usize>().max(1) as f64
    }
}

fn report(args: &FairnessBench, served: &Served, counts: [usize; 2]) {
    let weights = f64::from(args.weights.iter().sum::<u32>());
    let due = |tenant: usize| f64::from(args.weights[tenant]) / weights;
    if args.common.json {
        let tenant = |tenant: usize| {
            json!({
                "tenant": TENANTS[tenant], "requests": counts[tenant], "weight": args.weights[tenant],
                "tokens": served.tokens[tenant], "share": served.share(tenant), "due": due(tenant),
            })
        };
        let value = json!({"backlogged_ms": served.waited_ms, "tenants": [tenant(0), tenant(1)]});
        println!("{value}");
        return;
    }
    println!(
        "two tenants, {} requests at once, {} in / {} out; both waited for {:.1} s",
        args.streams,
        args.input_len,
        args.output_len,
        served.waited_ms as f64 / 1e3
    );
    let head = ["tenant", "requests", "weight", "tokens served", "share", "due", "off by"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for tenant in 0..2 {
        let percent = |share: f64| format!("{:.1}%", share * 100.0);
        rows.push(vec![
            TENANTS[tenant].into(),
            counts[tenant].to_string(),
            args.weights[tenant].to_string(),
            served.tokens[tenant].to_string(),
            percent(served.share(tenant)),
            percent(due(tenant)),
            format!("{:+.1}%", (served.share(tenant) / due(tenant) - 1.0) * 100.0),
        ]);
    }
    print!("{}", table::render(&rows));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use folio_engine::Usage;

    use super::*;

    #[test]
    fn only_what_was_served_while_both_waited_counts() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let answer = |times: &[u64]| Answer {
            submitted: start,
            times: times.iter().map(|&ms| at(ms)).collect(),
            usage: Usage::default(),
        };
        // The second tenant's last request begins at 30; the first still waits until 90.
        let answers = [answer(&[10, 20]), answer(&[10, 29]), answer(&[90, 95]), answer(&[30, 40])];
        let served = Served::of(100, &[0, 1, 0, 1], &answers);
        assert_eq!(served, Served { tokens: [102, 102], waited_ms: 30 });
        assert!((served.share(0) - 0.5).abs() < 1e-12);
    }
}
