//! A request's sampling as a `Draw`, for a device that samples by itself.

use folio_device::{Draw, DrawFailure, Drawn, DrawnLogprobs, Draws, SeenToken};

use super::{NotFinite, SamplingState, random};
use crate::executor::{Logprobs, Sampled};

impl SamplingState {
    /// Adds the draw of the token at `position`, from row `row` of logits over `vocab` tokens.
    /// Panics if the request names a token outside the vocabulary, because no device may write
    /// there.
    pub(crate) fn push_draw(&self, draws: &mut Draws, row: u32, position: usize, vocab: usize) {
        let params = &*self.params;
        let end = |list: usize| list as u32;
        let allowed = params.allowed_tokens.as_ref().map(|allowed| {
            let first = end(draws.tokens.len());
            draws.tokens.extend(allowed);
            first..end(draws.tokens.len())
        });
        let banned = end(draws.tokens.len());
        draws.tokens.extend(self.banned(vocab));
        let biases = end(draws.biases.len());
        draws.biases.extend(&params.logit_bias);
        let first = allowed.as_ref().map_or(banned, |range| range.start);
        let named = draws.tokens[first as usize..].iter().chain(params.logit_bias.iter().map(|(token, _)| token));
        let unknown = named.copied().find(|&token| token as usize >= vocab);
        assert_eq!(unknown, None, "a request names a token of a vocabulary of {vocab}");
        let seen = end(draws.seen.len());
        let counts = self.seen.counts().filter(|&(token, _)| (token as usize) < vocab);
        draws.seen.extend(counts.map(|(token, outputs)| SeenToken { token, outputs }));
        draws.draws.push(Draw {
            temperature: if params.is_greedy() { 0.0 } else { params.temperature },
            top_k: params.top_k.unwrap_or(0),
            top_p: params.top_p,
            min_p: params.min_p,
            uniform: random::uniform(params.seed, self.sample_index, position),
            repetition_penalty: params.repetition_penalty,
            frequency_penalty: params.frequency_penalty,
            presence_penalty: params.presence_penalty,
            allowed,
            banned: banned..end(draws.tokens.len()),
            biases: biases..end(draws.biases.len()),
            seen: seen..end(draws.seen.len()),
            logprobs: params.logprobs,
            ..Draw::greedy(row)
        });
    }

    /// Adds a draw that returns the logprob of a prompt token.
    pub(crate) fn push_target(&self, draws: &mut Draws, row: u32, target: u32) {
        let logprobs = Some(self.params.prompt_logprobs.unwrap_or(0));
        draws.draws.push(Draw { target: Some(target), logprobs, ..Draw::greedy(row) });
    }

    /// Whether the next draw does not depend on the token before it.
    pub(crate) fn draws_ahead(&self) -> bool {
        let params = &*self.params;
        let penalized =
            params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0 || params.presence_penalty != 0.0;
        !penalized && params.bad_words.is_empty() && self.seen.num_outputs() >= params.min_tokens
    }
}

/// The token of a draw, or why the row gives none.
impl TryFrom<Drawn> for Sampled {
    type Error = NotFinite;

    fn try_from(drawn: Drawn) -> Result<Sampled, NotFinite> {
        match drawn.failure {
            None => {
                let logprobs = drawn.logprobs.map(|found| logprobs(drawn.token, found));
                Ok(Sampled { token: drawn.token, logprobs })
            }
            Some(DrawFailure::NotFinite { token, value }) => Err(NotFinite::Logit { token: token as usize, value }),
            Some(DrawFailure::NothingLeft) => Err(NotFinite::NothingLeft),
        }
    }
}

fn logprobs(token: u32, DrawnLogprobs { logprob, rank, top }: DrawnLogprobs) -> Logprobs {
    Logprobs { token, logprob, rank, top }
}
