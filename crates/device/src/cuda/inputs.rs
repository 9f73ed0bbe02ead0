//! The inputs of one step, in device memory at addresses that never change, so that a recorded step
//! can be replayed with the next step's numbers: ids, positions, spans, block tables, lists of
//! attention's work items, and the angles of rotary embeddings.
//!
//! They are sent in one [`Parcel`]. A step that decodes tokens and verifies drafts, with an output
//! for every row, is padded up to a bucket of the [`ladder`], so that a recording of that size
//! serves it. Padding rows have token 0, position 0, no slot and no span. Trees, and chains of few
//! rows, are split into single rows (`paths.rs`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Buffer, Device};
use super::parcel::{self, Packer, Parcel};
use super::paths::{self, Apart, CHAIN_ROWS};
use super::tensor::Vector;
use super::work::{self, WorkKey};
use crate::tree::TREE_ROWS;
use crate::{Batch, DRAWN_TOKEN, InputLimits, Result, Span, StepSize};

/// Slot of a row with a key and value that are not stored.
pub(super) const NO_SLOT: u32 = u32::MAX;
/// Most kinds of attention of one model: by window, grouping and kernel.
const WORK_LISTS: usize = 6;
/// Parts of each list of work items.
const PARTS_OF_A_LIST: usize = 3;

pub struct Inputs {
    device: Arc<Device>,
    limits: InputLimits,
    layout: Layout,
    buffer: Buffer,
    parcels: [Parcel; 2],
    turn: usize,
    size: StepSize,
    /// Spans without padding, with rows of trees split.
    apart: Apart,
    form: Form,
    /// Every row has an output, and no span is longer than a draft may be.
    decodes: bool,
    ropes: Vec<Rope>,
    lists: Mutex<Vec<List>>,
}

/// Kinds of spans in a step, which decide its kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Form {
    trees: bool,
    /// Whether there are spans of one row, rows of trees included, and spans of more.
    single: bool,
    long: bool,
}

/// Cosines and sines of one rotary embedding, `[row][pairs]`.
struct Rope {
    pairs: usize,
    cos: Buffer,
    sin: Buffer,
}

/// The work items of one kind of attention in this step.
#[derive(Clone, Copy, Debug)]
struct List {
    key: WorkKey,
    splits: usize,
    tiles: usize,
}

/// Offsets in words, each a multiple of 4.
struct Layout {
    tokens: usize,
    positions: usize,
    outputs: usize,
    first_row: usize,
    num_rows: usize,
    context: usize,
    /// Offsets of slots, one per layer group.
    slots: Vec<usize>,
    first_block: Vec<usize>,
    /// Numbers of items, two for each list.
    counts: usize,
    blocks: Vec<usize>,
    splits: [usize; WORK_LISTS],
    tiles: [usize; WORK_LISTS],
    /// Offset of the ancestors of rows, two words per row.
    ancestors: usize,
    words: usize,
}

impl Layout {
    fn new(limits: &InputLimits) -> Layout {
        let mut words = 0usize;
        let mut take = |count: usize| {
            let at = words;
            words = words.saturating_add(count.saturating_add(3) / 4 * 4);
            at
        };
        let (rows, spans, groups) = (limits.rows, most_spans(limits), limits.groups);
        Layout {
            tokens: take(rows),
            positions: take(rows),
            outputs: take(limits.outputs.max(1)),
            first_row: take(spans),
            num_rows: take(spans),
            context: take(spans),
            slots: (0..groups).map(|_| take(rows)).collect(),
            first_block: (0..groups).map(|_| take(spans)).collect(),
            counts: take(2 * WORK_LISTS),
            splits: std::array::from_fn(|_| take(2 * work::most_splits(limits))),
            blocks: (0..groups).map(|_| take(limits.table_entries)).collect(),
            tiles: std::array::from_fn(|_| take(2 * work::most_tiles(limits))),
            ancestors: take(2 * rows),
            words,
        }
    }
}

/// Most spans, with chains split into rows.
pub(super) fn most_spans(limits: &InputLimits) -> usize {
    limits.spans.saturating_add(CHAIN_ROWS)
}

/// Bytes of one rotary embedding's cosines, or sines.
fn angle_bytes(limits: &InputLimits) -> usize {
    limits.rows.saturating_mul(limits.rope_pairs).saturating_mul(4)
}

/// Most parts of a step: rows, outputs, spans, ancestors, tables of each group, lists of work
/// items.
fn most_parts(limits: &InputLimits) -> usize {
    7 + 3 * limits.groups + PARTS_OF_A_LIST * WORK_LISTS
}

/// Device bytes of a step's inputs, and of two parcels in flight.
pub(super) fn device_bytes(limits: &InputLimits) -> usize {
    let angles = angle_bytes(limits).saturating_mul(2 * limits.ropes);
    let words = Layout::new(limits).words;
    let on_the_way = parcel::words(most_parts(limits), words).saturating_mul(2);
    words.saturating_add(on_the_way).saturating_mul(4).saturating_add(angles)
}

