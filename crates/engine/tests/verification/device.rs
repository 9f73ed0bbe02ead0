//! A device that samples all rows of a draft ahead, with the reference sampler.

use folio_device::{Drawn, Draws};
use folio_engine::{
    SamplingState,
    speculate::{Draft, ask},
};

use crate::sampler;

/// The draws for a draft, with unordered lists sorted.
pub fn asked(draft: &Draft, state: &SamplingState, position: usize, vocab: usize) -> Draws {
    let mut draws = Draws::default();
    ask(draft, state, position, 0, vocab, &mut draws);
    for draw in &draws.draws {
        let seen = &mut draws.seen[draw.seen.start as usize..draw.seen.end as usize];
        seen.sort_by_key(|seen| seen.token);
    }
    draws
}

/// The sampled tokens of the rows of the last token and of all nodes.
pub fn draw_all(draft: &Draft, state: &SamplingState, position: usize, rows: &[Vec<f32>]) -> Vec<Drawn> {
    let draws = asked(draft, state, position, rows[0].len());
    assert_eq!(draws.draws.len(), rows.len(), "a draw a row");
    draws.draws.iter().map(|draw| sampler::draw(&rows[draw.row as usize], draw, &draws)).collect()
}
