//! From logits to figures, in f64: how surprised each model is by the token that comes, and how far
//! one's prediction is from the other's.
//!
//! Every position gives one record and the figures are taken from all records in order, so that
//! they do not depend on how many threads measured.

use anyhow::{Result, bail};

use crate::stats::percentile;

/// One model's prediction of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guess {
    /// Minus the logarithm of the probability of the token that came.
    pub nats: f64,
    /// The likeliest token; of equals the first.
    pub top: usize,
}

/// Two models' predictions of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    pub base: Guess,
    pub model: Guess,
    /// KL(base || model), in nats.
    pub divergence: f64,
    /// Mean square of the differences of all logits.
    pub difference: f64,
    /// By how much the base prefers its first token to its second, in logits.
    pub gap: f64,
}

/// The figures of a model by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    pub scored: usize,
    pub nats: f64,
}

impl Score {
    pub fn of(guesses: impl ExactSizeIterator<Item = Guess>) -> Self {
        let scored = guesses.len();
        Self { scored, nats: guesses.map(|guess| guess.nats).sum::<f64>() / scored as f64 }
    }

    pub fn perplexity(&self) -> f64 {
        self.nats.exp()
    }
}

/// The figures of a model beside another's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    pub base: Score,
    pub model: Score,
    pub divergence_mean: f64,
    /// 99 of 100 positions diverge by so much or less.
    pub divergence_p99: f64,
    /// Share of positions where both would say the same.
    pub agreement: f64,
    /// Standard error of the change in nats: how much of it may be chance.
    pub nats_error: f64,
    pub ties: Ties,
}

/// Whether two models that are to be the same differ only where rounding may decide.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ties {
    /// Root of the mean square of all logits' differences.
    pub logit_difference: f64,
    /// Positions where both would say different things although the base prefers its own by more
    /// than [`Ties::NEAR`] of those differences.
    pub clear_disagreements: usize,
}

impl Ties {
    pub const NEAR: f64 = 4.0;

    fn of(pairs: &[Pair]) -> Self {
        let squares: f64 = pairs.iter().map(|pair| pair.difference).sum();
        let logit_difference = (squares / pairs.len() as f64).sqrt();
        let is_clear = |pair: &&Pair| pair.base.top != pair.model.top && pair.gap > Self::NEAR * logit_difference;
        Self { logit_difference, clear_disagreements: pairs.iter().filter(is_clear).count() }
    }
}

impl Comparison {
    /// A model beside itself.
    pub fn with_itself(score: Score) -> Self {
        let (divergence_mean, divergence_p99) = (0.0, 0.0);
        Self {
            base: score,
            model: score,
            divergence_mean,
            divergence_p99,
            agreement: 1.0,
            nats_error: 0.0,
            ties: Ties::default(),
        }
    }

    pub fn of(pairs: &[Pair]) -> Self {
        let count = pairs.len() as f64;
        let base = Score::of(pairs.iter().map(|pair| pair.base));
        let model = Score::of(pairs.iter().map(|pair| pair.model));
        let change = model.nats - base.nats;
        let squares = pairs.iter().map(|pair| (pair.model.nats - pair.base.nats - change).powi(2)).sum::<f64>();
        let divergences: Vec<f64> = pairs.iter().map(|pair| pair.divergence).collect();
        Self {
            base,
            model,
            divergence_mean: divergences.iter().sum::<f64>() / count,
            divergence_p99: percentile(&divergences, 99.0).unwrap_or_default(),
            agreement: pairs.iter().filter(|pair| pair.base.top == pair.model.top).count() as f64 / count,
            nats_error: (squares / (count - 1.0).max(1.0) / count).sqrt(),
            ties: Ties::of(pairs),
        }
    }

    /// Change of perplexity, as a share of the base's.
    pub fn perplexity_change(&self) -> f64 {
        (self.model.nats - self.base.nats).exp_m1()
    }
}

/// Guesses of consecutive tokens from their logits, `[targets, vocabulary]`.
pub fn guesses(logits: &[f32], targets: &[u32], threads: usize) -> Result<Vec<Guess>> {
    let width = logits.len() / targets.len();
    in_parallel(targets, threads, |first, targets| {
        let mut row = Distribution::default();
        let rows = logits[first * width..].chunks_exact(width);
        rows.zip(targets).map(|(logits, &target)| row.set(logits)?.guess(target)).collect()
    })
}

/// The same of two models, whose logits have the same shape.
pub fn pairs(base: &[f32], model: &[f32], targets: &[u32], threads: usize) -> Result<Vec<Pair>> {
    assert_eq!(base.len(), model.len(), "logits of both models");
    let width = base.len() / targets.len();
    in_parallel(targets, threads, |first, targets| {
        let (mut b, mut m) = (Distribution::default(), Distribution::default());
        let rows = base[first * width..].chunks_exact(width).zip(model[first * width..].chunks_exact(width));
        let pair = |((base, model), &target): ((&[f32], &[f32]), &u32)| {
            let (base, model) = (b.set(base)?, m.set(model)?);
            let divergence = base.divergence(model);
            let (difference, gap) = (base.difference(model), base.gap());
            Ok(Pair { base: base.guess(target)?, model: model.guess(target)?, divergence, difference, gap })
        };
        rows.zip(targets).map(pair).collect()
    })
}

