//! Draft trees: several continuations of one sequence in one span, each row with a path of its own.
//!
//! The rows of a span of at most 64 may be a tree instead of a chain. Keys and values of row `i`
//! are stored for index `base + i` of the sequence (`base` is the start of the span), whatever its
//! depth, so that no two rows collide. Its position, for the rotary embedding and windows, is
//! `base + depth`. Each row has a word that marks its ancestors: bit `j` is set if row `j` is on
//! the path from the root to this row, the row itself included. A row sees everything before the
//! span, as far as its window reaches back from its position, and only its own path inside the
//! span.
//!
//! **A row reads its path in the order of positions**, as if it were stored at
//! `base, base + 1, ...`: at position `base + d` it reads the row of the `d`-th set bit of its
//! word. Parents come before children, so the reads ascend in storage, but with gaps. One could
//! mask the gaps instead, and rows would share all keys that they read. But sums are computed in
//! tiles, lanes and splits by position: a masked neighbour adds nothing and still shifts the
//! following tokens into other lanes, and the result differs from the chain's in its last bits.
//! Read in order it is the chain's bit for bit, for any order in which a backend adds, and no
//! computation must know of trees: they only change the addresses of reads. Two other ways were
//! considered. Copies of each path in separate blocks would leave kernels unchanged, but need
//! blocks that the pool does not have and a copy per layer, token and row. Masks in the tiles
//! before `base` and gathered rows behind it would read a long prefix once for all rows; that only
//! affects speed and can be done behind this interface.
//!
//! **A tree may grow from step to step**: a drafting head adds one level a step. The span then
//! holds only the new rows; their bit numbers continue from the earlier rows', and they read the
//! earlier rows' keys and values where earlier steps stored them. The highest bit of a span's first
//! word gives the number of earlier rows ([`rows_before`]).
//!
//! So backends split a tree: every row is computed as a span of its own, which sees
//! `base + depth + 1` positions. Each row counts as one span against
//! [`InputLimits::spans`](crate::InputLimits::spans), and the tree's table counts once per row
//! against [`InputLimits::table_entries`](crate::InputLimits::table_entries).
//!
//! When a path was accepted, [`Operations::move_tokens`](crate::Operations::move_tokens) copies its
//! keys and values to the slots where the chain would have stored them ([`moves`]).

use crate::Span;

/// Most rows of a tree: the bits of a word.
pub const TREE_ROWS: usize = 64;

/// Computes the words of a tree from each row's parent, which comes before it; a root has none.
pub fn ancestors(parents: &[Option<usize>]) -> Vec<u64> {
    assert!(parents.len() <= TREE_ROWS, "a tree of {} rows, at most {TREE_ROWS}", parents.len());
    let mut words: Vec<u64> = Vec::with_capacity(parents.len());
    for (row, parent) in parents.iter().enumerate() {
        let above = parent.map_or(0, |parent| {
            assert!(parent < row, "row {row} comes before its parent {parent}");
            words[parent]
        });
        words.push(above | 1 << row);
    }
    words
}

/// Rows on the path to a row, itself included, as the tree numbers them.
pub fn path(word: u64) -> impl Iterator<Item = usize> + Clone {
    let rest = std::iter::successors(Some(word), |word| Some(word & word.wrapping_sub(1)));
    rest.take(word.count_ones() as usize).map(|word| word.trailing_zeros() as usize)
}

/// The copies after which the path of `word` is the sequence: pairs (from, to) of indices in the
/// sequence, in an order in which they may be copied one after the other.
pub fn moves(base: usize, word: u64) -> impl Iterator<Item = (usize, usize)> {
    path(word).enumerate().filter(|(depth, row)| depth != row).map(move |(depth, row)| (base + row, base + depth))
}

/// Number of the tree's rows that earlier steps computed.
pub fn rows_before(words: &[u64]) -> usize {
    words.first().and_then(|word| word.checked_ilog2()).unwrap_or(0) as usize
}

