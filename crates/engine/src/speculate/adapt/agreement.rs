//! The agreement of drafts with the model, node by node.
//!
//! Nodes are distinguished by their index in the draft: a method puts the likeliest first, so the
//! first nodes of a long draft are those of a short one, in a chain as in a tree. Recorded are how
//! often a requested node was drafted, and how often it was accepted. An index without recent data
//! is estimated from the one before it.

use super::super::Draft;

#[derive(Clone, Debug)]
pub(super) struct Agreement {
    places: Vec<Place>,
}

/// Sums over the times that this index was requested, in which older ones count less.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    asked: f32,
    /// The node was drafted.
    there: f32,
    /// It was accepted.
    held: f32,
    /// The node before it was drafted.
    there_before: f32,
    /// The node before it was accepted.
    held_before: f32,
}

/// Expected gain and cost of a node, before the draft is made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Hope {
    /// Probability that it is drafted, and costs a row.
    pub rows: f64,
    /// Probability that it is accepted, and gives a token.
    pub tokens: f64,
}

/// Weight of the data of all requests, in number of drafts, against the data of one.
const PRIOR: f32 = 3.0;
/// The same for the ratio of an index to the one before it.
const PRIOR_ON: f32 = 8.0;
/// Weight of an index for the next one.
const NEIGHBOUR: f32 = 2.0;

impl Agreement {
    pub fn new(most: usize) -> Self {
        Self { places: vec![Place::default(); most] }
    }

    /// The estimate without data: good enough to be probed.
    pub fn hopeful(most: usize) -> Self {
        let mut hopeful = Self::new(most);
        if let Some(first) = hopeful.places.first_mut() {
            *first = Place { asked: 2.0, there: 2.0, held: 1.2, ..Place::default() };
        }
        hopeful
    }

    /// Reduces the weight of earlier data.
    pub fn fade(&mut self, keep: f32) {
        for place in &mut self.places {
            for sum in
                [&mut place.asked, &mut place.there, &mut place.held, &mut place.there_before, &mut place.held_before]
            {
                *sum *= keep;
            }
        }
    }

    /// Notes the result of a draft for which `asked` nodes were requested.
    pub fn note(&mut self, asked: usize, drafted: &Draft, accepted: &[u16]) {
        let there = |node: usize| f32::from(u8::from(node < drafted.len()));
        let held = |node: usize| f32::from(u8::from(accepted.contains(&(node as u16))));
        for (node, place) in self.places.iter_mut().enumerate().take(asked.max(drafted.len())) {
            place.asked += 1.0;
            place.there += there(node);
            place.held += held(node);
            if let Some(before) = node.checked_sub(1) {
                place.there_before += there(before);
                place.held_before += held(before);
            }
        }
    }

    /// Number of times that the first node was requested, recently.
    pub fn evidence(&self) -> f32 {
        self.asked(0)
    }

    /// The same for any node, by its index.
    pub fn asked(&self, node: usize) -> f32 {
        self.places.get(node).map_or(0.0, |place| place.asked)
    }

    /// The expectation for each node of a request with the data `self`; `all` has the data of all
    /// requests.
    pub fn hopes(&self, all: &Steps, hopes: &mut Vec<Hope>) {
        hopes.clear();
        let (mut there, mut held) = (all.first.rows as f32, all.first.tokens as f32);
        for (node, (place, (there_on, held_on))) in self.places.iter().zip(&all.on).enumerate() {
            if node == 0 {
                there = (place.there + PRIOR * there) / (place.asked + PRIOR);
                held = (place.held + PRIOR * held) / (place.asked + PRIOR);
            } else {
                there *= (place.there + PRIOR_ON * there_on) / (place.there_before + PRIOR_ON);
                held *= (place.held + PRIOR_ON * held_on) / (place.held_before + PRIOR_ON);
            }
            there = there.min(1.0);
            held = held.min(there);
            hopes.push(Hope { rows: f64::from(there), tokens: f64::from(held) });
        }
    }

