//! Changes to single logits before they are compared: masks, biases, and penalties for tokens that
//! the sequence has. A masked token gets the logit minus infinity.

use std::collections::HashMap;

use super::SamplingParams;

/// Number of times that a request has seen each token, if it has penalties.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    tokens: HashMap<u32, Count>,
    outputs: usize,
    is_counted: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    in_prompt: bool,
    outputs: u32,
}

impl Seen {
    /// Only the repetition penalty needs the prompt; without it the prompt is not counted.
    pub fn new(params: &SamplingParams, prompt: &[u32]) -> Self {
        let mut seen = Self { is_counted: penalizes(params), ..Self::default() };
        if params.repetition_penalty != 1.0 {
            for &token in prompt {
                seen.tokens.entry(token).or_default().in_prompt = true;
            }
        }
        seen
    }

    pub fn observe(&mut self, token: u32) {
        self.outputs += 1;
        if self.is_counted {
            self.tokens.entry(token).or_default().outputs += 1;
        }
    }

    /// Every token that penalties apply to, and its number in the answer.
    pub fn counts(&self) -> impl Iterator<Item = (u32, u32)> {
        self.tokens.iter().map(|(&token, count)| (token, count.outputs))
    }

    /// Tokens of the answer so far.
    pub fn num_outputs(&self) -> usize {
        self.outputs
    }
}

fn penalizes(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0 || params.presence_penalty != 0.0
}

/// Masks all tokens but the allowed ones, if the request names any.
pub fn keep(logits: &mut [f32], params: &SamplingParams) {
    if let Some(allowed) = &params.allowed_tokens {
        let kept: Vec<f32> = allowed.iter().map(|&token| logits[token as usize]).collect();
        logits.fill(f32::NEG_INFINITY);
        allowed.iter().zip(kept).for_each(|(&token, logit)| logits[token as usize] = logit);
    }
}

pub fn bias(logits: &mut [f32], params: &SamplingParams) {
    for &(token, bias) in &params.logit_bias {
        logits[token as usize] += bias;
    }
}

pub fn penalize(logits: &mut [f32], params: &SamplingParams, seen: &Seen) {
    if !penalizes(params) {
        return;
    }
    let (repetition, frequency, presence) =
        (params.repetition_penalty, params.frequency_penalty, params.presence_penalty);
    for (&token, count) in &seen.tokens {
        let Some(logit) = logits.get_mut(token as usize) else { continue };
        *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        if count.outputs > 0 {
            *logit -= frequency * count.outputs as f32 + presence;
        }
        debug_assert!(count.in_prompt || count.outputs > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: f32 = f32::NEG_INFINITY;

    fn seen(params: &SamplingParams, prompt: &[u32], outputs: &[u32]) -> Seen {
        let mut seen = Seen::new(params, prompt);
        outputs.iter().for_each(|&token| seen.observe(token));
        seen
    }

    #[test]
    fn penalties_by_hand() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            ..SamplingParams::default()
        };
        let mut logits = [1.0, 1.0, -1.0, 4.0];
        penalize(&mut logits, &params, &seen(&params, &[2, 1, 1], &[3, 3, 1]));
        assert_eq!(logits, [1.0, 0.5 - 0.75, -2.0, 2.0 - 1.25]);
    }

    /// Frequency and presence penalties count the answer alone.
    #[test]
    fn the_prompt_is_penalized_by_repetition_alone() {
        let params = SamplingParams { frequency_penalty: 2.0, presence_penalty: 2.0, ..SamplingParams::default() };
        let mut logits = [1.0, 1.0];
        penalize(&mut logits, &params, &seen(&params, &[0], &[]));
        assert_eq!(logits, [1.0, 1.0]);
    }

    #[test]
    fn only_what_is_allowed_is_kept() {
        let params = SamplingParams { allowed_tokens: Some(vec![0, 2]), ..SamplingParams::default() };
        let mut logits = [1.0, 2.0, 3.0, 4.0];
        keep(&mut logits, &params);
        assert_eq!(logits, [1.0, NO, 3.0, NO]);
    }

    #[test]
    fn masked_tokens_stay_masked() {
        let params =
            SamplingParams { logit_bias: vec![(0, 100.0)], repetition_penalty: 0.1, ..SamplingParams::default() };
        let mut logits = [NO, 1.0];
        bias(&mut logits, &params);
        penalize(&mut logits, &params, &seen(&params, &[0], &[0]));
        assert_eq!(logits, [NO, 1.0]);
    }
}
