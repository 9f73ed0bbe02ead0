//! The likeliest next token in a draft model's logits, and its probability.

use folio_device::{Backend, Draw, Drawn, Draws};
use folio_model::Decoder;

use crate::Result;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Guess {
    pub token: u32,
    /// 0 if the logits are not numbers.
    pub probability: f32,
}

/// The likeliest token of every row of logits, found on the device that has them.
#[derive(Default)]
pub(super) struct Guesses {
    /// Tokens beyond these are padding.
    num_tokens: usize,
    guesses: Vec<Guess>,
    logits: Vec<f32>,
    draws: Draws,
    drawn: Vec<Drawn>,
}

impl Guesses {
    pub fn new(num_tokens: usize) -> Self {
        Self { num_tokens, ..Self::default() }
    }

    /// Reads `rows` rows of logits of the decoder's last step.
    pub fn read<B: Backend>(&mut self, decoder: &mut Decoder<B>, rows: usize) -> Result<()> {
        self.guesses.clear();
        if decoder.draws_tokens() {
            self.draws.clear();
            let draws = (0..rows as u32).map(|row| Draw { logprobs: Some(0), ..Draw::greedy(row) });
            self.draws.draws.extend(draws);
            decoder.draw(&self.draws);
            decoder.drawn(&mut self.drawn)?;
            self.guesses.extend(self.drawn.drain(..).map(|drawn| {
                let logprob = drawn.logprobs.filter(|_| drawn.failure.is_none()).map(|found| found.logprob);
                Guess { token: drawn.token, probability: logprob.map_or(0.0, f32::exp) }
            }));
            return Ok(());
        }
        decoder.logits(&mut self.logits);
        let width = decoder.spec().vocab_size;
        let num_tokens = self.num_tokens;
        self.guesses.extend(self.logits.chunks_exact(width).map(|row| likeliest(&row[..num_tokens])));
        Ok(())
    }

    pub fn iter(&self) -> impl Iterator<Item = Guess> {
        self.guesses.iter().copied()
    }
}

/// Independent lanes of the searches below, which run side by side.
const LANES: usize = 16;

/// The first of the largest logits, and its probability.
fn likeliest(logits: &[f32]) -> Guess {
    let largest = largest(logits);
    let token = logits.iter().position(|&logit| logit == largest);
    // The probability is 0 if a logit is not a number.
    let probability = if largest.is_finite() { (1.0 / sum_of_powers(logits, largest)).max(0.0) } else { 0.0 };
    Guess { token: token.unwrap_or(0) as u32, probability }
}

fn largest(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &logit)| *lane = if logit > *lane { logit } else { *lane });
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The sum of e^(logit - largest), with an error of at most a third of a percent, which is enough
/// for drafting.
fn sum_of_powers(logits: &[f32], largest: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder().iter().map(|logit| (logit - largest).exp()).sum::<f32>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &logit)| *lane += power(logit - largest));
    }
    rest + lanes.iter().sum::<f32>()
}

/// e^x for x of at most 0: a power of two, and a parabola between two of them.
fn power(x: f32) -> f32 {
    let x = (x * std::f32::consts::LOG2_E).max(-126.0);
    let whole = x.floor();
    let part = x - whole;
    // 2^part on [0, 1), with an error of at most 0.33%.
    let mantissa = 1.0 + part * (0.656_366 + part * 0.343_634);
    mantissa * f32::from_bits(((whole as i32 + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_token_and_its_share() {
        let mut logits: Vec<f32> = (0..100u32).map(|i| (i.wrapping_mul(2654435761) >> 20) as f32 / 512.0).collect();
        logits[37] = 9.0;
        logits[71] = 9.0;
        let exact = 1.0 / logits.iter().map(|logit| (logit - 9.0).exp()).sum::<f32>();
        let guess = likeliest(&logits);
        assert_eq!(guess.token, 37, "the first of two");
        assert!((guess.probability / exact - 1.0).abs() < 0.0033, "{} against {exact}", guess.probability);
        assert_eq!(likeliest(&[f32::NEG_INFINITY; 3]), Guess { token: 0, probability: 0.0 });
        assert!((likeliest(&[f32::NEG_INFINITY, 1.0]).probability - 1.0).abs() < 1e-6);
    }

    #[test]
    fn powers_are_near_enough() {
        for step in 0..2000 {
            let x = -step as f32 / 50.0;
            let (found, exact) = (power(x), x.exp());
            assert!((found - exact).abs() <= 0.0033 * exact, "e^{x} is {exact}, found {found}");
        }
        assert!(power(f32::NEG_INFINITY) < 1e-37);
    }
}