    /// The data of all requests, as ratios from node to node.
    pub fn steps(&self, steps: &mut Steps) {
        steps.on.clear();
        let Some(first) = self.places.first() else { return };
        let asked = first.asked.max(0.1);
        steps.first = Hope { rows: f64::from(first.there / asked), tokens: f64::from(first.held / asked) };
        steps.on.push((1.0, 1.0));
        let mut held_on = first.held / first.there.max(0.1);
        for place in &self.places[1..] {
            let there_on = (place.there + NEIGHBOUR) / (place.there_before + NEIGHBOUR);
            held_on = (place.held + NEIGHBOUR * held_on) / (place.held_before + NEIGHBOUR);
            // In a tree the node before may be one that is hardly ever accepted.
            steps.on.push((there_on.min(8.0), held_on.min(8.0)));
            held_on = held_on.min(1.0);
        }
    }
}

/// Ratios of nodes to those before them.
#[derive(Clone, Debug, Default)]
pub(super) struct Steps {
    first: Hope,
    /// Factors for drafted and for accepted nodes.
    on: Vec<(f32, f32)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hopes(own: &Agreement, all: &Agreement) -> Vec<Hope> {
        let (mut steps, mut hopes) = (Steps::default(), Vec::new());
        all.steps(&mut steps);
        own.hopes(&steps, &mut hopes);
        hopes
    }

    #[test]
    fn a_chain_falls_off_as_it_agrees() {
        let (mut all, fresh) = (Agreement::hopeful(6), Agreement::new(6));
        // Three of four are accepted at every depth.
        for i in 0..256_usize {
            let held = (0..4).take_while(|depth| (i >> (2 * depth)) & 3 != 0).count();
            all.note(4, &Draft::chain([1, 2, 3, 4]), &[0, 1, 2, 3][..held]);
        }
        let hopes = hopes(&fresh, &all);
        for (depth, hope) in hopes.iter().enumerate() {
            let expected = 0.75_f64.powi(depth as i32 + 1);
            assert!((hope.tokens - expected).abs() < 0.02, "{hopes:?}");
            assert!((hope.rows - 1.0).abs() < 1e-3);
        }
    }

    #[test]
    fn a_request_that_is_different_is_told_apart() {
        let mut all = Agreement::hopeful(4);
        let (mut good, mut none) = (Agreement::new(4), Agreement::new(4));
        for _ in 0..16 {
            good.note(4, &Draft::chain([1, 2, 3, 4]), &[0, 1, 2, 3]);
            all.note(4, &Draft::chain([1, 2, 3, 4]), &[0, 1, 2, 3]);
            none.note(4, &Draft::default(), &[]);
            all.note(4, &Draft::default(), &[]);
        }
        let (good, none) = (hopes(&good, &all), hopes(&none, &all));
        assert!(good[3].tokens > 0.8 && good[3].rows > 0.8, "{good:?}");
        assert!(none[0].tokens < 0.1 && none[0].rows < 0.1, "{none:?}");
    }

    /// After failures of a request's first nodes, its later ones were never seen to fail.
    #[test]
    fn bad_luck_with_the_first_node_counts_once() {
        let (mut all, mut own) = (Agreement::hopeful(3), Agreement::new(3));
        for i in 0..100 {
            all.note(3, &Draft::chain([1, 2, 3]), &[0, 1, 2][..i % 4]);
        }
        (0..3).for_each(|_| own.note(3, &Draft::chain([1, 2, 3]), &[]));
        let (of_all, of_own) = (hopes(&Agreement::new(3), &all), hopes(&own, &all));
        assert!(of_own[0].tokens < 0.6 * of_all[0].tokens);
        let on = |hopes: &[Hope]| hopes[2].tokens / hopes[0].tokens;
        assert!((on(&of_own) / on(&of_all) - 1.0).abs() < 0.01, "{of_own:?} and {of_all:?}");
    }
}
