//! Verification: how far a draft agrees with the model, and what the model puts out behind it.
//!
//! **Sample and match.** A draw is a function of (seed, sample, position), so the token that plain decoding puts out
//! next is settled before anybody guesses it. The row of the last token is sampled exactly as plain decoding would. If a
//! child of it carries that token, the child's row has the logits that plain decoding would compute next: it is sampled
//! in turn, by a state that has observed the tokens on the way; and so on, until a token that no child carries. What is
//! put out is therefore what is put out without a draft, token for token, whatever a request asks of the sampler, and
//! however good or bad the draft is. Rejection sampling would give the same distribution and other tokens; of a draft
//! that does not depend on the draws, either accepts a set of candidates as often as the model draws one of them.
//!
//! Rows that the walk does not come to are never looked at: what is wrong with them is nobody's fault.

use folio_device::{Drawn, Draws};

use super::Draft;
use crate::{
    Sampled,
    sampling::{NotFinite, SamplingState},
};

/// Where an answer goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Of the token that the row of the last one gives.
    pub position: usize,
    /// Tokens of prompt and answer with which the answer ends.
    pub max_len: usize,
}

/// What one pass put out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Walk {
    /// Nodes whose tokens were put out and whose rows were used, each the parent of the next.
    pub accepted: Vec<u16>,
    /// What is put out: the tokens of the accepted nodes and one more, which comes from the last of their rows. That
    /// one is missing where there is a failure.
    pub sampled: Vec<Sampled>,
    /// Whether the last token ends the answer, as a stop token or by its length.
    pub has_ended: bool,
    /// Why the row that the walk came to last gives no token.
    pub failure: Option<NotFinite>,
}

/// Walks down a draft. `answer` says what a row gives at a position, and is asked for rows in ascending order: row 0 is
/// the last token's, row `i + 1` that of node `i`. Afterwards `state` has observed the tokens put out, and no others.
pub fn walk(
    draft: &Draft,
    state: &mut SamplingState,
    place: Place,
    mut answer: impl FnMut(&mut SamplingState, usize, usize) -> Result<Sampled, NotFinite>,
) -> Walk {
    let mut walk = Walk::default();
    let (mut at, mut position) = (None, place.position);
    loop {
        let sampled = match answer(state, row_of(at), position) {
            Ok(sampled) => sampled,
            Err(failure) => return Walk { failure: Some(failure), ..walk },
        };
        let token = sampled.token;
        position += 1;
        walk.has_ended = state.stops_at(token) || position >= place.max_len;
        state.observe(token);
        walk.sampled.push(sampled);
        let Some(child) = draft.child(at, token).filter(|_| !walk.has_ended) else { return walk };
        walk.accepted.push(child);
        at = Some(child);
    }
}

/// Verifies a draft on the host: `logits` are the rows of the last token and of all nodes, one after the other. Those
/// that are looked at are used up.
pub fn verify(draft: &Draft, state: &mut SamplingState, place: Place, logits: &mut [f32]) -> Walk {
    let num_rows = draft.len() + 1;
    assert_eq!(logits.len() % num_rows, 0, "{} logits in {num_rows} rows", logits.len());
    let width = logits.len() / num_rows;
    walk(draft, state, place, |state, row, position| {
        state.sample(&mut logits[row * width..(row + 1) * width], position)
    })
}

/// Verifies a draft of which a device drew all rows ahead, as [`ask`] asked it to. Takes of `drawn` no more than it
/// comes to.
pub fn verify_drawn(
    draft: &Draft,
    state: &mut SamplingState,
    place: Place,
    drawn: &mut impl Iterator<Item = Drawn>,
) -> Walk {
    let mut taken = 0;
    walk(draft, state, place, |_, row, _| {
        let answer = drawn.nth(row - taken);
        taken = row + 1;
        answer.map_or(Err(NotFinite::NothingLeft), Sampled::try_from)
    })
}

/// Has a device draw the rows of the last token and of all nodes, which begin with row `first_row` of the logits; the
/// first draws the token at `position`. Each is asked for what plain decoding would ask behind the tokens on the way to
/// it. Panics where the request names a token that there is not.
pub fn ask(draft: &Draft, state: &SamplingState, position: usize, first_row: u32, vocab: usize, draws: &mut Draws) {
    state.push_draw(draws, first_row, position, vocab);
    let nodes = (0..draft.len() as u16).map(|node| (node, first_row + 1 + u32::from(node), draft.path(node)));
    if state.draws_ahead() {
        // What is asked depends on the way to a row by its length alone.
        nodes.for_each(|(_, row, path)| state.push_draw(draws, row, position + path.count(), vocab));
        return;
    }
    let (mut seen, mut at) = (state.clone(), None);
    for (node, row, path) in nodes {
        let mut tokens: Vec<u32> = path.map(|node| draft.tokens()[usize::from(node)]).collect();
        let depth = tokens.len();
        if draft.parents()[usize::from(node)] == at {
            // As in a chain: all but the node's own token is observed.
            tokens.truncate(1);
        } else {
            seen = state.clone();
        }
        tokens.into_iter().rev().for_each(|token| seen.observe(token));
        seen.push_draw(draws, row, position + depth, vocab);
        at = Some(node);
    }
}

fn row_of(node: Option<u16>) -> usize {
    node.map_or(0, |node| usize::from(node) + 1)
}
