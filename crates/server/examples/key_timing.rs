//! Whether the time to look up an API key tells how much of it was right: Welch's t between wrong
//! keys that differ from a real one everywhere and wrong keys that differ in the last character
//! only. Beyond 4.5 there is something to see: two more lines show what there is to see where both
//! kinds are the same, and where a comparison stops early.
//!
//! `cargo run --release -p folio-server --example key_timing [KEYS]`

use std::hint::black_box;
use std::time::Instant;

use folio_server::guard::{Callers, Keys};
use folio_testing::Rng;

const SAMPLES: usize = 100_000;
/// A clock tick is of the order of one comparison: each sample is this many look-ups.
const LOOKUPS: usize = 8;
/// Interrupts make a long tail that has nothing to do with keys: the slowest are left out, of both
/// kinds alike.
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
    let secret = secret(0).into_bytes();
    let look_up = |guess: &[u8]| callers.find(guess).is_some();
    // As it must not be done: stops at the first character that differs.
    let naive = |guess: &[u8]| secret.iter().zip(guess).all(|(right, given)| black_box(right) == given);
    let nearly = secret.len() - 1;
    println!("{count} keys, {SAMPLES} samples, wrong from the start and wrong at the end:");
    println!("look-up      {}", welch_t(&secret, nearly, look_up));
    println!("no such keys {}", welch_t(&secret, 0, look_up));
    println!("naive        {}", welch_t(&secret, nearly, naive));
}

/// Compares random guesses with random guesses whose first `right` characters are the secret's.
fn welch_t(secret: &[u8], right: usize, look_up: impl Fn(&[u8]) -> bool) -> String {
    let mut rng = Rng::new(0);
    // All guesses are made beforehand: what is done differently for the two kinds just before the
    // clock starts, shows.
    let guesses = (0..SAMPLES).map(|_| {
        let kind = rng.below(2);
        let mut guess: [u8; 32] = std::array::from_fn(|_| b'A' + rng.below(26) as u8);
        guess[..right * kind].copy_from_slice(&secret[..right * kind]);
        (kind, guess)
    });
    let guesses: Vec<(usize, [u8; 32])> = guesses.collect();
    let mut taken = Vec::with_capacity(SAMPLES);
    for (_, guess) in &guesses {
        let guess = black_box(*guess);
        let start = Instant::now();
        for _ in 0..LOOKUPS {
            assert!(!black_box(look_up(black_box(&guess))));
        }
        taken.push(start.elapsed().as_nanos() as f64);
    }
    let mut times: [Vec<f64>; 2] = Default::default();
    for ((kind, _), time) in guesses.iter().zip(taken) {
        times[*kind].push(time);
    }
    let mut all: Vec<f64> = times.concat();
    all.sort_by(f64::total_cmp);
    let slowest = all[(all.len() as f64 * KEPT) as usize];
    let [wrong, near] = times.map(|times| Moments::of(times.iter().filter(|time| **time <= slowest)));
    let t = (near.mean - wrong.mean) / (near.variance / near.count + wrong.variance / wrong.count).sqrt();
    let each = |moments: &Moments| moments.mean / LOOKUPS as f64;
    format!("{:.1} and {:.1} ns, t = {t:.2}", each(&wrong), each(&near))
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
