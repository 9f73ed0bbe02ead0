//! Verification: samples along a draft, as far as the samples agree with it.
//!
//! **Sample and match.** A draw is a function of (seed, sample, position), so the token of plain
//! decoding is fixed before it is drafted. The row of the last token is sampled exactly as in plain
//! decoding. If a child carries the sampled token, the child's row has the logits that plain
//! decoding would compute next: it is sampled in turn, with a state that has observed the tokens of
//! its path; and so on, until a token that no child carries. The tokens are therefore those of
//! plain decoding, one for one, for all sampling parameters and for drafts of any quality.
//! Rejection sampling would give the same distribution and other tokens; for a draft that does not
//! depend on the draws, both accept a set of candidates as often as the model samples one of them.
//!
//! Rows off the path are never looked at, so their faults have no effect.

use folio_device::Draws;

use super::Draft;
use crate::{
    Sampled,
    sampling::{NotFinite, SamplingState},
};

/// The place at which an answer continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Position of the token that the last token's row gives.
    pub position: usize,
    /// Tokens of prompt and answer with which the answer ends.
    pub max_len: usize,
}

/// Results of one pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Walk {
    /// Nodes whose tokens were sampled, each the parent of the next.
    pub accepted: Vec<u16>,
    /// The sampled tokens: those of the accepted nodes, and one more from the row of the last of
    /// them. That one is missing after a failure.
    pub sampled: Vec<Sampled>,
    /// Whether the last token ends the answer, as a stop token or by its length.
    pub has_ended: bool,
    /// Reason why the last row of the path gives no token.
    pub failure: Option<NotFinite>,
}

/// Walks down a draft. `answer` samples a row at a position, and is called for rows in ascending
/// order: row 0 is the last token's, row `i + 1` that of node `i`. Afterwards `state` has observed
/// the sampled tokens, and no others.
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

/// Asks a device to sample the rows of the last token and of all nodes, which begin with row
/// `first_row` of the logits; the first row gives the token at `position`. The draw of each row is
/// the one of plain decoding after the tokens of its path. Panics if the request names a token
/// outside the vocabulary.
pub fn ask(draft: &Draft, state: &SamplingState, position: usize, first_row: u32, vocab: usize, draws: &mut Draws) {
    state.push_draw(draws, first_row, position, vocab);
    let nodes = (0..draft.len() as u16).map(|node| (node, first_row + 1 + u32::from(node), draft.path(node)));
    if state.draws_ahead() {
        // The draw of a row depends on its path by the length alone.
        nodes.for_each(|(_, row, path)| state.push_draw(draws, row, position + path.count(), vocab));
        return;
    }
    let (mut seen, mut at) = (state.clone(), None);
    for (node, row, path) in nodes {
        let mut tokens: Vec<u32> = path.map(|node| draft.tokens()[usize::from(node)]).collect();
        let depth = tokens.len();
        if draft.parents()[usize::from(node)] == at {
            // As in a chain: all tokens but the node's own were observed.
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
