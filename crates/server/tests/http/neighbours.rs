//! The whole corpus against the whole server, while others are being answered: every request gets
//! its answer, no other request is affected, and nothing is left behind.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::corpus::client::{Client, verdict};
use crate::corpus::{Case, KEY, ROUTES, cases};
use crate::harness::{Server, Setup, start_with};

fn server() -> Server {
    start_with(Setup {
        pace: Duration::from_micros(200),
        keys: "0123456789abcdef0123456789abcdef name=corpus",
        max_seqs: 32,
        all_bytes: true,
        ..Setup::default()
    })
}

/// A long answer with every draw left to its seed.
fn neighbour(server: &Server, seed: usize) -> Vec<String> {
    let body = json!({
        "prompt": "abcabc", "max_tokens": 1500, "temperature": 1.5, "seed": seed, "stream": true, "logprobs": 2,
        "repetition_penalty": 1.1, "return_token_ids": true,
    });
    server.events_as(KEY, "/v1/completions", &body).iter().map(|event| without_name(event)).collect()
}

/// An event without what differs from request to request.
fn without_name(event: &str) -> String {
    let mut event: serde_json::Value = serde_json::from_str(event).unwrap_or_default();
    event["id"].take();
    event["created"].take();
    event.to_string()
}

/// The faults of the answers to `cases`.
fn run(server: &Server, cases: &[Case]) -> Vec<String> {
    let mut client = Client::new(server.address);
    cases.iter().filter_map(|case| verdict(case, &client.ask(case)).err()).collect()
}

#[test]
fn every_hostile_request_is_refused_and_nobody_else_notices() {
    let server = server();
    let all: Vec<Case> = ROUTES.iter().flat_map(cases).collect();
    for route in ROUTES {
        let count = all.iter().filter(|case| case.route.path == route.path).count();
        println!("{count:6} {}", route.path);
        assert!(count >= 400, "{count} cases for {}", route.path);
    }
    let undisturbed: Vec<Vec<String>> = (0..3).map(|seed| neighbour(&server, seed)).collect();
    assert_ne!(undisturbed[0], undisturbed[1], "seeds differ");
    let is_over = AtomicBool::new(false);
    let (server, is_over) = (&server, &is_over);
    std::thread::scope(|scope| {
        let neighbours: Vec<_> = undisturbed
            .iter()
            .enumerate()
            .map(|(seed, expected)| {
                scope.spawn(move || {
                    let mut rounds = 0;
                    while rounds == 0 || !is_over.load(Ordering::Relaxed) {
                        assert_eq!(&neighbour(server, seed), expected, "a neighbour's answer changed");
                        rounds += 1;
                    }
                })
            })
            .collect();
        let wrong = run(server, &all);
        let memory = memory_grows(server, &all);
        is_over.store(true, Ordering::Relaxed);
        neighbours.into_iter().for_each(|neighbour| neighbour.join().expect("neighbours are answered"));
        assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), all.len(), wrong.join("\n"));
        assert!(memory.is_none_or(|bytes| bytes < 16 << 20), "{memory:?} bytes more after every pass");
    });
    assert_eq!(server.engine.num_live(), 0, "all have ended");
}

/// By how much another pass makes the process larger: the least of three, for other tests run
/// beside this one. None where the system does not say.
fn memory_grows(server: &Server, cases: &[Case]) -> Option<u64> {
    let mut least = u64::MAX;
    for _ in 0..3 {
        let before = anonymous_bytes()?;
        run(server, cases);
        least = least.min(anonymous_bytes()?.saturating_sub(before));
        if least < 1 << 20 {
            break;
        }
    }
    Some(least)
}

fn anonymous_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}
