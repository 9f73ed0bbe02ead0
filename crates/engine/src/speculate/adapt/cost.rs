//! The cost of a step: by the number of its requests, and by the rows that it verifies.

use super::estimate::{Estimate, Pace};

/// Sizes are grouped up to the next of these, and from the last on in proportion.
const SIZES: [usize; 27] = [
    0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
];

/// Up to this, every number is a size of its own.
const EXACT: usize = 6;

fn size(count: usize) -> usize {
    SIZES.partition_point(|&size| size < count).min(SIZES.len() - 1)
}

/// Times of steps with about one number of requests.
#[derive(Clone, Debug, Default)]
struct Batch {
    /// One token each, planned ahead.
    plain: Estimate,
    /// By the size of the verified rows; the first verified none, but could not be planned ahead.
    verifying: Vec<Cell>,
    /// Time that the device waits for a step that cannot be planned ahead, in seconds.
    gap: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    took: Estimate,
    /// Mean number of verified rows.
    rows: f64,
}

impl Batch {
    /// Time of a step that verifies no rows, but cannot be planned ahead. There are few of these,
    /// and they take at least as long as plain ones.
    fn bare(&self, pace: &Pace) -> Option<f64> {
        let plain = self.plain.seconds(pace)?;
        let bare = self.verifying.first().map_or(Estimate::default(), |cell| cell.took);
        let weight = f64::from(bare.seen()) / f64::from(bare.seen() + 16);
        Some(bare.settled(pace).map_or(plain, |bare| plain.max(bare * weight + plain * (1.0 - weight))))
    }

    /// Additional cost of the rows of a size, if it was measured: rows and seconds.
    fn besides(&self, size: usize, pace: &Pace) -> Option<(f64, f64)> {
        let cell = self.verifying.get(size)?;
        let bare = self.bare(pace)?;
        Some((cell.rows, (cell.took.settled(pace)? - bare).max(0.0)))
    }
}

#[derive(Debug)]
pub(super) struct Costs {
    pace: Pace,
    batches: Vec<Batch>,
    drafting: Vec<Drafting>,
}

/// Times of drafting for about one number of requests.
#[derive(Clone, Debug, Default)]
struct Drafting {
    /// No draft was requested: the time of a method to keep up.
    idle: Estimate,
    /// By the size of the longest draft.
    made: Vec<Estimate>,
}

impl Drafting {
    /// A line through the measurements, weighted by their number.
    fn line(&self) -> Option<DraftingLine> {
        let known = self.made.iter().zip(SIZES).filter(|(made, _)| made.seen() > 0);
        let points = known.filter_map(|(made, nodes)| {
            Some((f64::from(made.seen().min(16)), nodes as f64, made.seconds(&Pace::default())?))
        });
        let (mut weight, mut nodes, mut seconds, mut squares, mut products) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (w, n, s) in points {
            weight += w;
            nodes += w * n;
            seconds += w * s;
            squares += w * n * n;
            products += w * n * s;
        }
        if weight == 0.0 {
            return None;
        }
        let (nodes, seconds) = (nodes / weight, seconds / weight);
        let spread = squares / weight - nodes * nodes;
        // With one known length, the time before the first node counts as much as a node.
        let even = seconds / (1.0 + nodes);
        let per_node = if spread > 0.1 { (products / weight - nodes * seconds) / spread } else { even };
        let per_node = per_node.clamp(0.0, seconds / nodes.max(0.1));
        Some(DraftingLine { first: seconds - per_node * nodes, per_node })
    }
}

/// Seconds of drafting by the nodes of the longest draft.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct DraftingLine {
    first: f64,
    pub per_node: f64,
}

impl DraftingLine {
    pub fn seconds(&self, nodes: f64) -> f64 {
        self.first + self.per_node * nodes
    }
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            pace: Pace::default(),
            batches: vec![Batch::default(); SIZES.len()],
            drafting: vec![Drafting::default(); SIZES.len()],
        }
    }
}

impl Costs {
    /// Notes the time of a step; returns it without outliers.
    pub fn note_plain(&mut self, requests: usize, seconds: f64) -> f64 {
        let mut pace = self.pace;
        let took = self.batches[size(requests)].plain.note(seconds, &mut pace);
        self.learn(pace, &[requests]);
        took
    }

    /// As [`Self::note_plain`], for a step that verified `rows` rows.
    pub fn note_verifying(&mut self, requests: usize, rows: usize, seconds: f64) -> f64 {
        let batch = &mut self.batches[size(requests)];
        let index = size(rows);
        batch.verifying.resize(batch.verifying.len().max(index + 1), Cell::default());
        let cell = &mut batch.verifying[index];
        cell.rows += (rows as f64 - cell.rows) * if cell.took.seen() == 0 { 1.0 } else { 0.1 };
        let mut pace = self.pace;
        let took = cell.took.note(seconds, &mut pace);
        self.learn(pace, &[requests, rows]);
        took
    }

