//! Number of blocks of each layer group, such that the most tokens fit a number of bytes.
//!
//! Groups without a window hold every token, so their pools have the same length. A group with a
//! window holds only the tokens in it; more blocks than all running requests can use, and half as
//! many again for prefix hits, would be wasted.

use folio_device::{BLOCK_TOKENS, KvFormat};
use folio_model::KvGroupSpec;
use folio_scheduler::{GroupConfig, SchedulerConfig};

/// Blocks are numbered in 32 bits and slots within them too.
const MOST_BLOCKS: u64 = u32::MAX as u64 / BLOCK_TOKENS as u64;

/// Block sizes of all groups, and the rules by which sequences hold blocks.
pub struct Demand {
    /// One sequence may take all of a step.
    config: SchedulerConfig,
    /// Each further sequence takes one row: a step's tokens are shared.
    decoding: SchedulerConfig,
    /// Bytes of a block, by group.
    pub block_bytes: Vec<u64>,
    /// Bytes that drafting keeps for each block of a group, beside it.
    draft_bytes: Vec<u64>,
}

/// The sequences that must fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub max_seqs: usize,
    pub max_len: usize,
}

impl Demand {
    pub fn new(groups: &[KvGroupSpec], format: KvFormat, budget_tokens: usize) -> Self {
        let block = |group: &KvGroupSpec| group.shape(1, format).block_bytes();
        let windows = groups.iter().map(|group| GroupConfig { window: group.window, ..GroupConfig::new(1) });
        let config = SchedulerConfig {
            block_tokens: BLOCK_TOKENS,
            groups: windows.collect(),
            budget_tokens,
            ..SchedulerConfig::new(Vec::new())
        };
        let decoding = SchedulerConfig { budget_tokens: 1, ..config.clone() };
        Self { config, decoding, block_bytes: groups.iter().map(block).collect(), draft_bytes: vec![0; groups.len()] }
    }

    /// This demand with `bytes` more for each block of the first group without a window, or else of
    /// the first group.
    pub fn with_drafts(mut self, bytes: u64) -> Self {
        let full = self.config.groups.iter().position(|group| group.window.is_none()).unwrap_or(0);
        self.draft_bytes.iter_mut().skip(full).take(1).for_each(|of_drafts| *of_drafts = bytes);
        self
    }

    pub fn bytes(&self, blocks: &[usize]) -> u64 {
        self.own_bytes(blocks).saturating_add(sum(blocks, &self.draft_bytes))
    }

    /// Bytes of the blocks without drafting's part.
    pub fn own_bytes(&self, blocks: &[usize]) -> u64 {
        sum(blocks, &self.block_bytes)
    }

    /// The least that one sequence of that length can run in: what it holds, and a block to spare.
    pub fn least(&self, len: usize) -> Vec<usize> {
        (0..self.block_bytes.len()).map(|group| self.config.most_blocks(group, len) + 1).collect()
    }

    /// How many sequences of that length these pools hold together.
    pub fn sequences(&self, blocks: &[usize], len: usize) -> usize {
        let held = blocks.iter().enumerate().map(|(group, &count)| {
            let (first, further) = self.held(group, len);
            if count < first { 0 } else { 1 + (count - first) / further.max(1) }
        });
        held.min().unwrap_or(0)
    }

    /// Blocks that a sequence holds if it gets all of a step, and if it gets a row.
    fn held(&self, group: usize, len: usize) -> (usize, usize) {
        (self.config.most_blocks(group, len), self.decoding.most_blocks(group, len))
    }

    /// The longest sequence, up to `most`, such that its pools and its other costs pass `fits`.
    pub fn longest(&self, most: usize, fits: impl Fn(usize, u64) -> bool) -> Option<usize> {
        let passes = |len: u64| fits(len as usize, self.bytes(&self.least(len as usize)));
        // The engine needs room for a prompt of one token and an answer of one.
        largest(2, most as u64, passes).map(|len| len as usize)
    }

    /// Pools for as many tokens as `bytes` hold, at least one sequence of full length; none if that
    /// does not fit. `keep_spare` also takes memory that no running request could use, for the
    /// prefix cache.
    pub fn pools(&self, load: Load, bytes: u64, keep_spare: bool) -> Option<Vec<usize>> {
        let least = self.least(load.max_len);
        if self.bytes(&least) > bytes {
            return None;
        }
        let one = load.max_len.div_ceil(BLOCK_TOKENS) as u64 + 1;
        let used = one.saturating_mul(load.max_seqs as u64);
        let sized = |blocks: u64, seqs: u64| self.sized(load.max_len, blocks.min(MOST_BLOCKS), seqs);
        let fits = |pools: &[usize]| self.bytes(pools) <= bytes;
        // Windows first, for as many sequences as can be; then everything else goes to length.
        let seqs = largest(1, load.max_seqs as u64, |seqs| fits(&sized(one, seqs)));
        let Some(seqs) = seqs else { return Some(least) };
        let most = if keep_spare { MOST_BLOCKS } else { used.min(MOST_BLOCKS) };
        let blocks = largest(one, most, |blocks| fits(&sized(blocks, seqs))).unwrap_or(one);
        Some(sized(blocks, seqs))
    }

