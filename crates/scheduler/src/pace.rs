//! How much prompt a step may take on while others decode, learned from how long steps took.
//!
//! A step's time is taken to be what the decoding rows need plus so much a prompt token. That is only roughly true, so the
//! allowance is corrected by every step: a little less after one that was too long, a little more after one that was not.
//! Prompt tokens get dearer as their context grows, and the correction follows.

use crate::Nanos;

#[derive(Debug)]
pub(crate) struct Pace {
    target: Option<Nanos>,
    /// See [`crate::SchedulerConfig::inter_token_steps`].
    steps: u32,
    /// A step of decoding rows alone.
    decode_step: Option<Nanos>,
    /// A prompt token.
    prompt_token: Option<Nanos>,
    /// Any row, prompt or not.
    row: Option<Nanos>,
    /// The last step, if it had prompt beside decoding rows: its prompt tokens and its time.
    last_mixed: Option<(usize, Nanos)>,
}

/// Devices compute rows in tiles: a few more tokens often cost nothing.
const TILE: usize = 4;

/// Never fewer prompt tokens than this, or steps that are slow without any would stop prompts for good.
const LEAST: usize = TILE;

/// As long as nothing is known of what one costs.
const FIRST: usize = 2 * TILE;

/// Most rows of prompt that a step has because so many requests wait to decode: beside as many, a row costs little less in more.
const MOST_SHARED: usize = 32;

/// What a step was made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub decode_rows: usize,
    pub prompt_rows: usize,
}

/// The newest value counts for a quarter.
fn smooth(average: &mut Option<Nanos>, value: Nanos) {
    *average = Some(average.map_or(value, |old| old - old / 4 + value / 4));
}

impl Pace {
    pub fn new(target: Option<Nanos>, steps: u32) -> Self {
        Self { target, steps, decode_step: None, prompt_token: None, row: None, last_mixed: None }
    }

    pub fn observe(&mut self, shape: StepShape, took: Nanos) {
        let StepShape { decode_rows, prompt_rows } = shape;
        let rows = decode_rows + prompt_rows;
        if rows == 0 {
            return;
        }
        smooth(&mut self.row, took / rows as Nanos);
        self.last_mixed = None;
        if prompt_rows == 0 {
            smooth(&mut self.decode_step, took);
            return;
        }
        if decode_rows > 0 {
            self.last_mixed = Some((prompt_rows, took));
        }
        let others = if decode_rows > 0 { self.decode_step.unwrap_or(took / 2) } else { 0 };
        smooth(&mut self.prompt_token, took.saturating_sub(others).max(took / 8) / prompt_rows as Nanos);
    }

    /// Most prompt tokens of the next step, beside `decode_rows` others, of `might_decode` requests that would if their prompts were
    /// done.
    pub fn prompt_allowance(&self, decode_rows: usize, might_decode: usize) -> usize {
        let Some(target) = self.target.filter(|_| decode_rows > 0) else { return usize::MAX };
        // Steps vary: aim below the target, so that nearly all stay under it.
        let goal = target - target / 5;
        // With three steps, say: where decoding takes two thirds of the goal, prompts have the other; where it takes many times
        // the goal, they have nearly twice what decoding takes.
        let slow = Nanos::from(self.steps).saturating_mul(self.decode_step.unwrap_or(0)).saturating_sub(goal);
        let goal = goal.max(slow);
        // What decoding takes was learned from steps without prompt, which may have been few, and of fewer rows: a prompt's row
        // is no dearer than a decoding one. As long as few decode, most are kept waiting by their prompts, and small steps cost
        // all of them more than larger ones would those few.
        let share = if self.steps > 0 { decode_rows.max(might_decode.min(MOST_SHARED)) } else { 0 };
        let Some(price) = self.prompt_token.map(|price| price.max(1)) else { return FIRST.max(share) };
        let allowance = match (self.last_mixed, self.decode_step) {
            (Some((tokens, took)), _) if took <= goal => {
                let more = ((goal - took) / price) as usize;
                tokens + more.min(tokens.max(TILE))
            }
            // A step that was slow by chance must not cost the next ones all their prompt.
            (Some((tokens, took)), _) => {
                let fewer = (took - goal).div_ceil(price) as usize;
                tokens - fewer.min(tokens.div_ceil(4))
            }
            (None, Some(others)) => (goal.saturating_sub(others) / price) as usize,
            (None, None) => FIRST,
        };
        (allowance / TILE * TILE).max(LEAST).max(share)
    }

