//! Whether the time to look up an API key tells how much of it was right: Welch's t of two kinds of wrong keys, one that
//! differs from a real key in its last character only, one that differs everywhere. Beyond 4.5 there is something to see.
//!
//! `cargo run --release -p folio-server --example key_timing [KEYS]`

use std::hint::black_box;
use std::time::Instant;

use folio_server::guard::{Callers, Keys};

const SAMPLES: usize = 100_000;
/// A clock tick is of the order of one comparison: each sample is this many look-ups.
const LOOKUPS: usize = 8;
/// Interrupts make a long tail that has nothing to do with keys: the slowest are left out, of both kinds alike.
const KEPT: f64 = 0.99;

fn main() {
    let count: usize = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(16);
    let secret = |number: usize| format!("sk-{number:029}");
    let mut keys = Keys::none();
    let text: String = (0..count).map(|number| secret(number) + "\n").collect();
    if let Err(error) = keys.add_text(&text) {
        eprintln!("{error}");
        std::process::exit(2);
    }
    let callers = Callers::new(&keys, 256, 256);
    let nearly = secret(0)[..31].to_string() + "x";
    let guesses = [nearly, "z".repeat(32)];

    let mut times: [Vec<f64>; 2] = Default::default();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..SAMPLES {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let kind = (random >> 40 & 1) as usize;
        let start = Instant::now();
        for _ in 0..LOOKUPS {
            assert!(black_box(callers.find(black_box(guesses[kind].as_bytes()))).is_none());
        }
        times[kind].push(start.elapsed().as_nanos() as f64);
    }

    let mut all: Vec<f64> = times.concat();
    all.sort_by(f64::total_cmp);
    let slowest = all[(all.len() as f64 * KEPT) as usize];
    let [near, far] = times.map(|times| Moments::of(times.iter().filter(|time| **time <= slowest)));
    let t = (near.mean - far.mean) / (near.variance / near.count + far.variance / far.count).sqrt();
    let each = |moments: &Moments| moments.mean / LOOKUPS as f64;
    println!("{count} keys, {SAMPLES} samples: nearly right {:.1} ns, all wrong {:.1} ns", each(&near), each(&far));
    println!("t = {t:.2} ({})", if t.abs() < 4.5 { "nothing to see" } else { "the times differ" });
}

struct Moments {
    count: f64,
    mean: f64,
    variance: f64,
}

impl Moments {
    fn of<'a>(times: impl Iterator<Item = &'a f64>) -> Self {
        let (mut count, mut mean, mut squares) = (0.0, 0.0, 0.0);
        for time in times {
            count += 1.0;
            let step = time - mean;
            mean += step / count;
            squares += step * (time - mean);
        }
        Self { count, mean, variance: squares / (count - 1.0) }
    }
}