/// Device addresses of one list of work items.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkList {
    pub splits: u64,
    pub num_splits: u64,
    pub tiles: u64,
    pub num_tiles: u64,
    /// Numbers of this step; a recorded launch does not depend on them.
    pub splits_now: usize,
    pub tiles_now: usize,
}

impl Inputs {
    pub(super) fn new(device: &Arc<Device>, limits: InputLimits) -> Result<Self> {
        let layout = Layout::new(&limits);
        let bytes = layout.words.saturating_mul(4);
        let parcel = || Parcel::new(device, most_parts(&limits), layout.words);
        let angles = angle_bytes(&limits);
        let rope =
            |_| Ok(Rope { pairs: 0, cos: device.alloc("cosines", angles)?, sin: device.alloc("sines", angles)? });
        Ok(Self {
            device: Arc::clone(device),
            limits,
            buffer: device.alloc_zeroed("a step's inputs", bytes)?,
            parcels: [parcel()?, parcel()?],
            layout,
            turn: 0,
            size: StepSize { rows: 0, outputs: 0 },
            apart: Apart::with_room(most_spans(&limits)),
            form: Form::default(),
            decodes: false,
            ropes: (0..limits.ropes).map(rope).collect::<Result<_>>()?,
            lists: Mutex::default(),
        })
    }

    pub fn limits(&self) -> &InputLimits {
        &self.limits
    }

    /// The size with padding.
    pub fn size(&self) -> StepSize {
        self.size
    }

    /// Whether a recording of a step of this size can serve this one.
    pub fn decodes(&self) -> bool {
        self.decodes
    }

    /// The other facts that a recording depends on.
    pub(super) fn form(&self) -> Form {
        self.form
    }

    pub fn tokens(&self) -> u64 {
        self.at(self.layout.tokens)
    }

    pub fn positions(&self) -> u64 {
        self.at(self.layout.positions)
    }

    pub fn outputs(&self) -> u64 {
        self.at(self.layout.outputs)
    }

    /// Addresses of spans: first rows, numbers of rows, contexts.
    pub(super) fn spans(&self) -> [u64; 3] {
        [self.layout.first_row, self.layout.num_rows, self.layout.context].map(|offset| self.at(offset))
    }

    pub(super) fn slots(&self, group: usize) -> u64 {
        self.at(self.layout.slots[group])
    }

    /// Addresses of the starts of spans' tables, and of the tables.
    pub(super) fn tables(&self, group: usize) -> [u64; 2] {
        [self.layout.first_block[group], self.layout.blocks[group]].map(|offset| self.at(offset))
    }

    /// Ancestor words of the rows, or null in a step without trees.
    pub(super) fn ancestors(&self) -> u64 {
        if self.form.trees { self.at(self.layout.ancestors) } else { 0 }
    }

    /// Cosines, sines and their number per row.
    pub(super) fn rope(&self, rope: usize) -> (u64, u64, usize) {
        let rope = &self.ropes[rope];
        (rope.cos.ptr(), rope.sin.ptr(), rope.pairs)
    }

    pub(super) fn set_rope(&mut self, rope: usize, inv_freq: &Vector) -> (u64, u64) {
        let (pairs, limit) = (inv_freq.len(), self.limits.rope_pairs);
        assert!(pairs <= limit, "a rope of {pairs} pairs, limit {limit}");
        self.ropes[rope].pairs = pairs;
        (self.ropes[rope].cos.ptr(), self.ropes[rope].sin.ptr())
    }

    fn at(&self, word: usize) -> u64 {
        self.buffer.ptr() + 4 * word as u64
    }

    /// Sends the inputs of a step. `drawn` has the tokens of rows on the device, and the row that
    /// each of the latest draws used; the batch may refer to a drawn token by the number of its
    /// draw. `awaited`: no step is in flight.
    pub(super) fn upload(&mut self, batch: &Batch, drawn: (u64, &[u32]), awaited: bool) -> Result<StepSize> {
        let (drawn, rows_drawn) = drawn;
        batch.check(&self.limits);
        let rows = batch.num_rows();
        let short = batch.spans.iter().all(|span| span.num_rows as usize <= TREE_ROWS);
        self.decodes = short && rows > 0 && batch.outputs.iter().copied().eq(0..rows as u32);
        self.apart.fill(batch, self.decodes && paths::are_few(batch));
        let spans = &self.apart.spans;
        self.form = Form {
            trees: !batch.ancestors.is_empty(),
            single: spans.iter().any(|span| span.num_rows == 1),
            long: spans.iter().any(|span| span.num_rows > 1),
        };
        let padded = if self.decodes { ladder(rows).min(self.limits.rows).min(self.limits.outputs) } else { rows };
        // If the next bucket is above a limit, the step is not padded.
        let padded = padded.max(rows);
        self.size = StepSize { rows: padded, outputs: batch.outputs.len() + padded - rows };

        let turn = self.turn;
        self.turn = 1 - turn;
        let mut writer = self.parcels[turn].packer(most_parts(&self.limits))?;
        let layout = &self.layout;
        let added = padded - rows;
        let token = |token: u32| match token.checked_sub(DRAWN_TOKEN) {
            Some(number) => DRAWN_TOKEN | rows_drawn[number as usize],
            None => token,
        };
        // The first part: drawn tokens are substituted in it.
        writer.put(layout.tokens, batch.tokens.iter().map(|&id| token(id)).chain(std::iter::repeat_n(0, added)));
        writer.put(layout.positions, batch.positions.iter().copied().chain(std::iter::repeat_n(0, added)));
        writer.put(layout.outputs, batch.outputs.iter().copied().chain(rows as u32..padded as u32));
        let spans = &self.apart.spans;
        writer.put(layout.first_row, spans.iter().map(|span| span.first_row));
        writer.put(layout.num_rows, spans.iter().map(|span| span.num_rows));
        writer.put(layout.context, spans.iter().map(|span| span.context));
        for (group, tables) in batch.groups.iter().enumerate() {
            let slots = tables.slots.iter().copied().chain(std::iter::repeat_n(NO_SLOT, added));
            writer.put(layout.slots[group], slots);
            let first = self.apart.origins.iter().map(|&origin| tables.first_block[origin as usize]);
            writer.put(layout.first_block[group], first);
            writer.put(layout.blocks[group], tables.blocks.iter().copied());
        }
        writer.put(layout.ancestors, batch.ancestors.iter().flat_map(|&word| [word as u32, (word >> 32) as u32]));
        let lists = self.lists.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (number, list) in lists.iter_mut().enumerate() {
            write_list(&mut writer, layout, number, list, &self.apart.spans);
        }
        let packed = writer.finish();
        self.parcels[turn].send(&self.device, packed, &self.buffer, drawn, awaited);
        Ok(self.size)
    }

