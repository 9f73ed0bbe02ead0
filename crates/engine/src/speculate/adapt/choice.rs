//! Chooses the number of nodes of each request so that a step gives the most tokens a second.

use super::{
    agreement::Hope,
    cost::{Costs, Curve},
};

/// Nodes of one request that pay only together: in a tree, a node that is seldom accepted may come
/// before a better one.
#[derive(Clone, Copy, Debug)]
struct Piece {
    request: usize,
    /// Nodes of the request's draft up to and with this piece: requested ones, and the expected
    /// number of drafted ones.
    nodes: usize,
    made: f64,
    hope: Hope,
}

impl Piece {
    /// Tokens for each row.
    fn worth(&self) -> f64 {
        self.hope.tokens / self.hope.rows.max(1e-3)
    }

    /// Time that the piece adds to a step of `rows` rows, if the request has `before` nodes without
    /// it: its rows are there only sometimes, and then after all of those.
    fn seconds(&self, before: usize, rows: f64, curve: &Curve) -> f64 {
        let others = rows - (self.made - self.hope.rows);
        let all = curve.seconds(others + self.nodes as f64) - curve.seconds(others + before as f64);
        all * self.hope.rows / (self.nodes - before) as f64
    }

    /// Rank by worth, the best first: one rank for every tenth less.
    fn rank(&self) -> usize {
        ((-self.worth().log2() * 7.0).max(0.0) as usize).min(RANKS - 1)
    }
}

const RANKS: usize = 64;

/// Finds the best numbers, reusing its memory.
#[derive(Debug, Default)]
pub(super) struct Chooser {
    pieces: Vec<Piece>,
    by_rank: Vec<Piece>,
}

/// The expected result of a choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Promise {
    /// Tokens a second.
    pub rate: f64,
    /// Requested nodes of all requests.
    pub nodes: usize,
}

#[derive(Clone, Copy, Debug)]
struct Best {
    /// Number of first pieces in order of rank, without pieces that are longer than `longest`.
    pieces: usize,
    longest: usize,
    promise: Promise,
}

impl Chooser {
    pub fn clear(&mut self) {
        self.pieces.clear();
    }

    /// Adds a request with these expectations.
    pub fn add(&mut self, request: usize, hopes: &[Hope]) {
        let (first, mut made) = (self.pieces.len(), 0.0);
        for (node, &hope) in hopes.iter().enumerate() {
            made += hope.rows;
            let mut piece = Piece { request, nodes: node + 1, made, hope };
            while let Some(before) = self.pieces[first..].last().filter(|before| before.worth() < piece.worth()) {
                piece.hope.rows += before.hope.rows;
                piece.hope.tokens += before.hope.tokens;
                self.pieces.pop();
            }
            self.pieces.push(piece);
        }
        // The precision of the measured times cannot tell so small a gain from none.
        let first_poor = self.pieces[first..].iter().position(|piece| piece.worth() < POOR);
        self.pieces.truncate(first + first_poor.unwrap_or(self.pieces.len() - first));
    }

    /// Writes the best numbers of nodes to `nodes`, one for each request, and returns their
    /// expected result. Numbers with about `last_total` nodes in all stay while they are nearly as good.
    /// If the best are many more than were ever tried, only a few more are written.
    pub fn choose(&mut self, costs: &Costs, curve: &Curve, last_total: usize, nodes: &mut [usize]) -> Promise {
        self.rank();
        let longest = self.pieces.iter().map(|piece| piece.nodes).max().unwrap_or(0);
        let mut best = self.best_of(costs, curve, last_total, longest, nodes);
        if costs.drafting(nodes.len()).per_node > DEAR * curve.plain {
            // All requests wait for the longest draft: shorter ones may be better for all.
            for longest in (1..longest).rev() {
                let found = self.best_of(costs, curve, last_total, longest, nodes);
                if found.promise.rate > best.promise.rate {
                    best = found;
                }
            }
        }
        nodes.fill(0);
        let chosen = self.by_rank.iter().filter(|piece| piece.nodes <= best.longest);
        chosen.take(best.pieces).for_each(|piece| nodes[piece.request] = piece.nodes);
        best.promise
    }

