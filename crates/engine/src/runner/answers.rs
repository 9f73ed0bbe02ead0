//! Tokens for the output rows of a step: sampled from logits on the host, or by the device.

use folio_device::Drawn;

use crate::{
    Logprobs, Sampled,
    sampling::{NotFinite, SamplingState},
};

/// The output rows of one request in a step. Each row is used once.
pub(super) trait Answers {
    /// Logprobs of the `nth` prompt target, which is token `target`.
    fn prompt_logprobs(
        &mut self,
        sampling: &SamplingState,
        nth: usize,
        target: u32,
    ) -> Result<Option<Logprobs>, NotFinite>;

    /// The token at `position`, from the `nth` sampled row: that of the last token, then those of
    /// the draft's nodes.
    fn token(&mut self, sampling: &mut SamplingState, nth: usize, position: usize) -> Result<Sampled, NotFinite>;
}

/// Rows of logits on the host.
pub(super) struct HostLogits<'a> {
    /// `[rows, width]`, overwritten where a row is sampled.
    pub logits: &'a mut [f32],
    pub width: usize,
    /// Row of the first prompt target.
    pub first_target: usize,
    /// Row of the last token.
    pub first_sample: usize,
}

impl HostLogits<'_> {
    fn row(&mut self, row: usize) -> &mut [f32] {
        &mut self.logits[row * self.width..(row + 1) * self.width]
    }
}

impl Answers for HostLogits<'_> {
    fn prompt_logprobs(
        &mut self,
        sampling: &SamplingState,
        nth: usize,
        target: u32,
    ) -> Result<Option<Logprobs>, NotFinite> {
        sampling.prompt_logprobs(self.row(self.first_target + nth), target).map(Some)
    }

    fn token(&mut self, sampling: &mut SamplingState, nth: usize, position: usize) -> Result<Sampled, NotFinite> {
        sampling.sample(self.row(self.first_sample + nth), position)
    }
}

/// Tokens that a device sampled, in the order of [`super::request_state::RequestState::ask`].
pub(super) struct DeviceTokens<'a> {
    /// Those of the prompt targets, then those of the last token and the draft's nodes.
    pub drawn: &'a mut [Drawn],
    pub num_targets: usize,
}

impl DeviceTokens<'_> {
    /// A device that returns too few tokens fails the request, and no other.
    fn take(&mut self, index: usize) -> Result<Sampled, NotFinite> {
        let drawn = self.drawn.get_mut(index).ok_or(NotFinite::NothingLeft)?;
        Sampled::try_from(Drawn { logprobs: drawn.logprobs.take(), ..*drawn })
    }
}

impl Answers for DeviceTokens<'_> {
    fn prompt_logprobs(&mut self, _: &SamplingState, nth: usize, _: u32) -> Result<Option<Logprobs>, NotFinite> {
        self.take(nth).map(|sampled| sampled.logprobs)
    }

    fn token(&mut self, _: &mut SamplingState, nth: usize, _: usize) -> Result<Sampled, NotFinite> {
        self.take(self.num_targets + nth)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        SamplingParams,
        speculate::{Draft, Place, Walk, walk},
    };

    const EOS: u32 = 7;

    /// Verifies a draft with the tokens of a device, after one prompt target.
    fn verify(draft: &Draft, params: SamplingParams, tokens: &[u32]) -> Walk {
        let drawn = |&token: &u32| Drawn { token, failure: None, logprobs: None };
        let mut drawn: Vec<Drawn> = [&[99], tokens].concat().iter().map(drawn).collect();
        let mut state = SamplingState::new(Arc::new(params), &[1], &[EOS], 0);
        let mut answers = DeviceTokens { drawn: &mut drawn, num_targets: 1 };
        let target = answers.prompt_logprobs(&state, 0, 99);
        assert_eq!(target, Ok(None));
        let place = Place { position: 10, max_len: 100 };
        walk(draft, &mut state, place, |state, nth, position| answers.token(state, nth, position))
    }

    fn tokens(walk: &Walk) -> Vec<u32> {
        walk.sampled.iter().map(|sampled| sampled.token).collect()
    }

    #[test]
    fn device_tokens_are_taken_along_the_accepted_path() {
        // The last token has the children 2 and 4, and 4 has the child 5.
        let draft = Draft::new(&[2, 4, 5], &[None, None, Some(1)]);
        let greedy = || SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let walk = verify(&draft, greedy(), &[4, 0, 5, 9]);
        assert_eq!((tokens(&walk), walk.accepted), (vec![4, 5, 9], vec![1, 2]));
        let walk = verify(&draft, greedy(), &[4, 0]);
        assert_eq!((tokens(&walk), walk.accepted), (vec![4], vec![1]));
        assert!(walk.failure.is_some(), "the device returned too few tokens");
        // An end token before `min_tokens` does not end the answer.
        let early = SamplingParams { min_tokens: 2, ..greedy() };
        let walk = verify(&Draft::chain([EOS, EOS, EOS]), early, &[EOS, EOS, EOS, 0]);
        assert_eq!((walk.sampled.len(), walk.accepted.len(), walk.has_ended), (3, 2, true));
    }
}
