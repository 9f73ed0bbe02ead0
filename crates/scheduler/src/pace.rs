//! The pace: how many rows of prompt a step may have while others decode, learned from step times.
//!
//! A step is expected to take the time of its decoding rows and a fixed time for each prompt token.
//! That is only roughly true, so every step corrects the allowance: a little less after a step that
//! was too long, a little more after one that was not. Prompt tokens cost more as their context
//! grows, and the correction follows.
//!
//! A step without a target may be bounded too ([`crate::SchedulerConfig::longest_step`]): while a
//! step runs, no request is admitted, ended or answered, and beyond some number of rows a longer
//! step computes no more rows a second.

use crate::Nanos;

#[derive(Debug)]
pub(crate) struct Pace {
    target: Option<Nanos>,
    /// See [`crate::SchedulerConfig::inter_token_steps`].
    steps: u32,
    /// Time of a step of decoding rows alone.
    decode_step: Option<Nanos>,
    /// Time of a prompt token.
    prompt_token: Option<Nanos>,
    /// Time of any row, prompt or not.
    row: Option<Nanos>,
    /// See [`crate::SchedulerConfig::longest_step`].
    longest: Option<Nanos>,
    /// Rows and time of the last step with enough prompt rows to show the time of a row in a long
    /// step.
    last_long: Option<(usize, Nanos)>,
    /// Prompt tokens and time of the last step, if it had prompt rows beside decoding ones.
    last_mixed: Option<(usize, Nanos)>,
}

/// Devices compute rows in tiles: a few more tokens often take no longer.
const TILE: usize = 4;

/// Least number of prompt tokens. Without it, decoding steps that are slow by themselves would stop
/// prompts for good.
const LEAST: usize = TILE;

/// Prompt tokens of the first step, while their time is unknown.
const FIRST: usize = 2 * TILE;

/// Most prompt rows of a step that are granted because many requests wait to decode: beyond this
/// number, more rows save little time a row.
const MOST_SHARED: usize = 32;

/// Prompt rows beyond which more rows take no less time a row. A bounded step is not made shorter
/// than this, and a shorter step tells nothing about long ones.
const LONG: usize = 32;

/// Rows of a step that only its length bounds, while the time of a row is unknown.
const FIRST_LONG: usize = 4 * LONG;

/// A bounded step may take this many times as long as a step without prompt, so that the time to
/// read the weights stays a small part.
const LONG_STEPS: Nanos = 8;

/// Rows of a step by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub decode_rows: usize,
    pub prompt_rows: usize,
}

/// Moving average: the newest value counts for a quarter.
fn smooth(average: &mut Option<Nanos>, value: Nanos) {
    *average = Some(average.map_or(value, |old| old - old / 4 + value / 4));
}

impl Pace {
    pub fn new(target: Option<Nanos>, steps: u32, longest: Option<Nanos>) -> Self {
        let (decode_step, prompt_token, row) = (None, None, None);
        Self { target, steps, longest, decode_step, prompt_token, row, last_long: None, last_mixed: None }
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
        if prompt_rows >= LONG {
            self.last_long = Some((rows, took.max(1)));
        }
        let others = if decode_rows > 0 { self.decode_step.unwrap_or(took / 2) } else { 0 };
        smooth(&mut self.prompt_token, took.saturating_sub(others).max(took / 8) / prompt_rows as Nanos);
    }

