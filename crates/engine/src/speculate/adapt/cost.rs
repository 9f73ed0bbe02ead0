//! What a step costs: by the number of requests in it, and by the rows that it verifies besides.

use super::estimate::Estimate;

/// Sizes are told apart up to the next of these, and from the last on in proportion.
const SIZES: [usize; 27] = [
    0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
];

fn size(count: usize) -> usize {
    SIZES.partition_point(|&size| size < count).min(SIZES.len() - 1)
}

/// Of steps with about one number of requests.
#[derive(Clone, Debug, Default)]
struct Batch {
    /// One token each, planned ahead.
    plain: Estimate,
    /// By the size of what is verified besides; the first verified nothing, but could not be planned ahead.
    verifying: Vec<Cell>,
    /// How long the device waits for a step that cannot be planned ahead, in seconds.
    gap: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    took: Estimate,
    /// Mean of the rows that were verified.
    rows: f64,
}

impl Batch {
    /// A step that verifies nothing, but could not be planned ahead. There are few of those, and they are much like plain
    /// ones, at least.
    fn bare(&self) -> Option<f64> {
        let plain = self.plain.seconds()?;
        let bare = self.verifying.first().map_or(Estimate::default(), |cell| cell.took);
        let weight = f64::from(bare.seen()) / f64::from(bare.seen() + 16);
        Some(bare.settled().map_or(plain, |bare| plain.max(bare * weight + plain * (1.0 - weight))))
    }

    /// What rows of a size cost besides, where that was measured: how many, and seconds.
    fn besides(&self, size: usize) -> Option<(f64, f64)> {
        let cell = self.verifying.get(size)?;
        let bare = self.bare()?;
        Some((cell.rows, (cell.took.settled()? - bare).max(0.0)))
    }
}

#[derive(Debug)]
pub(super) struct Costs {
    batches: Vec<Batch>,
    drafting: Vec<Drafting>,
}

/// Of drafts for about one number of requests.
#[derive(Clone, Copy, Debug, Default)]
struct Drafting {
    /// No draft was asked for: what a method does to keep up.
    idle: Estimate,
    /// A node of the longest draft.
    per_node: Estimate,
}

impl Default for Costs {
    fn default() -> Self {
        Self { batches: vec![Batch::default(); SIZES.len()], drafting: vec![Drafting::default(); SIZES.len()] }
    }
}

impl Costs {
    pub fn note_plain(&mut self, requests: usize, seconds: f64) {
        let batch = &mut self.batches[size(requests)];
        let moved = batch.plain.note(seconds);
        batch.verifying.iter_mut().for_each(|cell| cell.took.shift(moved));
    }

    pub fn note_verifying(&mut self, requests: usize, rows: usize, seconds: f64) {
        let batch = &mut self.batches[size(requests)];
        let index = size(rows);
        batch.verifying.resize(batch.verifying.len().max(index + 1), Cell::default());
        let cell = &mut batch.verifying[index];
        cell.rows += (rows as f64 - cell.rows) * if cell.took.seen() == 0 { 1.0 } else { 0.1 };
        let moved = cell.took.note(seconds);
        if rows == 0 {
            // What makes such a step slower (longer contexts, a busy machine) makes all others slower, too.
            batch.plain.shift(moved);
            batch.verifying.iter_mut().skip(1).for_each(|cell| cell.took.shift(moved));
        }
    }

    pub fn note_gap(&mut self, requests: usize, seconds: f64) {
        let gap = &mut self.batches[size(requests)].gap;
        let most = 2.0 * *gap + 20e-6;
        *gap += (seconds.min(most) - *gap) / 8.0;
    }

    /// `nodes`: of the longest draft that was asked for; `requests`: that were asked for one, or are there if none was.
    pub fn note_drafting(&mut self, requests: usize, nodes: usize, seconds: f64) {
        let drafting = &mut self.drafting[size(requests)];
        match nodes {
            0 => drafting.idle.note(seconds),
            nodes => drafting.per_node.note(seconds / nodes as f64),
        };
    }

    pub fn drafting(&self, requests: usize, nodes: usize) -> f64 {
        let at = size(requests);
        let near =
            |pick: fn(&Drafting) -> &Estimate| nearest(at, self.drafting.len(), |i| pick(&self.drafting[i]).seconds());
        match nodes {
            0 => self.drafting[at].idle.seconds().unwrap_or(0.0),
            nodes => near(|drafting| &drafting.per_node).map_or(0.0, |(_, unit)| unit * nodes as f64),
        }
    }

    /// What a step that verified so many rows takes, if that is known well.
    pub fn verifying(&self, requests: usize, rows: usize) -> Option<f64> {
        self.batches[size(requests)].verifying.get(size(rows))?.took.settled()
    }

    /// How often a plain step with about so many requests was seen.
    pub fn plain_seen(&self, requests: usize) -> u32 {
        self.batches[size(requests)].plain.seen()
    }

    /// A step of one token each, in seconds; none before any was seen.
    pub fn plain(&self, requests: usize) -> Option<f64> {
        let at = size(requests);
        let (found, seconds) = nearest(at, self.batches.len(), |i| self.batches[i].plain.seconds())?;
        // More requests take longer, but nobody knows how much: as if the half of a step grew with them.
        let ratio = SIZES[at].max(1) as f64 / SIZES[found].max(1) as f64;
        Some(if found == at { seconds } else { seconds * (0.5 + 0.5 * ratio) })
    }

    /// What verifying costs with so many requests.
    pub fn curve(&self, requests: usize) -> Option<Curve> {
        let (at, plain) = (size(requests), self.plain(requests)?);
        let own = &self.batches[at];
        let bare = own.bare().unwrap_or(plain);
        let mut points = vec![(0.0, bare)];
        let mut unknown = Vec::new();
        for index in 1..self.batches.iter().map(|batch| batch.verifying.len()).max().unwrap_or(0) {
            match nearest(at, self.batches.len(), |i| self.batches[i].besides(index)) {
                Some((found, (rows, _))) if found == at => {
                    points.push((rows, own.verifying[index].took.settled().unwrap_or(bare)))
                }
                // Elsewhere it was measured what so many rows cost besides: the best guess here.
                Some((_, (rows, besides))) => points.push((rows, bare + besides)),
                None => unknown.push(SIZES[index] as f64),
            }
        }
        make_monotone(&mut points);
        add_hopes(&mut points, &unknown);
        let most_known = own.verifying.iter().rposition(|cell| cell.took.settled().is_some()).map_or(0, |i| SIZES[i]);
        // As much as those before it; and if nothing is known, so little that it is tried. Nothing is free.
        let little = plain * f64::min(0.01, 0.25 / requests as f64);
        let beyond = match points.last() {
            Some(&(rows, seconds)) if rows > 0.0 => ((seconds - bare) / rows).max(little / 4.0),
            _ => little,
        };
        Some(Curve { plain, points, beyond, gap: own.gap, most_known })
    }
}

/// The nearest index to `at` for which there is something, below first.
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

/// Adds what was never measured between what was: so cheap that it is tried, should it pay then.
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
    pub plain: f64,
    /// (rows, seconds), both ascending; the first is of no rows.
    points: Vec<(f64, f64)>,
    /// What a row beyond all that was measured adds.
    beyond: f64,
    pub gap: f64,
    /// Rows of which it is known what they cost together, about.
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
        // Nobody knows these, and they may be cheaper.
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