    /// If several numbers are one size, a step may be longer because it has more rows: that says
    /// nothing of the pace.
    fn learn(&mut self, pace: Pace, counts: &[usize]) {
        if counts.iter().all(|&count| count <= EXACT) {
            self.pace = pace;
        }
    }

    pub fn note_gap(&mut self, requests: usize, seconds: f64) {
        let gap = &mut self.batches[size(requests)].gap;
        let most = 2.0 * *gap + 20e-6;
        *gap += (seconds.min(most) - *gap) / 8.0;
    }

    /// No draft was requested.
    pub fn note_keeping_up(&mut self, requests: usize, seconds: f64) {
        self.drafting[size(requests)].idle.note_alone(seconds);
    }

    /// A draft was requested for `requests` requests, and the longest one has `longest` nodes.
    pub fn note_drafting(&mut self, requests: usize, longest: usize, seconds: f64) {
        let made = &mut self.drafting[size(requests)].made;
        let index = size(longest);
        made.resize(made.len().max(index + 1), Estimate::default());
        made[index].note_alone(seconds);
    }

    pub fn keeping_up(&self, requests: usize) -> f64 {
        self.drafting[size(requests)].idle.seconds(&Pace::default()).unwrap_or(0.0)
    }

    /// Time of drafting for this number of requests; zero while it is unknown.
    pub fn drafting(&self, requests: usize) -> DraftingLine {
        let found = nearest(size(requests), self.drafting.len(), |i| self.drafting[i].line());
        found.map_or(DraftingLine::default(), |(_, line)| line)
    }

    /// Whether the times of drafting for both numbers of requests are estimated together.
    pub fn drafts_alike(requests: usize, other: usize) -> bool {
        size(requests) == size(other)
    }

    /// Number of plain steps that were seen with about this number of requests.
    pub fn plain_seen(&self, requests: usize) -> u32 {
        self.batches[size(requests)].plain.seen()
    }

    /// Time of a step of one token each, in seconds; none before one was seen.
    pub fn plain(&self, requests: usize) -> Option<f64> {
        let at = size(requests);
        let (found, seconds) = nearest(at, self.batches.len(), |i| self.batches[i].plain.seconds(&self.pace))?;
        // More requests take longer, but by an unknown amount: assume that half of a step grows
        // with them.
        let ratio = SIZES[at].max(1) as f64 / SIZES[found].max(1) as f64;
        Some(if found == at { seconds } else { seconds * (0.5 + 0.5 * ratio) })
    }

    /// The cost of verifying with this number of requests.
    pub fn curve(&self, requests: usize) -> Option<Curve> {
        let (at, plain) = (size(requests), self.plain(requests)?);
        let own = &self.batches[at];
        let bare = own.bare(&self.pace).unwrap_or(plain);
        let mut points = vec![(0.0, bare)];
        let mut unknown = Vec::new();
        for index in 1..self.batches.iter().map(|batch| batch.verifying.len()).max().unwrap_or(0) {
            match nearest(at, self.batches.len(), |i| self.batches[i].besides(index, &self.pace)) {
                Some((found, (rows, _))) if found == at => {
                    points.push((rows, own.verifying[index].took.settled(&self.pace).unwrap_or(bare)))
                }
                // The cost of these rows was measured with another number of requests: the best
                // estimate here.
                Some((_, (rows, besides))) => points.push((rows, bare + besides)),
                None => unknown.push(SIZES[index] as f64),
            }
        }
        make_monotone(&mut points);
        add_hopes(&mut points, &unknown);
        let most_known =
            own.verifying.iter().rposition(|cell| cell.took.settled(&self.pace).is_some()).map_or(0, |i| SIZES[i]);
        // At least as much as fewer rows; without any measurement so little that it is tried, but
        // not nothing.
        let little = plain * f64::min(0.01, 0.25 / requests as f64);
        let beyond = match points.last() {
            Some(&(rows, seconds)) if rows > 0.0 => ((seconds - bare) / rows).max(little / 4.0),
            _ => little,
        };
        Some(Curve { requests, plain, points, beyond, gap: own.gap, most_known })
    }
}

/// The nearest index to `at` with a value, below first.
fn nearest<T>(at: usize, len: usize, find: impl Fn(usize) -> Option<T>) -> Option<(usize, T)> {
    let pairs = (0..len).flat_map(|away| [at.checked_sub(away), at.checked_add(away).filter(|&i| i < len)]);
    pairs.flatten().find_map(|i| Some((i, find(i)?)))
}

