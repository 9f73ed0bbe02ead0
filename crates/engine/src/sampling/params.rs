//! Sampling parameters of a request, and their valid ranges.

use std::collections::HashSet;

/// Options for the choice of the next token. Call [`SamplingParams::validate`] before use.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by this; 0 takes the best token.
    pub temperature: f32,
    /// Only the best k tokens compete.
    pub top_k: Option<u32>,
    /// Only the fewest tokens whose probabilities reach this sum compete.
    pub top_p: f32,
    /// Only tokens at least this fraction as likely as the best compete.
    pub min_p: f32,
    /// Logits of tokens seen in prompt or output are divided by this where positive, else
    /// multiplied.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time that the answer has it.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if the answer has it.
    pub presence_penalty: f32,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// If set, no other token may be chosen.
    pub allowed_tokens: Option<Vec<u32>>,
    pub banned_tokens: Vec<u32>,
    /// Sequences of tokens that the answer never completes.
    pub bad_words: Vec<Vec<u32>>,
    /// Until the answer has this many tokens, none that would end it is chosen.
    pub min_tokens: usize,
    pub max_tokens: usize,
    pub stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not end the answer.
    pub ignore_eos: bool,
    /// Report the chosen token's logprob and those of this many best tokens.
    pub logprobs: Option<u32>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<u32>,
    pub seed: u64,
    /// Answers to one prompt.
    pub n: usize,
}

impl Default for SamplingParams {
    /// The model's distribution, unchanged.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_tokens: None,
            banned_tokens: Vec::new(),
            bad_words: Vec::new(),
            min_tokens: 0,
            max_tokens: 16,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            seed: 0,
            n: 1,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}, but must be {range}")]
pub struct InvalidParam {
    pub field: &'static str,
    pub value: String,
    pub range: String,
}

const MAX_TEMPERATURE: f32 = 100.0;
const MAX_REPETITION_PENALTY: f32 = 10.0;
const MAX_PENALTY: f32 = 2.0;
const MAX_BIAS: f32 = 100.0;
const MAX_SAMPLES: usize = 16;
/// Most sequences of `bad_words`; each step examines all of them. A word is two sequences, alone
/// and after a space, so the limit in words is half of this.
const MAX_BAD_WORDS: usize = 256;
const MAX_BAD_WORD_TOKENS: usize = 2048;

fn check(ok: bool, field: &'static str, value: impl ToString, range: impl ToString) -> Result<(), InvalidParam> {
    if ok { Ok(()) } else { Err(InvalidParam { field, value: value.to_string(), range: range.to_string() }) }
}

/// A NaN is in no range.
fn check_range(field: &'static str, value: f32, least: f32, most: f32) -> Result<(), InvalidParam> {
    check((least..=most).contains(&value), field, value, format_args!("from {least} to {most}"))
}