/// Deals `targets` out in one piece a thread, each with the number of its first, and puts the
/// records in order.
fn in_parallel<T: Send>(
    targets: &[u32],
    threads: usize,
    work: impl Fn(usize, &[u32]) -> Result<Vec<T>> + Sync,
) -> Result<Vec<T>> {
    let piece = targets.len().div_ceil(threads.max(1)).max(1);
    let work = &work;
    let pieces = std::thread::scope(|scope| {
        let pieces = targets.chunks(piece).enumerate();
        let threads = pieces.map(|(number, targets)| scope.spawn(move || work(number * piece, targets)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().expect("measuring does not panic")).collect::<Result<Vec<_>>>()
    })?;
    Ok(pieces.into_iter().flatten().collect())
}

/// A row of logits as log-probabilities, and the probabilities they came from.
#[derive(Default)]
struct Distribution {
    logits: Vec<f64>,
    /// `exp(logit - largest)`.
    weights: Vec<f64>,
    sum: f64,
    /// Subtracted from a logit, gives its log-probability.
    log_sum: f64,
    top: usize,
}

impl Distribution {
    fn set(&mut self, logits: &[f32]) -> Result<&Self> {
        let mut largest = f32::NEG_INFINITY;
        for (token, &logit) in logits.iter().enumerate() {
            if logit.is_nan() || logit == f32::INFINITY {
                bail!("the logit of token {token} is {logit}, not a finite number");
            }
            if logit > largest {
                (largest, self.top) = (logit, token);
            }
        }
        if largest == f32::NEG_INFINITY {
            bail!("no token has a logit above minus infinity");
        }
        self.logits.clear();
        self.logits.extend(logits.iter().map(|&logit| f64::from(logit)));
        self.weights.clear();
        self.weights.extend(self.logits.iter().map(|logit| (logit - f64::from(largest)).exp()));
        self.sum = self.weights.iter().sum();
        self.log_sum = f64::from(largest) + self.sum.ln();
        Ok(self)
    }

    fn guess(&self, target: u32) -> Result<Guess> {
        let Some(logit) = self.logits.get(target as usize) else {
            bail!("token {target} of the text is not among the model's {}", self.logits.len());
        };
        Ok(Guess { nats: self.log_sum - logit, top: self.top })
    }

    fn gap(&self) -> f64 {
        let others = self.logits.iter().enumerate().filter(|(token, _)| *token != self.top);
        let second = others.map(|(_, logit)| *logit).fold(f64::NEG_INFINITY, f64::max);
        self.logits[self.top] - second
    }

    /// Mean square over all tokens that neither rules out.
    fn difference(&self, other: &Self) -> f64 {
        let both =
            self.logits.iter().zip(&other.logits).filter(|(mine, theirs)| mine.is_finite() && theirs.is_finite());
        let (count, sum) = both.fold((0u64, 0.0), |(n, sum), (mine, theirs)| (n + 1, sum + (mine - theirs).powi(2)));
        sum / count.max(1) as f64
    }

    /// KL(self || other); infinite where the other rules out what this one does not.
    fn divergence(&self, other: &Self) -> f64 {
        let shift = other.log_sum - self.log_sum;
        let terms = self.weights.iter().zip(&self.logits).zip(&other.logits).filter(|((weight, _), _)| **weight > 0.0);
        let sum: f64 = terms.map(|((weight, mine), theirs)| weight * (mine - theirs + shift)).sum();
        // Rounding can leave equal distributions a hair below nothing.
        (sum / self.sum).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(probabilities: &[f64]) -> Vec<f32> {
        // An offset that a softmax does not see.
        probabilities.iter().map(|p| (p.ln() + 3.5) as f32).collect()
    }

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "{found}, expected {expected}");
    }

    #[test]
    fn a_pair_by_hand() {
        let base = logits(&[0.5, 0.25, 0.25]);
        let model = logits(&[0.25, 0.5, 0.25]);
        let pair = pairs(&base, &model, &[0], 1).expect("finite")[0];
        near(pair.base.nats, 0.5f64.recip().ln());
        near(pair.model.nats, 4f64.ln());
        assert_eq!((pair.base.top, pair.model.top), (0, 1));
        // 0.5 ln 2 - 0.25 ln 2 + 0
        near(pair.divergence, 0.25 * 2f64.ln());
    }

    #[test]
    fn disagreements_that_rounding_does_not_explain() {
        let base = [1.0, 0.0, 0.0, 0.0, 2.0, 1.9];
        let model = [1.0, 0.1, 0.0, 0.0, 1.9, 2.0];
        let near_tie = Ties::of(&pairs(&base, &model, &[0, 0], 1).expect("finite"));
        assert_eq!(near_tie.clear_disagreements, 0);
        near(near_tie.logit_difference, (0.03f64 / 6.0).sqrt());
        // Alike everywhere but at one place, where the base was sure.
        let base: Vec<f32> = (0..300).map(|i| if i % 3 == 0 { 5.0 } else { 0.0 }).collect();
        let mut model = base.clone();
        (model[0], model[1]) = (4.9, 5.0);
        let targets = [0; 100];
        assert_eq!(Ties::of(&pairs(&base, &model, &targets, 2).expect("finite")).clear_disagreements, 1);
    }

    #[test]
    fn the_divergence_has_a_direction() {
        let (a, b) = (logits(&[0.9, 0.1]), logits(&[0.5, 0.5]));
        let of = |base: &[f32], model: &[f32]| pairs(base, model, &[0], 1).expect("finite")[0].divergence;
        near(of(&a, &b), 0.9 * 1.8f64.ln() + 0.1 * 0.2f64.ln());
        near(of(&b, &a), 0.5 * (0.5f64 / 0.9).ln() + 0.5 * 5f64.ln());
        assert_eq!(of(&a, &a), 0.0);
    }

    #[test]
    fn large_logits_do_not_overflow_and_small_divergences_survive() {
        let base = [1000.0f32, 999.0];
        let model = [1000.0f32, 999.0 + 1e-3];
        let pair = pairs(&base, &model, &[1], 1).expect("finite")[0];
        let p = 1.0 / (1.0 + 1f64.exp());
        // The second order of a shift d of one logit: p (1 - p) d^2 / 2.
        let d = f64::from(model[1]) - 999.0;
        let expected = p * (1.0 - p) * d * d / 2.0;
        assert!((pair.divergence / expected - 1.0).abs() < 1e-2, "{} and {expected}", pair.divergence);
    }

    #[test]
    fn what_is_ruled_out() {
        let all = logits(&[0.5, 0.5]);
        let one = [0.0f32, f32::NEG_INFINITY];
        let of = |base: &[f32], model: &[f32]| pairs(base, model, &[0], 1).expect("finite")[0].divergence;
        assert_eq!(of(&all, &one), f64::INFINITY);
        near(of(&one, &all), 2f64.ln());
    }

    #[test]
    fn what_is_no_prediction_is_refused() {
        let refused = |logits: &[f32], target| guesses(logits, &[target], 1).expect_err("refused").to_string();
        assert!(refused(&[0.0, f32::NAN], 0).contains("token 1 is NaN"));
        assert!(refused(&[f32::INFINITY, 0.0], 0).contains("token 0 is inf"));
        assert!(refused(&[f32::NEG_INFINITY; 2], 0).contains("no token"));
        assert!(refused(&[0.0, 0.0], 2).contains("token 2"));
    }

    #[test]
    fn figures_from_records() {
        let guess = |nats, top| Guess { nats, top };
        let mut records: Vec<Pair> = (0..200)
            .map(|i| Pair {
                base: guess(1.0, 0),
                model: guess(1.25, usize::from(i % 4 == 0)),
                divergence: f64::from(i),
                difference: 0.0,
                gap: 0.0,
            })
            .collect();
        records.reverse();
        let figures = Comparison::of(&records);
        near(figures.base.perplexity(), 1f64.exp());
        near(figures.perplexity_change(), 0.25f64.exp() - 1.0);
        near(figures.divergence_mean, 99.5);
        assert_eq!(figures.divergence_p99, 197.0, "198 of 200 are not above it");
        assert_eq!((figures.agreement, figures.nats_error), (0.75, 0.0));
        let spread = [(1.0, 1.0), (1.0, 3.0)].map(|(b, m)| Pair {
            base: guess(b, 0),
            model: guess(m, 0),
            divergence: 0.0,
            difference: 0.0,
            gap: 0.0,
        });
        near(Comparison::of(&spread).nats_error, 1.0);
        near(Comparison::of(&records[..1]).divergence_p99, 199.0);
    }

    #[test]
    fn any_number_of_threads_gives_the_same() {
        let row = |i: usize| (0..7).map(move |j| ((i * 31 + j * 17) % 23) as f32 * 0.3);
        let base: Vec<f32> = (0..10).flat_map(row).collect();
        let model: Vec<f32> = (5..15).flat_map(row).collect();
        let targets: Vec<u32> = (0..10).map(|i| i % 7).collect();
        let one = pairs(&base, &model, &targets, 1).expect("finite");
        assert_eq!(one.len(), 10);
        for threads in [2, 3, 10, 64] {
            assert_eq!(pairs(&base, &model, &targets, threads).expect("finite"), one);
        }
        let alone = guesses(&model, &targets, 3).expect("finite");
        assert_eq!(alone, one.iter().map(|pair| pair.model).collect::<Vec<_>>());
    }
}
