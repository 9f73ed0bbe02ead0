//! How many nodes each request gets, so that a step brings the most tokens a second.

use super::{
    agreement::Hope,
    cost::{Costs, Curve},
};

/// Nodes of one request that only pay together: in a tree, one that seldom holds may stand before a better one.
#[derive(Clone, Copy, Debug)]
struct Piece {
    request: usize,
    /// Of its draft, with this piece.
    nodes: usize,
    hope: Hope,
}

impl Piece {
    /// Tokens a row.
    fn worth(&self) -> f64 {
        self.hope.tokens / self.hope.rows.max(1e-3)
    }

    /// About its worth, the best first: a rank for every tenth less.
    fn rank(&self) -> usize {
        ((-self.worth().log2() * 7.0).max(0.0) as usize).min(RANKS - 1)
    }
}

const RANKS: usize = 64;

/// Finds the best numbers, in memory that is kept.
#[derive(Debug, Default)]
pub(super) struct Chooser {
    pieces: Vec<Piece>,
    by_rank: Vec<Piece>,
}

/// What a choice promises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Promise {
    /// Tokens a second.
    pub rate: f64,
    /// Nodes that are asked for, of all requests.
    pub nodes: usize,
}

impl Chooser {
    pub fn clear(&mut self) {
        self.pieces.clear();
    }

    /// Adds a request, whose nodes are hoped to do so.
    pub fn add(&mut self, request: usize, hopes: &[Hope]) {
        let first = self.pieces.len();
        for (node, &hope) in hopes.iter().enumerate() {
            let mut piece = Piece { request, nodes: node + 1, hope };
            while let Some(before) = self.pieces[first..].last().filter(|before| before.worth() < piece.worth()) {
                piece.hope.rows += before.hope.rows;
                piece.hope.tokens += before.hope.tokens;
                self.pieces.pop();
            }
            self.pieces.push(piece);
        }
    }

    /// Writes down the best numbers for as many requests as `nodes` is long, and says what they promise. Those of about
    /// `kept` nodes in all stay while they are nearly as good. Where the best are many more than were ever tried, what is
    /// written down is only a little more.
    pub fn choose(&mut self, costs: &Costs, curve: &Curve, kept: usize, nodes: &mut [usize]) -> Promise {
        let requests = nodes.len();
        self.rank();
        let most_rows = (curve.most_seen + curve.most_seen / 2).max(MOST_AT_FIRST);
        let mut most_pieces = 0;
        let mut drafting = ((0, 0), 0.0);
        let (mut best, mut near) = ((0, Promise { rate: 0.0, nodes: 0 }), None::<(usize, Promise)>);
        let (mut rows, mut tokens) = (0.0, requests as f64);
        let (mut asked, mut longest, mut total) = (0, 0, 0);
        for (index, piece) in self.by_rank.iter().enumerate() {
            rows += piece.hope.rows;
            tokens += piece.hope.tokens;
            let before = std::mem::replace(&mut nodes[piece.request], piece.nodes);
            total += piece.nodes - before;
            asked += usize::from(before == 0);
            longest = longest.max(piece.nodes);
            if total <= most_rows {
                most_pieces = index + 1;
            }
            if drafting.0 != (asked, longest) {
                drafting = ((asked, longest), costs.drafting(asked, longest));
            }
            let seconds = curve.seconds(rows) + curve.gap + drafting.1;
            let promise = Promise { rate: tokens / seconds, nodes: total };
            if promise.rate > best.1.rate {
                best = (index + 1, promise);
            }
            if total.abs_diff(kept) < near.map_or(usize::MAX, |near| near.1.nodes.abs_diff(kept)) {
                near = Some((index + 1, promise));
            }
        }
        if let Some(near) = near.filter(|near| near.1.rate > best.1.rate * STAYS) {
            best = near;
        }
        nodes.fill(0);
        self.by_rank[..best.0.min(most_pieces.max(1))].iter().for_each(|piece| nodes[piece.request] = piece.nodes);
        best.1
    }

    /// Sorts the pieces by their ranks; those of one rank, and so those of one request, stay in order.
    fn rank(&mut self) {
        let mut places = [0; RANKS + 1];
        self.pieces.iter().for_each(|piece| places[piece.rank() + 1] += 1);
        (0..RANKS).for_each(|rank| places[rank + 1] += places[rank]);
        self.by_rank.clone_from(&self.pieces);
        for piece in &self.pieces {
            let place = &mut places[piece.rank()];
            self.by_rank[*place] = *piece;
            *place += 1;
        }
    }
}

/// Rows that are verified at most where nobody knows what they cost.
const MOST_AT_FIRST: usize = 4;
/// What is at least so good, of the best, is not changed.
const STAYS: f64 = 0.99;

#[cfg(test)]
mod tests {
    use super::*;

    fn hopes(held: &[f64]) -> Vec<Hope> {
        held.iter().map(|&tokens| Hope { rows: 1.0, tokens }).collect()
    }

    /// A row costs a tenth of a plain step.
    fn costs(requests: usize) -> Costs {
        let mut costs = Costs::default();
        for _ in 0..4 {
            costs.note_plain(requests, 1.0);
            for rows in [1, 2, 4, 8, 16] {
                costs.note_verifying(requests, rows, 1.0 + 0.1 * rows as f64);
            }
        }
        costs
    }

    fn choose(requests: &[&[f64]]) -> (Vec<usize>, Promise) {
        let costs = costs(requests.len());
        let (mut chooser, mut nodes) = (Chooser::default(), vec![0; requests.len()]);
        requests.iter().enumerate().for_each(|(request, held)| chooser.add(request, &hopes(held)));
        let promise = chooser.choose(&costs, &costs.curve(requests.len()).unwrap(), 0, &mut nodes);
        (nodes, promise)
    }

    #[test]
    fn nodes_come_as_long_as_they_pay() {
        let (nodes, promise) = choose(&[&[0.9, 0.81, 0.73, 0.15, 0.1]]);
        assert_eq!(nodes, [3]);
        assert!((promise.rate - 3.44 / 1.3).abs() < 1e-6 && promise.nodes == 3);
    }

    #[test]
    fn requests_are_served_by_what_they_promise() {
        let (nodes, _) = choose(&[&[0.9, 0.8, 0.7], &[0.05, 0.01, 0.0], &[0.5, 0.2, 0.1]]);
        assert_eq!(nodes, [3, 0, 1]);
    }

    #[test]
    fn a_bad_node_in_front_of_a_good_one_is_paid_for() {
        let (nodes, _) = choose(&[&[0.6, 0.05, 0.5, 0.0]]);
        assert_eq!(nodes, [3]);
    }
}
