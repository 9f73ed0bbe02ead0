//! What is kept of a request between steps, and what a step makes of it.

use std::collections::HashMap;

use folio_device::{DRAWN_TOKEN, Draws};
use folio_scheduler::RequestId;

use crate::{
    Admission, RowOutput, Sampled,
    background::guarded,
    inputs::{OutputRows, Requests},
    pooling::Pool,
    sampling::{NotFinite, SamplingState},
    speculate::{Owner, Place, ask, walk},
};

#[derive(Default)]
pub(crate) struct Known(pub HashMap<RequestId, Kept>);

/// What the device was asked about one request.
pub(crate) struct Asked {
    pub rows: OutputRows,
    /// Who it was then: one of the same id may have come since.
    pub admission: u64,
    pub num_questions: usize,
    /// Why it was not asked.
    pub failure: Option<&'static str>,
}

pub(crate) struct Kept {
    pub owner: Owner,
    pub admission: u64,
    sampling: SamplingState,
    /// The token sampled last and its position: the next plan may ask for it without knowing it.
    last: Option<(usize, u32)>,
    /// The position of a token that the device is about to draw, and the number of its draw in the last step.
    pending: Option<(usize, u32)>,
    /// A row of it went wrong: what was asked in the meantime, behind a token that there never was, means nothing.
    has_failed: bool,
    /// For requests that want a vector and no token.
    pool: Option<Pool>,
    /// Tokens of prompt and answer with which it ends.
    pub max_len: usize,
    /// Prompt and answer, where somebody drafts.
    pub history: Option<History>,
}

pub(crate) struct History {
    pub tokens: Vec<u32>,
    prompt_len: usize,
}

impl History {
    pub fn answer(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }
}

/// What a step did for a request, beside its output.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Nodes of its draft that hold, each the parent of the next.
    pub accepted: Vec<u16>,
    /// It has a new last token, and another is to come.
    pub goes_on: bool,
    /// The likeliest token behind the last token and every node, where somebody wants to know.
    pub guesses: Vec<u32>,
}

impl Requests for Known {
    fn awaited(&self, id: RequestId, position: usize) -> Option<u32> {
        let kept = self.0.get(&id)?;
        let at = |known: Option<(usize, u32)>| known.filter(|known| known.0 == position).map(|known| known.1);
        at(kept.last).or_else(|| at(kept.pending).map(|number| DRAWN_TOKEN | number))
    }

    fn pools(&self, id: RequestId) -> bool {
        self.0.get(&id).is_some_and(|kept| kept.pool.is_some())
    }
}

/// Why a row fails whose token before it does not exist.
const ORPHAN: &str = "no token was sampled for the position before";
pub(crate) const PANICKED: &str = "its sampler panicked";

/// What is asked of a row of logits.
pub(crate) enum Question {
    Prompt {
        row: usize,
        target: u32,
    },
    /// The `nth` row of its sample gives the token at `position`.
    Next {
        nth: usize,
        position: usize,
    },
}

impl Kept {
    /// `keeps_tokens`: somebody drafts.
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

    /// Whether what it asks of its next token can be written down while one before is under way. Hidden states come to
    /// the host and are waited for.
    pub fn may_go_ahead(&self) -> bool {
        self.pool.is_none() && (self.pending.is_none() || self.sampling.draws_ahead())
    }

    /// Prompt and answer, where somebody drafts for it and nothing is wrong with it.
    pub fn tokens(&self) -> Option<&[u32]> {
        self.history.as_ref().filter(|_| !self.has_failed).map(|history| &history.tokens[..])
    }

    /// Writes down what the device is asked about the request.
    pub fn ask(&mut self, rows: OutputRows, draws: &mut Draws, vocab: usize) -> Asked {
        let first = draws.draws.len();
        self.pending = None;
        let mut failure = rows.is_orphan.then_some(ORPHAN);
        if failure.is_none() && !rows.pools {
            let sampling = &self.sampling;
            let write = guarded(|| {
                for (row, &target) in rows.prompt.clone().zip(&rows.prompt_targets) {
                    sampling.push_target(draws, row as u32, target);
                }
                let number = draws.draws.len() as u32;
                let sampled =
                    rows.sample.map(|row| ask(&rows.draft, sampling, rows.position, row as u32, vocab, draws));
                // Which of a draft's rows gives the last token is not known before.
                sampled.filter(|()| rows.draft.is_empty()).map(|()| (rows.position, number))
            });
            match write {
                Some(pending) => self.pending = pending,
                // A sampler that panics is its own request's fault; what it wrote is not asked.
                None => {
                    draws.draws.truncate(first);
                    failure = Some(PANICKED);
                }
            }
        }
        Asked { admission: self.admission, num_questions: draws.draws.len() - first, rows, failure }
    }

    /// What a step found out about the request, with `answer` for each row of logits that it has.
    pub fn output(
        &mut self,
        rows: &OutputRows,
        hidden: &[f32],
        hidden_width: usize,
        mut answer: impl FnMut(&mut SamplingState, Question) -> Result<Sampled, NotFinite>,
    ) -> (RowOutput, Outcome) {
        let (id, mut outcome) = (rows.id, Outcome::default());
        self.pending = self.pending.filter(|pending| pending.0 != rows.position);
        if rows.is_orphan || self.has_failed {
            return (RowOutput::failed(id, ORPHAN), outcome);
        }
        if let Some(pool) = &mut self.pool {
            return (take_states(pool, rows, hidden, hidden_width), outcome);
        }
        let mut output = RowOutput::new(id);
        for (row, &target) in rows.prompt.clone().zip(&rows.prompt_targets) {
            match answer(&mut self.sampling, Question::Prompt { row, target }) {
                Ok(sampled) => output.prompt_logprobs.extend(sampled.logprobs),
                Err(error) => {
                    self.has_failed = true;
                    return (RowOutput { failure: Some(error.to_string()), ..output }, outcome);
                }
            }
        }
        if rows.sample.is_none() {
            return (output, outcome);
        }
        let place = Place { position: rows.position, max_len: self.max_len };
        let walk = walk(&rows.draft, &mut self.sampling, place, |sampling, nth, position| {
            answer(sampling, Question::Next { nth, position })
        });
        self.has_failed = walk.failure.is_some();
        output.failure = walk.failure.map(|failure| failure.to_string());
        if let Some(last) = walk.sampled.last() {
            self.last = Some((rows.position + walk.sampled.len() - 1, last.token));
        }
        if let Some(history) = &mut self.history {
            history.tokens.extend(walk.sampled.iter().map(|sampled| sampled.token));
        }
        output.sampled = walk.sampled;
        outcome.goes_on = walk.failure.is_none() && !walk.has_ended;
        outcome.accepted = walk.accepted;
        (output, outcome)
    }
}

/// Adds a step's rows of `width` values to what a request wants pooled; with the last of them comes the vector.
fn take_states(pool: &mut Pool, rows: &OutputRows, hidden: &[f32], width: usize) -> RowOutput {
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