    /// `blocks` for groups without a window; for windows, at most the blocks that `seqs` sequences
    /// use and half as many again.
    fn sized(&self, max_len: usize, blocks: u64, seqs: u64) -> Vec<usize> {
        let groups = self.config.groups.iter().enumerate();
        let sized = groups.map(|(number, group)| {
            if group.window.is_none() {
                return blocks;
            }
            let (first, further) = self.held(number, max_len);
            let used = (further as u64).saturating_mul(seqs - 1).saturating_add(first as u64);
            blocks.min(used.saturating_mul(3) / 2).max(first as u64 + 1)
        });
        sized.map(|blocks| blocks as usize).collect()
    }
}

fn sum(blocks: &[usize], bytes: &[u64]) -> u64 {
    let each = blocks.iter().zip(bytes).map(|(&count, &bytes)| bytes.saturating_mul(count as u64));
    each.fold(0, u64::saturating_add)
}

/// The largest number in `low ..= high` that passes, where all below a passing one pass too.
fn largest(low: u64, high: u64, passes: impl Fn(u64) -> bool) -> Option<u64> {
    if high < low || !passes(low) {
        return None;
    }
    let (mut low, mut high) = (low, high);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if passes(middle) { low = middle } else { high = middle - 1 }
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(layers: usize, window: Option<usize>) -> KvGroupSpec {
        KvGroupSpec { layers: (0..layers).collect(), window, kv_heads: 2, head_dim: 64 }
    }

    const LOAD: Load = Load { max_seqs: 4, max_len: 1000 };

    #[test]
    fn a_full_group_takes_what_there_is_and_not_a_byte_more() {
        let demand = Demand::new(&[group(3, None)], KvFormat::BF16, 64);
        let block = demand.block_bytes[0];
        assert_eq!(block, 2 * 3 * 2 * 64 * 16 * 2);
        // 63 blocks for a sequence and one spare.
        assert_eq!(demand.least(1000), [64]);
        assert_eq!(demand.pools(LOAD, 64 * block - 1, false), None);
        assert_eq!(demand.pools(LOAD, 64 * block, false), Some(vec![64]));
        assert_eq!(demand.pools(LOAD, 100 * block + 5, false), Some(vec![100]));
        assert_eq!(demand.pools(LOAD, 1000 * block, false), Some(vec![256]), "no more than 4 sequences use");
        assert_eq!(demand.pools(LOAD, 1000 * block, true), Some(vec![1000]), "unless the cache is to have it");
        assert_eq!(demand.sequences(&[256], 1000), 4);
        assert_eq!(demand.sequences(&[256], 17), 128);
    }

    #[test]
    fn a_window_needs_less_and_leaves_the_rest_to_others() {
        let demand = Demand::new(&[group(2, None), group(10, Some(128))], KvFormat::BF16, 64);
        let held = demand.config.most_blocks(1, 1000);
        assert!(held < 63, "a window and the chunks behind it, not the whole sequence: {held}");
        assert_eq!(demand.least(1000), [64, held + 1]);
        assert_eq!(demand.least(100), [8, 8], "a short sequence fills no window");
        let further = demand.decoding.most_blocks(1, 1000);
        assert!(further < held, "rows of a step are shared");
        let all_windows = (held + 3 * further) * 3 / 2;
        let pools = demand.pools(LOAD, 1 << 30, false).expect("it fits");
        assert_eq!(pools, [256, all_windows], "the window's pool: 4 sequences and half as much again");
        let tight = demand.bytes(&[64, held + 1]);
        assert_eq!(demand.pools(LOAD, tight, false), Some(vec![64, held + 1]), "one sequence and no more");
        assert_eq!(demand.pools(LOAD, tight - 1, false), None);
        for bytes in [tight, tight + (1 << 20), 2 * tight, 3 * tight] {
            let pools = demand.pools(LOAD, bytes, true).expect("it fits");
            assert!(demand.bytes(&pools) <= bytes);
            let is_full = demand.bytes(&pools) + demand.bytes(&[1, 1]) > bytes;
            assert!(is_full || pools[1] == all_windows, "{bytes}: {pools:?}");
        }
    }

    #[test]
    fn only_windows() {
        let demand = Demand::new(&[group(4, Some(32))], KvFormat::BF16, 16);
        let pools = demand.pools(LOAD, u64::MAX, true).expect("it fits");
        assert!(pools[0] < 64, "a pool that nothing could fill is not made: {pools:?}");
        assert!(demand.sequences(&pools, 1_000_000) >= 4, "all of them run, however long they are");
    }

    #[test]
    fn the_longest_that_fits() {
        let demand = Demand::new(&[group(3, None)], KvFormat::BF16, 64);
        let budget = 10 * demand.block_bytes[0];
        let fits = |_: usize, bytes: u64| bytes <= budget;
        assert_eq!(demand.longest(4096, fits), Some(9 * 16), "nine blocks and one to spare");
        assert_eq!(demand.longest(100, fits), Some(100));
        assert_eq!(demand.longest(4096, |_, bytes| bytes <= demand.block_bytes[0]), None);
        // Other costs of a length count too.
        assert_eq!(demand.longest(4096, |len, bytes| bytes <= budget && len <= 77), Some(77));
    }
}