    /// Most prompt tokens of the next step, beside `decode_rows` decoding rows; `might_decode`
    /// requests would decode if their prompts were computed.
    pub fn prompt_allowance(&self, decode_rows: usize, might_decode: usize) -> usize {
        let Some(target) = self.target.filter(|_| decode_rows > 0) else { return self.long_allowance(decode_rows) };
        // Step times vary: the goal is below the target, so that nearly all steps stay under the
        // target.
        let goal = target - target / 5;
        // With three steps, for example: if decoding takes two thirds of the goal, prompts have the
        // other third; if it takes many times the goal, prompts have nearly twice the time of
        // decoding.
        let slow = Nanos::from(self.steps).saturating_mul(self.decode_step.unwrap_or(0)).saturating_sub(goal);
        let goal = goal.max(slow);
        // The time of decoding was learned from steps without prompt, which may have been few and
        // of fewer rows: a prompt row costs no more than a decoding one. While few requests decode,
        // most wait for their prompts, and small steps would cost all of them more than larger
        // steps cost the few.
        let share = if self.steps > 0 { decode_rows.max(might_decode.min(MOST_SHARED)) } else { 0 };
        let Some(price) = self.prompt_token.map(|price| price.max(1)) else { return FIRST.max(share) };
        let allowance = match (self.last_mixed, self.decode_step) {
            (Some((tokens, took)), _) if took <= goal => {
                let more = ((goal - took) / price) as usize;
                tokens + more.min(tokens.max(TILE))
            }
            // A step that was slow by chance must not take all prompt tokens from the next ones.
            (Some((tokens, took)), _) => {
                let fewer = (took - goal).div_ceil(price) as usize;
                tokens - fewer.min(tokens.div_ceil(4))
            }
            (None, Some(others)) => (goal.saturating_sub(others) / price) as usize,
            (None, None) => FIRST,
        };
        (allowance / TILE * TILE).max(LEAST).max(share)
    }

    /// The allowance without a target: the whole budget, or the rows that keep the step under its
    /// longest time.
    fn long_allowance(&self, decode_rows: usize) -> usize {
        let Some(longest) = self.longest else { return usize::MAX };
        let Some((rows, took)) = self.last_long else { return FIRST_LONG };
        let longest = longest.max(self.decode_step.unwrap_or(0).saturating_mul(LONG_STEPS));
        let fitting = (rows as Nanos).saturating_mul(longest) / took;
        let fitting = usize::try_from(fitting).unwrap_or(usize::MAX).saturating_sub(decode_rows);
        (fitting / TILE * TILE).max(LONG)
    }