    /// The best of drafts that are no longer than `longest`.
    fn best_of(&self, costs: &Costs, curve: &Curve, last_total: usize, longest: usize, nodes: &mut [usize]) -> Best {
        nodes.fill(0);
        let most_rows = (2.0 * curve.most_known as f64).max(MOST_AT_FIRST);
        let mut most_pieces = 1;
        let mut best = Best { pieces: 0, longest, promise: Promise { rate: 0.0, nodes: 0 } };
        let mut near = None::<Best>;
        let (mut rows, mut tokens, mut verifying) = (0.0, curve.requests as f64, curve.seconds(0.0));
        let (mut asked, mut most_made, mut total) = (0, 0.0_f64, 0);
        let mut drafting = (1, costs.drafting(1));
        for (index, piece) in self.by_rank.iter().filter(|piece| piece.nodes <= longest).enumerate() {
            let before = std::mem::replace(&mut nodes[piece.request], piece.nodes);
            verifying += piece.seconds(before, rows, curve);
            rows += piece.hope.rows;
            tokens += piece.hope.tokens;
            total += piece.nodes - before;
            asked += usize::from(before == 0);
            most_made = most_made.max(piece.made);
            if rows <= most_rows {
                most_pieces = index + 1;
            }
            if !Costs::drafts_alike(drafting.0, asked) {
                drafting = (asked, costs.drafting(asked));
            }
            let seconds = verifying + curve.gap + drafting.1.seconds(most_made);
            let found = Best { pieces: index + 1, longest, promise: Promise { rate: tokens / seconds, nodes: total } };
            if found.promise.rate > best.promise.rate {
                best = found;
            }
            if total.abs_diff(last_total) < near.map_or(usize::MAX, |near| near.promise.nodes.abs_diff(last_total)) {
                near = Some(found);
            }
        }
        let best = near.filter(|near| near.promise.rate > best.promise.rate * STAYS).unwrap_or(best);
        Best { pieces: best.pieces.min(most_pieces), ..best }
    }

    /// Sorts the pieces by rank; pieces of one rank, and so those of one request, stay in order.
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

/// Tokens of a row below which it is not worth computing.
const POOR: f64 = 0.04;
/// Most verified rows while their cost is unknown.
const MOST_AT_FIRST: f64 = 4.0;
/// Part of a plain step from which on a node of the longest draft is expensive.
const DEAR: f64 = 0.01;
/// A choice is not changed while it is at least this close to the best.
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
            for rows in 1..=16 {
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

    /// Three nodes are nearly free and the fourth is expensive: it is drafted seldom, but costs the
    /// same when it is.
    #[test]
    fn rows_that_are_seldom_there_cost_what_they_cost_then() {
        let mut costs = Costs::default();
        for _ in 0..4 {
            costs.note_plain(1, 1.0);
            for (rows, seconds) in [(1, 1.01), (2, 1.02), (3, 1.03), (4, 2.0), (5, 2.01), (6, 2.02)] {
                costs.note_verifying(1, rows, seconds);
            }
        }
        let (mut chooser, mut nodes) = (Chooser::default(), vec![0]);
        let hopes = [(1.0, 0.8), (0.6, 0.5), (0.5, 0.4), (0.4, 0.1), (0.3, 0.09), (0.2, 0.08)];
        chooser.add(0, &hopes.map(|(rows, tokens)| Hope { rows, tokens }));
        let promise = chooser.choose(&costs, &costs.curve(1).unwrap(), 0, &mut nodes);
        assert_eq!(nodes, [3]);
        assert!((promise.rate - 2.7 / (1.01 + 0.01 * 0.6 + 0.01 * 0.5)).abs() < 1e-6, "{promise:?}");
    }
}
