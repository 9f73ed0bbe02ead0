//! How long hostile requests wait for their refusal: from the last byte sent to the first byte of
//! the answer, route by route, over a real socket, while three others are being answered. The bar
//! is 50 ms.
//!
//! `cargo run --release -p folio-server --example hostile_times`

#[path = "../tests/http/corpus/mod.rs"]
#[allow(dead_code)]
mod corpus;
#[path = "../tests/http/harness.rs"]
#[allow(dead_code)]
mod harness;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use corpus::client::{Client, verdict};
use corpus::{Case, Expect, KEY, ROUTES, cases};
use harness::{Server, Setup, start_with};
use serde_json::json;

const BAR: Duration = Duration::from_millis(50);
const PASSES: usize = 5;

fn main() {
    let server = start_with(Setup {
        pace: Duration::from_millis(1),
        keys: "0123456789abcdef0123456789abcdef name=corpus",
        max_seqs: 32,
        all_bytes: true,
        ..Setup::default()
    });
    let is_over = AtomicBool::new(false);
    let is_in_time = std::thread::scope(|scope| {
        for seed in 0..3 {
            let (server, is_over) = (&server, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    answer_a_neighbour(server, seed);
                }
            });
        }
        println!("{:28} {:>6} {:>9} {:>9} {:>9}  slowest", "refusals, in ms", "cases", "p50", "p99", "max");
        let is_in_time = ROUTES.iter().map(|route| measure(&server, &cases(route))).fold(true, |all, one| all & one);
        is_over.store(true, Ordering::Relaxed);
        is_in_time
    });
    if !is_in_time {
        eprintln!("some took longer than {BAR:?}");
        std::process::exit(1);
    }
}

fn answer_a_neighbour(server: &Server, seed: usize) {
    let body = json!({"prompt": "abcabc", "max_tokens": 500, "temperature": 1.5, "seed": seed, "stream": true});
    server.events_as(KEY, "/v1/completions", &body);
}

/// Prints a line about the refusals among `cases`; true if all of them were in time. The fastest of
/// several passes counts for each case, as other programs disturb the machine now and then.
fn measure(server: &Server, cases: &[Case]) -> bool {
    let mut client = Client::new(server.address);
    let mut times: Vec<(Duration, &str)> = Vec::new();
    for case in cases.iter().filter(|case| !matches!(case.expect, Expect::Taken | Expect::Tokens(_))) {
        let once = |client: &mut Client| {
            let answer = client.ask(case);
            if let Err(wrong) = verdict(case, &answer) {
                eprintln!("{wrong}");
            }
            answer.took
        };
        let mut least = once(&mut client);
        for _ in 1..PASSES {
            least = least.min(once(&mut client));
        }
        times.push((least, &case.name));
    }
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let millis = |time: Duration| format!("{:.3}", time.as_secs_f64() * 1e3);
    let (slowest, name) = at(1.0);
    let (path, count) = (cases[0].route.path, times.len());
    println!("{path:28} {count:6} {:>9} {:>9} {:>9}  {name}", millis(at(0.5).0), millis(at(0.99).0), millis(slowest));
    slowest <= BAR
}