/// The words of a span that is a tree. `words` are those of all rows of a step, or empty.
pub(crate) fn of_span<'a>(words: &'a [u64], span: &Span) -> Option<&'a [u64]> {
    let rows = words.get(span.first_row as usize..(span.first_row + span.num_rows) as usize)?;
    rows.first().is_some_and(|&word| word != 0).then_some(rows)
}

/// Start of a tree: the index of its first row, in this step or an earlier one.
pub(crate) fn base(span: &Span, words: &[u64]) -> usize {
    (span.context - span.num_rows) as usize - rows_before(words)
}

/// Asserts that the words are a tree's and that positions follow from them.
pub(crate) fn check(words: &[u64], span: &Span, positions: &[u32]) {
    let before = rows_before(words);
    assert!(before + words.len() <= TREE_ROWS, "{span:?} is a tree of more than {TREE_ROWS} rows");
    assert!(before as u32 + span.num_rows <= span.context, "{span:?} is a tree that begins before its sequence");
    for (row, (&word, &position)) in (before..).zip(words.iter().zip(positions)) {
        let above = word & !(1 << row);
        assert!(word >> row == 1, "row {row} of a tree has the word {word:#x}");
        // Parents from earlier steps have no word in this one.
        if let Some(parent) = above.checked_ilog2().filter(|&parent| parent as usize >= before) {
            let parents = words[parent as usize - before];
            assert_eq!(above, parents, "the way to row {row} of a tree, and to its parent {parent}");
        }
        let expected = base(span, words) + word.count_ones() as usize - 1;
        assert_eq!(position as usize, expected, "position of row {row} of a tree");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ```text
    /// 0 - 1 - 3
    ///   \ 2 - 4 - 5
    /// ```
    const PARENTS: [Option<usize>; 6] = [None, Some(0), Some(0), Some(1), Some(2), Some(4)];

    #[test]
    fn words_name_the_way_from_the_root() {
        let words = ancestors(&PARENTS);
        assert_eq!(words, [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b110101]);
        assert_eq!(path(words[5]).collect::<Vec<_>>(), [0, 2, 4, 5]);
        assert_eq!(path(1 << 63).collect::<Vec<_>>(), [63]);
        assert_eq!(path(0).count() + path(u64::MAX).count(), 64);
        assert_eq!(moves(20, words[5]).collect::<Vec<_>>(), [(22, 21), (24, 22), (25, 23)]);
        assert_eq!(moves(20, 0b1111).count(), 0, "a chain lies where it belongs");
    }

    #[test]
    fn what_is_no_tree_is_refused() {
        let (words, span) = (ancestors(&PARENTS), Span { first_row: 0, num_rows: 6, context: 26 });
        let positions = [20, 21, 21, 22, 22, 23];
        check(&words, &span, &positions);
        let refused = |change: fn(&mut Vec<u64>, &mut [u32; 6])| {
            let (mut words, mut positions) = (words.clone(), positions);
            change(&mut words, &mut positions);
            let payload = std::panic::catch_unwind(|| check(&words, &span, &positions)).expect_err("taken");
            *payload.downcast::<String>().expect("a message")
        };
        assert!(refused(|words, _| words[3] = 0b0011).contains("has the word 0x3"));
        assert!(refused(|words, _| words[4] = 0b110001).contains("has the word 0x31"));
        assert!(refused(|words, _| words[5] = 0b110001).contains("its parent 4"));
        assert!(refused(|_, positions| positions[2] = 22).contains("position of row 2"));
    }

    #[test]
    fn a_tree_goes_on_where_it_stopped() {
        let (words, positions) = (ancestors(&PARENTS), [20, 21, 21, 22, 22, 23]);
        for first in 0..6 {
            let span = Span { first_row: 0, num_rows: 6 - first as u32, context: 26 };
            assert_eq!((rows_before(&words[first..]), base(&span, &words[first..])), (first, 20));
            check(&words[first..], &span, &positions[first..]);
        }
        assert_eq!((rows_before(&[]), base(&Span { first_row: 0, num_rows: 4, context: 26 }, &[])), (0, 22));
        let early = Span { first_row: 0, num_rows: 1, context: 3 };
        std::panic::catch_unwind(|| check(&words[5..], &early, &[0])).expect_err("a tree from before the sequence");
    }
}