    /// Expected time of `tokens` prompt tokens; none while it is unknown.
    pub fn computing(&self, tokens: usize) -> Option<Nanos> {
        Some(self.prompt_token.or(self.row)?.saturating_mul(tokens as Nanos))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of a machine on which decoding takes 6 ms and a prompt token 0.1 ms, and 1% more every
    /// 100 tokens.
    fn run(target: Option<Nanos>, steps: u32, prompt: usize) -> Vec<(usize, Nanos)> {
        let mut pace = Pace::new(target, steps, None);
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
        // Twice the 6 ms of decoding for prompts, less the time to get there and the cost of later
        // tokens.
        let steps = run(Some(1_000_000), 3, 3500);
        assert!(steps.iter().all(|&(_, took)| took < 18_500_000), "{steps:?}");
        let used: Nanos = steps.iter().map(|&(_, took)| took).sum::<Nanos>() / steps.len() as Nanos;
        assert!(used > 15_000_000, "{used}");
        // With many rows at least as many, whatever decoding took with fewer.
        let mut pace = Pace::new(Some(1_000_000), 3, None);
        pace.observe(StepShape { decode_rows: 1, prompt_rows: 0 }, 6_000_000);
        for _ in 0..9 {
            let chunk = pace.prompt_allowance(64, 64);
            assert!(chunk >= 64, "{chunk}");
            pace.observe(StepShape { decode_rows: 64, prompt_rows: chunk }, 100_000_000);
        }
        // With few rows one for each request, up to a bound.
        for (might_decode, expected) in [(1, LEAST), (16, 16), (100, MOST_SHARED)] {
            let mut pace = Pace::new(Some(1_000_000), 1, None);
            pace.observe(StepShape { decode_rows: 1, prompt_rows: 0 }, 6_000_000);
            pace.observe(StepShape { decode_rows: 1, prompt_rows: 4 }, 6_400_000);
            assert_eq!(pace.prompt_allowance(1, might_decode), expected);
        }
        // A longer target counts alone.
        let allowances = [0, 3].map(|steps| {
            let mut pace = Pace::new(Some(60_000_000), steps, None);
            pace.observe(StepShape { decode_rows: 8, prompt_rows: 0 }, 6_000_000);
            pace.observe(StepShape { decode_rows: 8, prompt_rows: 100 }, 16_000_000);
            pace.prompt_allowance(8, 8)
        });
        assert_eq!(allowances[0], allowances[1]);
    }

    /// A prompt of 65,000 tokens, and a budget that holds all of it, on a machine on which a step
    /// takes 50 ms and each row `row` more, and 1% more every 500 tokens of context. Returns rows
    /// and times of its steps. Results are known a step late.
    fn run_alone(longest: Option<Nanos>, row: Nanos) -> Vec<(usize, Nanos)> {
        let mut pace = Pace::new(Some(15_000_000), 3, longest);
        let (mut steps, mut done, mut unknown) = (Vec::new(), 0, None);
        while done < 65_000 {
            let rows = pace.prompt_allowance(0, 1).min(65_536).min(65_000 - done);
            let took = 50_000_000 + rows as Nanos * row * (50_000 + done as Nanos) / 50_000;
            if let Some((prompt_rows, took)) = unknown.replace((rows, took)) {
                pace.observe(StepShape { decode_rows: 0, prompt_rows }, took);
            }
            steps.push((rows, took));
            done += rows;
        }
        steps
    }

    #[test]
    fn a_step_of_prompts_alone_is_bounded_in_time_whatever_the_budget() {
        const SECOND: Nanos = 1_000_000_000;
        assert_eq!(run_alone(None, 1_000_000).len(), 1);
        let steps = run_alone(Some(SECOND), 1_000_000);
        // The bound holds once the time of a row is known, except for one step: results are a step
        // late, and were learned with a slightly shorter context.
        let longest = steps.iter().map(|&(_, took)| took).max();
        assert!(longest < Some(SECOND * 5 / 4), "{longest:?}");
        let used = steps.iter().map(|&(_, took)| took).sum::<Nanos>() / steps.len() as Nanos;
        assert!(used > SECOND * 3 / 4, "{used}");
        // A machine that takes longer for a few rows computes them all the same; a fast one stays
        // under the bound, too.
        assert!(run_alone(Some(SECOND), SECOND / 10).iter().skip(2).all(|&(rows, _)| rows <= LONG));
        assert!(run_alone(Some(SECOND), 1_000).iter().all(|&(_, took)| took < SECOND * 5 / 4));
    }

    #[test]
    fn the_longest_step_heeds_what_all_steps_take_and_those_who_decode_without_a_target() {
        const SECOND: Nanos = 1_000_000_000;
        let mut pace = Pace::new(None, 0, Some(SECOND));
        assert_eq!(pace.prompt_allowance(0, 1), FIRST_LONG);
        // Few rows take the time of one row, and say nothing about many.
        pace.observe(StepShape { decode_rows: 0, prompt_rows: LONG - 1 }, SECOND);
        assert_eq!(pace.prompt_allowance(0, 1), FIRST_LONG);
        pace.observe(StepShape { decode_rows: 0, prompt_rows: 100 }, SECOND / 4);
        assert_eq!((pace.prompt_allowance(0, 1), pace.prompt_allowance(40, 40)), (400, 360));
        pace.observe(StepShape { decode_rows: 4, prompt_rows: 0 }, SECOND / 4);
        assert_eq!(pace.prompt_allowance(0, 1), 800);
        // The next step corrects one that was slow by chance.
        pace.observe(StepShape { decode_rows: 0, prompt_rows: 400 }, 60 * SECOND);
        assert_eq!(pace.prompt_allowance(0, 1), LONG);
        pace.observe(StepShape { decode_rows: 0, prompt_rows: LONG }, SECOND / 8);
        assert_eq!(pace.prompt_allowance(0, 1), 16 * LONG);
    }
}
