//! The state of a request between steps, and how a step changes it.

use std::collections::HashMap;

use folio_device::{DRAWN_TOKEN, Draws};
use folio_scheduler::RequestId;

use super::answers::Answers;
use crate::{
    Admission, RowOutput,
    background::guarded,
    inputs::{OutputRows, Requests},
    pooling::Pool,
    sampling::{NotFinite, SamplingState},
    speculate::{Owner, Place, ask, walk},
};

/// The requests that the runner has admitted.
#[derive(Default)]
pub(super) struct RequestStates(pub HashMap<RequestId, RequestState>);

/// One request's part of the tokens that the device was asked to sample in a step.
pub(super) struct Asked {
    pub rows: OutputRows,
    /// Admission number at the time of asking; the id may have been reused since.
    pub admission: u64,
    pub num_draws: usize,
    /// Reason why no token was asked for.
    pub failure: Option<&'static str>,
}

pub(super) struct RequestState {
    pub owner: Owner,
    pub admission: u64,
    sampling: SamplingState,
    /// The last sampled token and its position: the next plan may use it without naming it.
    last: Option<(usize, u32)>,
    /// Position of a token that the device is about to sample, and the index of its draw in the
    /// step.
    pending: Option<(usize, u32)>,
    /// Set when a row has failed. Rows that were planned after it follow a token that was never
    /// sampled.
    has_failed: bool,
    /// Set if the request is for an embedding.
    pool: Option<Pool>,
    /// Tokens of prompt and answer with which the request ends.
    pub max_len: usize,
    /// Set if the runner drafts.
    pub history: Option<History>,
}

/// Tokens of a request's prompt and answer.
pub(super) struct History {
    tokens: Vec<u32>,
    prompt_len: usize,
}

impl History {
    pub fn answer(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }
}

/// Results of a step for one request that drafting needs.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Accepted nodes of its draft, each the parent of the next.
    pub accepted: Vec<u16>,
    /// Whether the request has a new last token and its answer continues.
    pub goes_on: bool,
    /// The likeliest token after the last token and after every node, if the drafter reads them.
    pub guesses: Vec<u32>,
}

impl Requests for RequestStates {
    fn awaited(&self, id: RequestId, position: usize) -> Option<u32> {
        let request = self.0.get(&id)?;
        let at = |known: Option<(usize, u32)>| known.filter(|known| known.0 == position).map(|known| known.1);
        at(request.last).or_else(|| at(request.pending).map(|number| DRAWN_TOKEN | number))
    }

    fn pools(&self, id: RequestId) -> bool {
        self.0.get(&id).is_some_and(|request| request.pool.is_some())
    }
}

const ORPHAN: &str = "no token was sampled for the position before";
pub(super) const PANICKED: &str = "its sampler panicked";

impl RequestState {
    /// `keeps_tokens`: the runner drafts.
    pub fn new(admission: Admission, number: u64, keeps_tokens: bool) -> Self {
        let Admission { owner, state, prompt, answer, max_len } = admission;
        let pool = state.pool();
        let history = (keeps_tokens && pool.is_none())
            .then(|| History { tokens: [&prompt[..], &answer].concat(), prompt_len: prompt.len() });
        Self {
            owner,
            admission: number,
            sampling: state,
            last: None,
            pending: None,
            has_failed: false,
            pool,
            max_len,
            history,
        }
    }

    /// Whether a step of the request can start while an earlier one is in flight. Hidden states
    /// are copied to the host, which waits for them.
    pub fn may_start_ahead(&self) -> bool {
        self.pool.is_none() && (self.pending.is_none() || self.sampling.draws_ahead())
    }

    /// Prompt and answer, if the runner drafts for the request and none of its rows has failed.
    pub fn tokens(&self) -> Option<&[u32]> {
        self.history.as_ref().filter(|_| !self.has_failed).map(|history| &history.tokens[..])
    }

