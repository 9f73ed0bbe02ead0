//! A device that draws all rows of a draft ahead, as the reference sampler does.

use folio_device::{Drawn, Draws};
use folio_engine::{
    SamplingState,
    speculate::{Draft, ask},
};

use crate::sampler;

/// What it is asked about a draft, lists without order in order.
pub fn asked(draft: &Draft, state: &SamplingState, position: usize, vocab: usize) -> Draws {
    let mut draws = Draws::default();
    ask(draft, state, position, 0, vocab, &mut draws);
    for draw in &draws.draws {
        let seen = &mut draws.seen[draw.seen.start as usize..draw.seen.end as usize];
        seen.sort_by_key(|seen| seen.token);
    }
    draws
}

/// What it says of the rows of the last token and of all nodes.
pub fn draw_all(draft: &Draft, state: &SamplingState, position: usize, rows: &[Vec<f32>]) -> Vec<Drawn> {
    let draws = asked(draft, state, position, rows[0].len());
    assert_eq!(draws.draws.len(), rows.len(), "a draw a row");
    draws.draws.iter().map(|draw| sampler::draw(&rows[draw.row as usize], draw, &draws)).collect()
}
