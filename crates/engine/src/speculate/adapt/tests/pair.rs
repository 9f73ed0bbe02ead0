//! A head on a small machine: answers of different agreement follow each other, drafts end when the
//! head is uncertain, rows come in tiles, and the speed of the machine changes.

use super::*;

/// Milliseconds of a step by the nodes that it verifies.
const STEP: [f64; 9] = [3.0, 3.4, 4.0, 4.05, 4.6, 5.7, 6.2, 6.4, 6.9];
const MOST_NODES: usize = STEP.len() - 1;
const ANSWERS: usize = 60;
const TOKENS: usize = 96;

/// Random times and agreements; the same for all controllers that are compared.
struct Pair {
    random: Random,
    pace: f64,
    next_pace: f64,
    until: usize,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed * 7919 + 17);
        (0..9).for_each(|_| {
            random.next();
        });
        Self { random, pace: 1.0, next_pace: 1.0, until: 0 }
    }

    /// One more step: returns the factor of its times.
    fn step(&mut self) -> f64 {
        if self.until == 0 {
            self.until = 30 + (300.0 * self.random.next()) as usize;
            self.next_pace = 0.85 + 0.4 * self.random.next();
        }
        self.until -= 1;
        self.pace += (self.next_pace - self.pace) / 10.0;
        self.pace
    }

    /// Nodes of a draft for which `asked` were requested, and the accepted ones. Some positions are
    /// easy and some are not, and a head drafts more at easy ones.
    fn draft(&mut self, asked: usize, agreement: f64) -> (usize, usize) {
        let agreement = if self.random.next() < agreement { 0.9 } else { 0.2 };
        let (mut made, mut held) = (0, 0);
        while made < asked && (made == 0 || self.random.next() < 0.55 + 0.4 * agreement) {
            held += usize::from(held == made && self.random.next() < agreement);
            made += 1;
        }
        (made, held)
    }
}

/// Tokens a second, relative to plain steps.
fn gain(seed: u64, mut who: Controller) -> f64 {
    let mut pair = Pair::new(seed);
    let accepted: Vec<u16> = (0..MOST_NODES as u16).collect();
    let (mut seconds, mut plain_seconds, mut nodes) = (0.0, 0.0, vec![0]);
    for answer in 0..ANSWERS {
        let agreement = 0.35 + 0.5 * pair.random.next();
        let id = RequestId(answer as u64);
        let (mut tokens, mut waits) = (0, false);
        while tokens < TOKENS {
            let pace = pair.step();
            let (made, held) = match nodes[0] {
                0 => (0, 0),
                asked => pair.draft(asked.min(MOST_NODES), agreement),
            };
            let took = 1e-3 * pace * STEP[made];
            let gap = if waits { 0.08e-3 } else { 0.0 };
            // The time of drafting is noted after it; here, after the draft that it made.
            let drafting = if nodes[0] > 0 { 1e-3 * pace * (0.09 + 0.15 * made as f64) } else { 0.0 };
            seconds += took + gap + drafting;
            plain_seconds += 1e-3 * pace * STEP[0] * (1 + held) as f64;
            tokens += 1 + held;
            match &mut who {
                Controller::Auto(adapt) => {
                    adapt.note_drafting(1, made, Duration::from_secs_f64(drafting * pair.random.noise()));
                    adapt.note_gap(Duration::from_secs_f64(gap));
                    adapt.note_step(1 + made, Duration::from_secs_f64(took * pair.random.noise()), true);
                    if made > 0 {
                        adapt.note_walk(id, &Draft::chain(0..made as u32), &accepted[..held]);
                    }
                    adapt.most(&[id], 0, &mut nodes);
                    waits = adapt.expects();
                }
                Controller::Always(always) => (nodes[0], waits) = (*always, *always > 0),
            }
        }
        if let Controller::Auto(adapt) = &mut who {
            adapt.forget(id);
        }
    }
    plain_seconds / seconds
}

#[test]
fn it_is_about_as_good_as_the_best_number() {
    let mean = |who: &dyn Fn() -> Controller| (1..=8).map(|seed| gain(seed, who())).sum::<f64>() / 8.0;
    let always = (1..=MOST_NODES).map(|nodes| mean(&|| Controller::Always(nodes)));
    let best = always.fold(1.0, f64::max);
    let found = mean(&auto);
    assert!(found > 0.95 * best, "{found} and {best}");
}