    /// The step's work items of one kind of attention. A new kind is listed now; from then on every
    /// step brings its list along.
    pub(super) fn work(&self, key: WorkKey) -> WorkList {
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        let number = lists.iter().position(|list| list.key == key).unwrap_or_else(|| self.add_list(&mut lists, key));
        let (list, layout) = (&lists[number], &self.layout);
        WorkList {
            splits: self.at(layout.splits[number]),
            num_splits: self.at(layout.counts + 2 * number),
            tiles: self.at(layout.tiles[number]),
            num_tiles: self.at(layout.counts + 2 * number + 1),
            splits_now: list.splits,
            tiles_now: list.tiles,
        }
    }

    fn add_list(&self, lists: &mut MutexGuard<'_, Vec<List>>, key: WorkKey) -> usize {
        let number = lists.len();
        assert!(number < WORK_LISTS, "a model with more than {WORK_LISTS} kinds of attention");
        let mut list = List { key, splits: 0, tiles: 0 };
        let mut words = vec![0; parcel::words(PARTS_OF_A_LIST, self.layout.words)];
        let mut writer = Packer::new(&mut words, PARTS_OF_A_LIST);
        write_list(&mut writer, &self.layout, number, &mut list, &self.apart.spans);
        for (to, words) in writer.parts() {
            // The device remembers a failure of this upload.
            let _ = self.device.upload(&self.buffer, 4 * to, words);
        }
        lists.push(list);
        number
    }
}

fn write_list(writer: &mut Packer<'_>, layout: &Layout, number: usize, list: &mut List, spans: &[Span]) {
    list.splits = writer.put(layout.splits[number], work::splits(spans, list.key)) / 2;
    list.tiles = writer.put(layout.tiles[number], work::tiles(spans, list.key)) / 2;
    writer.put(layout.counts + 2 * number, [list.splits as u32, list.tiles as u32].into_iter());
}

/// The buckets that recorded steps are padded to. Up to 8 rows there is no padding, because each
/// row takes time; then buckets are multiples of 8, of 16 from 256 and of 64 from 512.
pub(super) fn ladder(rows: usize) -> usize {
    match rows {
        0..=8 => rows,
        9..=256 => rows.next_multiple_of(8),
        257..=512 => rows.next_multiple_of(16),
        _ => rows.next_multiple_of(64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_step_do_not_overlap() {
        let limits =
            InputLimits { rows: 37, spans: 5, outputs: 9, table_entries: 70, groups: 2, ropes: 1, rope_pairs: 8 };
        let layout = Layout::new(&limits);
        let mut starts = vec![layout.tokens, layout.positions, layout.outputs, layout.first_row, layout.num_rows];
        starts.extend([layout.context, layout.counts, layout.ancestors]);
        starts.extend(layout.slots.iter().chain(&layout.first_block).chain(&layout.blocks));
        starts.extend(layout.splits.iter().chain(&layout.tiles));
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[0] < pair[1]) && starts.iter().all(|at| at % 4 == 0));
        assert!(layout.words > *starts.last().unwrap());
    }

    #[test]
    fn sizes_rise_and_hold_the_rows() {
        let sizes: Vec<usize> = (1..=700).map(ladder).collect();
        assert!(sizes.iter().enumerate().all(|(index, &size)| size > index && size < 2 * (index + 1).max(8)));
        assert!(sizes.windows(2).all(|pair| pair[0] <= pair[1]));
        assert_eq!([1, 3, 5, 9, 33, 256, 257, 513].map(ladder), [1, 3, 5, 16, 40, 256, 272, 576]);
    }
}