    /// Adds the request's draws to those that the device is asked for.
    pub fn ask(&mut self, rows: OutputRows, draws: &mut Draws, vocab: usize) -> Asked {
        let first = draws.draws.len();
        self.pending = None;
        let mut failure = rows.is_orphan.then_some(ORPHAN);
        if failure.is_none() && !rows.pools {
            match guarded(|| self.push_draws(&rows, draws, vocab)) {
                Some(pending) => self.pending = pending,
                // A sampler that panics fails its own request: the draws that it added are removed.
                None => {
                    draws.draws.truncate(first);
                    failure = Some(PANICKED);
                }
            }
        }
        Asked { admission: self.admission, num_draws: draws.draws.len() - first, rows, failure }
    }

    /// Adds draws for the prompt targets, the last token and the draft's nodes. Returns the
    /// position of the next token and the index of its draw, if it is known which draw gives that
    /// token: with a draft any of its rows may.
    fn push_draws(&self, rows: &OutputRows, draws: &mut Draws, vocab: usize) -> Option<(usize, u32)> {
        for (row, &target) in rows.prompt.clone().zip(&rows.prompt_targets) {
            self.sampling.push_target(draws, row as u32, target);
        }
        let row = rows.sample?;
        let number = draws.draws.len() as u32;
        ask(&rows.draft, &self.sampling, rows.position, row as u32, vocab, draws);
        rows.draft.is_empty().then_some((rows.position, number))
    }

    /// Takes the results of a step: hidden states for an embedding, or a token for each row of
    /// logits along the accepted path.
    pub fn take_results(
        &mut self,
        rows: &OutputRows,
        hidden: &[f32],
        hidden_width: usize,
        answers: &mut impl Answers,
    ) -> (RowOutput, Outcome) {
        self.pending = self.pending.filter(|pending| pending.0 != rows.position);
        if rows.is_orphan || self.has_failed {
            return (RowOutput::failed(rows.id, ORPHAN), Outcome::default());
        }
        if let Some(pool) = &mut self.pool {
            return (pool_states(pool, rows, hidden, hidden_width), Outcome::default());
        }
        let mut output = RowOutput::new(rows.id);
        if let Err(error) = self.take_prompt_logprobs(rows, &mut output, answers) {
            self.has_failed = true;
            output.failure = Some(error.to_string());
            return (output, Outcome::default());
        }
        if rows.sample.is_none() {
            return (output, Outcome::default());
        }
        let outcome = self.take_tokens(rows, &mut output, answers);
        (output, outcome)
    }

    fn take_prompt_logprobs(
        &self,
        rows: &OutputRows,
        output: &mut RowOutput,
        answers: &mut impl Answers,
    ) -> Result<(), NotFinite> {
        for (nth, &target) in rows.prompt_targets.iter().enumerate() {
            output.prompt_logprobs.extend(answers.prompt_logprobs(&self.sampling, nth, target)?);
        }
        Ok(())
    }

    /// Samples along the draft until a token that no node carries, and notes the tokens.
    fn take_tokens(&mut self, rows: &OutputRows, output: &mut RowOutput, answers: &mut impl Answers) -> Outcome {
        let place = Place { position: rows.position, max_len: self.max_len };
        let walk = walk(&rows.draft, &mut self.sampling, place, |sampling, nth, position| {
            answers.token(sampling, nth, position)
        });
        self.has_failed = walk.failure.is_some();
        if let Some(last) = walk.sampled.last() {
            self.last = Some((rows.position + walk.sampled.len() - 1, last.token));
        }
        if let Some(history) = &mut self.history {
            history.tokens.extend(walk.sampled.iter().map(|sampled| sampled.token));
        }
        let goes_on = walk.failure.is_none() && !walk.has_ended;
        output.failure = walk.failure.map(|failure| failure.to_string());
        output.sampled = walk.sampled;
        Outcome { accepted: walk.accepted, goes_on, guesses: Vec::new() }
    }
}

/// Adds a step's hidden states to the pool, rows of `width` values. The last row gives the vector.
fn pool_states(pool: &mut Pool, rows: &OutputRows, hidden: &[f32], width: usize) -> RowOutput {
    for row in rows.prompt.clone().chain(rows.sample) {
        pool.add(&hidden[row * width..(row + 1) * width]);
    }
    let output = RowOutput::new(rows.id);
    match rows.sample.map(|_| pool.finish()) {
        None => output,
        Some(Ok(vector)) => RowOutput { pooled: Some(vector), ..output },
        Some(Err(error)) => RowOutput::failed(rows.id, error),
    }
}