impl SamplingParams {
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    pub fn validate(&self, logits_width: usize) -> Result<(), InvalidParam> {
        check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)?;
        check(self.top_k != Some(0), "top_k", 0, "at least 1")?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")?;
        check_range("min_p", self.min_p, 0.0, 1.0)?;
        let repetition = self.repetition_penalty;
        let in_range = repetition > 0.0 && repetition <= MAX_REPETITION_PENALTY;
        let range = format_args!("above 0 and at most {MAX_REPETITION_PENALTY}");
        check(in_range, "repetition_penalty", repetition, range)?;
        check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        for &(_, bias) in &self.logit_bias {
            check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)?;
        }
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")?;
        let range = format_args!("at most max_tokens, which is {}", self.max_tokens);
        check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, range)?;
        check((1..=MAX_SAMPLES).contains(&self.n), "n", self.n, format_args!("from 1 to {MAX_SAMPLES}"))?;
        self.validate_tokens(logits_width)
    }

    /// Whether a first token can be chosen, if `eos` end an answer. Later positions have no fewer
    /// tokens, except for bad words of several tokens: an answer that they leave without a token
    /// ends with an error.
    pub(crate) fn leaves_a_choice(&self, eos: &[u32], logits_width: usize) -> bool {
        let mut excluded: HashSet<u32> = self.banned_tokens.iter().copied().collect();
        excluded.extend(self.bad_words.iter().filter(|word| word.len() == 1).flatten());
        if self.min_tokens > 0 {
            excluded.extend(&self.stop_token_ids);
            excluded.extend(eos.iter().filter(|_| !self.ignore_eos));
        }
        match &self.allowed_tokens {
            Some(allowed) => allowed.iter().any(|token| !excluded.contains(token)),
            None => (0..logits_width as u32).any(|token| !excluded.contains(&token)),
        }
    }

    fn validate_tokens(&self, width: usize) -> Result<(), InvalidParam> {
        let known =
            |field, token: u32| check((token as usize) < width, field, token, format_args!("a token id below {width}"));
        self.logit_bias.iter().try_for_each(|&(token, _)| known("logit_bias", token))?;
        self.banned_tokens.iter().try_for_each(|&token| known("banned_tokens", token))?;
        self.validate_bad_words()?;
        self.bad_words.iter().flatten().try_for_each(|&token| known("bad_words", token))?;
        self.stop_token_ids.iter().try_for_each(|&token| known("stop_token_ids", token))?;
        if let Some(allowed) = &self.allowed_tokens {
            check(!allowed.is_empty(), "allowed_tokens", "empty", "at least one token id")?;
            // Each step examines the list, so repeated tokens must not make it long.
            let range = format_args!("at most the {width} tokens there are");
            check(allowed.len() <= width, "allowed_tokens", format_args!("{} long", allowed.len()), range)?;
            allowed.iter().try_for_each(|&token| known("allowed_tokens", token))?;
        }
        let range = format_args!("at most the {width} tokens there are");
        for (field, count) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            let count = count.unwrap_or(0);
            check(count as usize <= width, field, count, range)?;
        }
        Ok(())
    }

    fn validate_bad_words(&self) -> Result<(), InvalidParam> {
        let words = self.bad_words.len();
        let range = format_args!("at most {MAX_BAD_WORDS} sequences");
        check(words <= MAX_BAD_WORDS, "bad_words", format_args!("{words} long"), range)?;
        let is_empty = self.bad_words.iter().any(Vec::is_empty);
        check(!is_empty, "bad_words", "an empty sequence", "at least one token each")?;
        let tokens: usize = self.bad_words.iter().map(Vec::len).sum();
        let range = format_args!("at most {MAX_BAD_WORD_TOKENS} tokens together");
        check(tokens <= MAX_BAD_WORD_TOKENS, "bad_words", format_args!("{tokens} tokens long"), range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid() {
        assert_eq!(SamplingParams::default().validate(10), Ok(()));
    }

    #[test]
    fn limits_are_included() {
        let bad_words = [vec![vec![1; 1793]], vec![vec![2]; 255]].concat();
        assert_eq!(SamplingParams { bad_words, ..SamplingParams::default() }.validate(10), Ok(()));
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        let base = SamplingParams::default;
        for (params, message) in [
            (SamplingParams { temperature: f32::NAN, ..base() }, "temperature is NaN, but must be from 0 to 100"),
            (SamplingParams { temperature: -0.1, ..base() }, "temperature is -0.1, but must be from 0 to 100"),
            (SamplingParams { top_k: Some(0), ..base() }, "top_k is 0, but must be at least 1"),
            (SamplingParams { top_p: 0.0, ..base() }, "top_p is 0, but must be above 0 and at most 1"),
            (SamplingParams { top_p: f32::NAN, ..base() }, "top_p is NaN, but must be above 0 and at most 1"),
            (SamplingParams { min_p: 1.5, ..base() }, "min_p is 1.5, but must be from 0 to 1"),
            (
                SamplingParams { repetition_penalty: f32::INFINITY, ..base() },
                "repetition_penalty is inf, but must be above 0 and at most 10",
            ),
            (SamplingParams { frequency_penalty: 2.5, ..base() }, "frequency_penalty is 2.5, but must be from -2 to 2"),
            (SamplingParams { presence_penalty: -3.0, ..base() }, "presence_penalty is -3, but must be from -2 to 2"),
            (
                SamplingParams { logit_bias: vec![(1, 101.0)], ..base() },
                "logit_bias is 101, but must be from -100 to 100",
            ),
            (
                SamplingParams { logit_bias: vec![(10, 1.0)], ..base() },
                "logit_bias is 10, but must be a token id below 10",
            ),
            (
                SamplingParams { allowed_tokens: Some(vec![]), ..base() },
                "allowed_tokens is empty, but must be at least one token id",
            ),
            (
                SamplingParams { allowed_tokens: Some(vec![3, 11]), ..base() },
                "allowed_tokens is 11, but must be a token id below 10",
            ),
            (
                SamplingParams { allowed_tokens: Some(vec![3; 11]), ..base() },
                "allowed_tokens is 11 long, but must be at most the 10 tokens there are",
            ),
            (
                SamplingParams { banned_tokens: vec![u32::MAX], ..base() },
                "banned_tokens is 4294967295, but must be a token id below 10",
            ),
            (
                SamplingParams { bad_words: vec![vec![1], vec![2, 10]], ..base() },
                "bad_words is 10, but must be a token id below 10",
            ),
            (
                SamplingParams { bad_words: vec![vec![1], vec![]], ..base() },
                "bad_words is an empty sequence, but must be at least one token each",
            ),
            (
                SamplingParams { bad_words: vec![vec![1]; 257], ..base() },
                "bad_words is 257 long, but must be at most 256 sequences",
            ),
            (
                SamplingParams { bad_words: vec![vec![1; 2000], vec![1; 49]], ..base() },
                "bad_words is 2049 tokens long, but must be at most 2048 tokens together",
            ),
            (
                SamplingParams { stop_token_ids: vec![12], ..base() },
                "stop_token_ids is 12, but must be a token id below 10",
            ),
            (
                SamplingParams { min_tokens: 17, ..base() },
                "min_tokens is 17, but must be at most max_tokens, which is 16",
            ),
            (SamplingParams { max_tokens: 0, ..base() }, "max_tokens is 0, but must be at least 1"),
            (SamplingParams { n: 17, ..base() }, "n is 17, but must be from 1 to 16"),
            (
                SamplingParams { logprobs: Some(11), ..base() },
                "logprobs is 11, but must be at most the 10 tokens there are",
            ),
        ] {
            assert_eq!(params.validate(10).unwrap_err().to_string(), message);
        }
    }
}