/// Pools neighbours until more rows never take less time.
fn make_monotone(points: &mut [(f64, f64)]) {
    let mut pools: Vec<(f64, usize)> = Vec::with_capacity(points.len());
    for &(_, seconds) in points.iter() {
        let mut pool = (seconds, 1);
        while let Some(&(before, count)) = pools.last().filter(|&&(before, _)| before > pool.0) {
            pool = ((before * count as f64 + pool.0 * pool.1 as f64) / (count + pool.1) as f64, count + pool.1);
            pools.pop();
        }
        pools.push(pool);
    }
    let flat = pools.into_iter().flat_map(|(seconds, count)| std::iter::repeat_n(seconds, count));
    points.iter_mut().zip(flat).for_each(|(point, seconds)| point.1 = seconds);
}

/// Adds points between measured ones: so cheap that they are tried if they would pay.
fn add_hopes(points: &mut Vec<(f64, f64)>, unknown: &[f64]) {
    let known = points.clone();
    for &rows in unknown {
        let after = known.partition_point(|point| point.0 < rows);
        if let Some(to) = known.get(after).filter(|to| to.0 > rows) {
            let from = known[after - 1];
            points.push((rows, from.1 + 0.5 * (to.1 - from.1) * (rows - from.0) / (to.0 - from.0)));
        }
    }
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
}

/// Seconds of a step by the rows that it verifies.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    /// Requests in the step. Each of them gets at least a token.
    pub requests: usize,
    pub plain: f64,
    /// (rows, seconds), both ascending; the first has no rows.
    points: Vec<(f64, f64)>,
    /// Additional time of a row beyond all measured ones.
    beyond: f64,
    pub gap: f64,
    /// Most rows with a measured cost, about.
    pub most_known: usize,
}

impl Curve {
    pub fn seconds(&self, rows: f64) -> f64 {
        let after = self.points.partition_point(|point| point.0 <= rows);
        let (from, to) = (self.points[after - 1], self.points.get(after));
        let per_row = match to {
            Some(to) => (to.1 - from.1) / (to.0 - from.0),
            None => self.beyond,
        };
        from.1 + (rows - from.0) * per_row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(plain: f64, per_row: f64) -> Costs {
        let mut costs = Costs::default();
        for _ in 0..4 {
            costs.note_plain(1, plain);
            for rows in [2, 4] {
                costs.note_verifying(1, rows, plain + per_row * rows as f64);
            }
        }
        costs
    }

    #[test]
    fn what_was_measured_is_joined_by_lines() {
        let curve = known(4.0, 0.5).curve(1).unwrap();
        for rows in [0.0, 2.0, 4.0, 9.0] {
            assert!((curve.seconds(rows) - 4.0 - 0.5 * rows).abs() < 1e-6, "{rows}: {}", curve.seconds(rows));
        }
        // The cost of these is unknown, and they may be cheaper.
        assert!((curve.seconds(1.0) - 4.25).abs() < 1e-6 && (curve.seconds(3.0) - 5.25).abs() < 1e-6);
        assert_eq!(curve.most_known, 4);
        assert!(Costs::default().curve(1).is_none());
    }

    #[test]
    fn rows_cost_about_the_same_in_a_batch_nobody_measured() {
        let mut costs = known(4.0, 0.5);
        costs.note_plain(16, 9.0);
        let curve = costs.curve(16).unwrap();
        assert!((curve.plain - 9.0).abs() < 1e-6 && (curve.seconds(4.0) - 11.0).abs() < 1e-6);
        assert_eq!(curve.most_known, 0);
    }

    #[test]
    fn drafts_cost_by_what_was_made() {
        let mut costs = Costs::default();
        assert_eq!(costs.drafting(1), DraftingLine::default());
        costs.note_drafting(1, 3, 4.0);
        assert!(
            (costs.drafting(1).seconds(1.0) - 2.0).abs() < 1e-6,
            "one length: the half of it before the first node"
        );
        for nodes in [0, 1, 3, 1, 0, 3] {
            costs.note_drafting(1, nodes, 1.0 + nodes as f64);
        }
        for nodes in [0.0, 2.0, 5.0] {
            let found = costs.drafting(2).seconds(nodes);
            assert!((found - 1.0 - nodes).abs() < 1e-3, "{nodes}: {found}");
        }
        assert_eq!(costs.keeping_up(1), 0.0);
    }

    #[test]
    fn more_rows_never_take_less() {
        let mut points = vec![(0.0, 4.0), (1.0, 6.0), (2.0, 5.0), (3.0, 4.0), (4.0, 7.0)];
        make_monotone(&mut points);
        assert_eq!(points.iter().map(|point| point.1).collect::<Vec<_>>(), [4.0, 5.0, 5.0, 5.0, 7.0]);
    }

    #[test]
    fn sizes_grow_in_proportion() {
        assert_eq!([0, 1, 6, 7, 8, 13, 64, 65, 9999].map(size), [0, 1, 6, 7, 7, 10, 14, 15, 26]);
    }
}