    /// What `tokens` prompt tokens cost, as far as is known.
    pub fn computing(&self, tokens: usize) -> Option<Nanos> {
        Some(self.prompt_token.or(self.row)?.saturating_mul(tokens as Nanos))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of a machine where decoding costs 6 ms and a prompt token 0.1 ms, dearer by 1% every 100 tokens.
    fn run(target: Option<Nanos>, steps: u32, prompt: usize) -> Vec<(usize, Nanos)> {
        let mut pace = Pace::new(target, steps);
        let mut steps = Vec::new();
        for _ in 0..5 {
            pace.observe(StepShape { decode_rows: 8, prompt_rows: 0 }, 6_000_000);
        }
        let mut done = 0;
        while done < prompt {
            let chunk = pace.prompt_allowance(8, 8).min(512).min(prompt - done);
            let took = 6_000_000 + chunk as Nanos * (100_000 + 1_000 * (done as Nanos / 100));
            pace.observe(StepShape { decode_rows: 8, prompt_rows: chunk }, took);
            steps.push((chunk, took));
            done += chunk;
        }
        steps
    }

    #[test]
    fn steps_stay_under_the_target_and_use_most_of_it() {
        let steps = run(Some(12_000_000), 0, 3500);
        assert!(steps.iter().all(|&(_, took)| took < 12_000_000), "{steps:?}");
        let used: Nanos = steps.iter().map(|&(_, took)| took).sum::<Nanos>() / steps.len() as Nanos;
        assert!(used > 8_500_000, "{used}");
    }

    #[test]
    fn without_a_target_the_budget_decides() {
        assert!(run(None, 0, 3500).iter().take(6).all(|&(chunk, _)| chunk == 512));
    }

    #[test]
    fn a_target_that_cannot_be_met_still_lets_prompts_through() {
        let steps = run(Some(1_000_000), 0, 200);
        assert!(steps.iter().skip(1).all(|&(chunk, _)| chunk == LEAST), "{steps:?}");
    }

    #[test]
    fn where_steps_are_slow_by_themselves_prompts_have_their_share() {
        // Twice the 6 ms of decoding for prompt, less what it takes to get there and what dearer tokens cost.
        let steps = run(Some(1_000_000), 3, 3500);
        assert!(steps.iter().all(|&(_, took)| took < 18_500_000), "{steps:?}");
        let used: Nanos = steps.iter().map(|&(_, took)| took).sum::<Nanos>() / steps.len() as Nanos;
        assert!(used > 15_000_000, "{used}");
        // Of many rows at least as much, whatever decoding took when they were fewer.
        let mut pace = Pace::new(Some(1_000_000), 3);
        pace.observe(StepShape { decode_rows: 1, prompt_rows: 0 }, 6_000_000);
        for _ in 0..9 {
            let chunk = pace.prompt_allowance(64, 64);
            assert!(chunk >= 64, "{chunk}");
            pace.observe(StepShape { decode_rows: 64, prompt_rows: chunk }, 100_000_000);
        }
        // Of few rows as many as there are requests, as long as those are not very many.
        for (might_decode, expected) in [(1, LEAST), (16, 16), (100, MOST_SHARED)] {
            let mut pace = Pace::new(Some(1_000_000), 1);
            pace.observe(StepShape { decode_rows: 1, prompt_rows: 0 }, 6_000_000);
            pace.observe(StepShape { decode_rows: 1, prompt_rows: 4 }, 6_400_000);
            assert_eq!(pace.prompt_allowance(1, might_decode), expected);
        }
        // A target that is longer counts.
        let allowances = [0, 3].map(|steps| {
            let mut pace = Pace::new(Some(60_000_000), steps);
            pace.observe(StepShape { decode_rows: 8, prompt_rows: 0 }, 6_000_000);
            pace.observe(StepShape { decode_rows: 8, prompt_rows: 100 }, 16_000_000);
            pace.prompt_allowance(8, 8)
        });
        assert_eq!(allowances[0], allowances[1]);
    }
}
