//! Sampling defaults of a model.

use super::SamplingParams;

/// Defaults for requests, from the model's generation_config.json.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Default for routes that have none of their own.
    pub max_tokens: Option<usize>,
    /// Bounds the answers of requests that do say, too.
    pub most_tokens: Option<usize>,
}

impl SamplingDefaults {
    /// These, and where they say nothing, others.
    pub fn over(self, others: Self) -> Self {
        Self {
            temperature: self.temperature.or(others.temperature),
            top_p: self.top_p.or(others.top_p),
            top_k: self.top_k.or(others.top_k),
            min_p: self.min_p.or(others.min_p),
            repetition_penalty: self.repetition_penalty.or(others.repetition_penalty),
            max_tokens: self.max_tokens.or(others.max_tokens),
            most_tokens: self.most_tokens.or(others.most_tokens),
        }
    }

    /// The parameters of a request that sets none.
    pub fn params(&self) -> SamplingParams {
        let standard = SamplingParams::default();
        SamplingParams {
            temperature: self.temperature.unwrap_or(standard.temperature),
            top_p: self.top_p.unwrap_or(standard.top_p),
            top_k: self.top_k,
            min_p: self.min_p.unwrap_or(standard.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(standard.repetition_penalty),
            ..standard
        }
    }

    /// The longest answer to a request that asks for `asked` tokens, where there is room for
    /// `room`.
    pub fn max_tokens(&self, asked: Option<usize>, room: usize) -> usize {
        asked.or(self.max_tokens).unwrap_or(room).min(self.most_tokens.unwrap_or(usize::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_asked_for_or_the_models_and_never_above_the_bound() {
        let check = |asked, max_tokens, most_tokens, expect| {
            let defaults = SamplingDefaults { max_tokens, most_tokens, ..SamplingDefaults::default() };
            assert_eq!(defaults.max_tokens(asked, 100), expect, "{asked:?} {max_tokens:?} {most_tokens:?}");
        };
        check(None, None, None, 100);
        check(Some(7), None, None, 7);
        check(None, Some(20), None, 20);
        check(Some(50), Some(20), None, 50);
        check(Some(50), Some(20), Some(20), 20);
        check(Some(7), Some(20), Some(20), 7);
        check(None, None, Some(30), 30);
    }
}
