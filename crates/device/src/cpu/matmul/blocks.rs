//! The order in which a thread computes its panels: in blocks of the inner dimension that stay in
//! cache while all row tiles pass over them, so that a weight byte is read from memory once a call.
//! Partial sums are stored between blocks, which is exact.

use std::ops::Range;

use super::super::pool::Disjoint;
use super::super::weight::{LANES, Packing};
use super::activations::{PAIR_RUN, RowTiles, SLACK_WORDS};
use super::kernel::{Kernel, MAX_ROWS};
use super::tile::{Prefetch, Tile};
use super::{Operand, Product, integer};

/// Most panels whose blocks one tile multiplies before the next tile does.
const MAX_BESIDE: usize = 8;
/// With fewer tiles than this, all of their activations stay in the second-level cache in any case.
const BESIDE_TILES: usize = 8;
/// Most tiles that share the prefetch of the next block, each of them a small part with every step.
const MAX_SHARES: usize = 4;
/// Sums of a tile and a panel.
const REGION: usize = MAX_ROWS * LANES;
/// Regions of sums that a thread keeps between blocks, and tiles that pass over a block with them:
/// with the tiles' activations for the block they fit the second-level cache.
const REGIONS: usize = 128;
pub const GROUP_TILES: usize = 16;
/// Number of sums that a thread keeps between blocks.
const THREAD_SUMS: usize = REGIONS * REGION;

impl Operand<'_> {
    /// Steps of a panel that all tiles pass over before the next steps.
    fn block_steps(&self) -> usize {
        let kernel = self.part.kernel();
        match self.tiles.num_tiles == 1 && !kernel.fetches_in_turn(self.tiles.rows) {
            true => self.part.num_steps().max(1),
            false => (kernel.block_bytes() / kernel.packing().step_bytes()).max(1),
        }
    }

    /// Whether sums are stored separately from the output between blocks.
    pub fn keeps_sums(&self) -> bool {
        let blocks = self.part.num_steps().div_ceil(self.block_steps());
        self.part.kernel().keeps_sums() && self.tiles.num_tiles > 1 && blocks > 1
    }

    /// Size of a block's expanded multiples, if several tiles pass over it.
    fn block_numbers(&self) -> usize {
        match self.tiles.num_tiles {
            0 | 1 => 0,
            _ => self.block_steps().min(self.part.num_steps()) * self.part.kernel().step_numbers(),
        }
    }

    /// Panels whose blocks one tile multiplies in a row, before the next tile does.
    fn beside(&self) -> usize {
        if self.tiles.num_tiles < BESIDE_TILES {
            return 1;
        }
        let block_bytes = self.block_steps().min(self.part.num_steps()) * self.part.kernel().packing().step_bytes();
        (self.part.kernel().beside_bytes() / block_bytes.max(1)).clamp(1, MAX_BESIDE)
    }

    /// Size of a thread's own scratch memory.
    pub fn scratch_len(&self) -> usize {
        if self.keeps_sums() { THREAD_SUMS } else { self.beside() * self.block_numbers() }
    }

    /// Whether a single tile reads panel after panel, in memory order.
    fn runs_through(&self) -> bool {
        self.tiles.num_tiles == 1 && self.block_steps() >= self.part.num_steps()
    }
}

/// The memory of products, and scratch memory of the threads.
pub struct Output<'a> {
    pub values: Disjoint<'a, f32>,
    pub stride: usize,
    /// `[threads][scratch_len]`: a block's expanded multiples or, for many blocks,
    /// `[REGIONS][REGION]` sums between blocks, with a tile's sums of a panel side by side. Rows of
    /// `values` may be a power of two apart, and a cache holds only a few such rows.
    pub scratch: Disjoint<'a, f32>,
    pub scratch_len: usize,
}

/// # Safety
/// No other thread computes these panels of this product.
pub unsafe fn multiply_panels(thread: usize, product: &Product<'_>, panels: Range<usize>, out: &Output<'_>) {
    let Product { main, outliers, bias, first_column } = product;
    let job = |operand, bias, adds| Job { thread, operand, first_column: *first_column, bias, adds, out };
    // SAFETY: the caller's promise, for both.
    unsafe {
        job(main, *bias, false).run(panels.clone());
        if let Some(outliers) = outliers {
            job(outliers, None, true).run(panels);
        }
    }
}

/// A thread's work for one product.
struct Job<'a> {
    thread: usize,
    operand: &'a Operand<'a>,
    first_column: usize,
    bias: Option<&'a [f32]>,
    /// Whether results are added to the output.
    adds: bool,
    out: &'a Output<'a>,
}

impl Job<'_> {
    /// # Safety
    /// As [`multiply_panels`].
    unsafe fn run(&self, panels: Range<usize>) {
        let (operand, part) = (self.operand, self.operand.part);
        let num_tiles = operand.tiles.num_tiles;
        // One block even for an inner dimension of zero, which gives zeros or the bias.
        let starts = (0..part.num_steps().max(1)).step_by(operand.block_steps());
        part.kernel().within(|| {
            if operand.runs_through() {
                // All whole panels in memory order without a stop; an incomplete panel is separate.
                let whole = panels.end.min(part.outputs() / LANES).max(panels.start);
                for panels in [panels.start..whole, whole..panels.end] {
                    if !panels.is_empty() {
                        // SAFETY: the caller's promise.
                        unsafe { self.run_alone(panels, 0) };
                    }
                }
            } else if num_tiles == 1 {
                for panel in panels {
                    // SAFETY: the caller's promise.
                    starts.clone().for_each(|start| unsafe { self.run_alone(panel..panel + 1, start) });
                }
            } else {
                // A block of many panels comes before the next block: the rows' activations for it
                // stay in cache.
                let keeps = self.keeps_sums();
                for tiles in in_steps(0..num_tiles, if keeps { GROUP_TILES } else { num_tiles }) {
                    for panels in in_steps(panels.clone(), if keeps { REGIONS / tiles.len() } else { panels.len() }) {
                        for start in starts.clone() {
                            // SAFETY: the caller's promise.
                            unsafe { self.run_together(panels.clone(), start, tiles.clone()) };
                        }
                    }
                }
            }
        });
    }

    fn keeps_sums(&self) -> bool {
        self.operand.keeps_sums() && !self.adds
    }

    /// Runs the only tile over a block, or over several panels.
    ///
    /// # Safety
    /// As [`multiply_panels`].
    unsafe fn run_alone(&self, panels: Range<usize>, start: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.pass(panels, start, Place::default()).run(0, self.operand.tiles.tile(0)) };
    }

    /// Runs several tiles over the blocks of all panels that begin at step `start`.
    ///
    /// # Safety
    /// As [`multiply_panels`].
    unsafe fn run_together(&self, panels: Range<usize>, start: usize, tiles: Range<usize>) {
        let operand = self.operand;
        let (steps, beside, behind) = (operand.part.num_steps(), operand.beside(), start + operand.block_steps());
        let scratch = self.thread * self.out.scratch_len;
        for group in in_steps(panels.clone(), beside) {
            let mut passes = [const { None }; MAX_BESIDE];
            for (index, panel) in group.enumerate() {
                let next = match panel + beside {
                    next if next < panels.end => (next, start),
                    _ if behind < steps => (panels.start + index, behind),
                    // The block that this thread will probably compute next.
                    next => (next, 0),
                };
                let region = (panel - panels.start) * tiles.len();
                let place = Place {
                    next: Some(next).filter(|next| next.0 < operand.part.num_panels()),
                    sums: self.keeps_sums().then_some(scratch + region * REGION),
                    numbers: scratch + index * operand.block_numbers(),
                };
                // SAFETY: the caller's promise.
                passes[index] = Some(unsafe { self.pass(panel..panel + 1, start, place) });
            }
            for (index, tile) in tiles.clone().enumerate() {
                let rows = operand.tiles.tile(tile);
                for pass in passes.iter_mut().flatten() {
                    // SAFETY: the caller's promise.
                    unsafe { pass.run(index, rows.clone()) };
                }
            }
        }
    }

    /// The block of a panel that begins at step `start`, or all of several panels.
    ///
    /// # Safety
    /// As [`multiply_panels`].
    unsafe fn pass(&self, panels: Range<usize>, start: usize, place: Place) -> Pass<'_> {
        let part = self.operand.part;
        let end = part.num_steps().min(start + self.operand.block_steps());
        let (outputs, last) = (panels.start * LANES..part.outputs().min(panels.end * LANES), end == part.num_steps());
        let block = Block {
            columns: self.first_column + outputs.start..self.first_column + outputs.end,
            steps: start..end,
            resume: self.adds || start > 0,
            factors: part.factors(panels.clone()).filter(|_| last),
            bias: self.bias.map(|bias| &bias[outputs]).filter(|_| last),
            last,
            place,
            panels,
        };
        // SAFETY: the caller's promise; the block is inside the panels.
        unsafe { Pass::new(self.operand, block, self.out) }
    }
}

/// The range in pieces of `step`; the last may be shorter.
fn in_steps(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(step.max(1)).map(move |start| start..range.end.min(start + step))
}

/// The block after a block, and the memory for its sums and its expanded multiples.
#[derive(Clone, Copy, Default)]
struct Place {
    /// Panel and step of the next block, unless it follows in memory.
    next: Option<(usize, usize)>,
    /// Offset of the sums between blocks, unless they are in the output.
    sums: Option<usize>,
    /// Offset of the block's expanded multiples.
    numbers: usize,
}

/// Some steps of a panel, or all steps of several, and what to add to their products.
struct Block<'a> {
    panels: Range<usize>,
    steps: Range<usize>,
    /// Columns of the output that the block adds to.
    columns: Range<usize>,
    /// Whether sums of earlier blocks are added to.
    resume: bool,
    place: Place,
    last: bool,
    /// Only for the last block: 32 factors a panel, and one bias per column.
    factors: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

/// Tiles over one block of one panel, or one tile over several panels.
struct Pass<'a> {
    operand: &'a Operand<'a>,
    block: Block<'a>,
    out: &'a Output<'a>,
    /// The tile that ran last.
    tile: Tile,
    fetching: Fetching,
    /// Words of a row of activations, and of one of its steps.
    row_words: usize,
    step_words: usize,
}

impl<'a> Pass<'a> {
    /// # Safety
    /// As [`multiply_panels`]; the block is inside the panels' steps.
    unsafe fn new(operand: &'a Operand<'_>, block: Block<'a>, out: &'a Output<'_>) -> Self {
        let (part, kernel) = (operand.part, operand.part.kernel());
        let (packing, activations) = (kernel.packing(), kernel.activations());
        let (step_bytes, groups) = (packing.step_bytes(), packing.step_values() / activations.step_values());
        let (step_words, row_words) = (groups * activations.step_words(), activations.row_words(part.inputs()));
        let Range { start, end } = block.steps;
        let source = &part.panel(block.panels.start)[start * step_bytes..end * step_bytes];
        let next = block
            .place
            .next
            .map_or(source.as_ptr_range().end, |(panel, step)| part.panel(panel)[step * step_bytes..].as_ptr());
        let fetching = Fetching::new(source, next, kernel, &operand.tiles);
        let mut tile = Tile {
            rows: 0,
            activations: std::ptr::null(),
            panel: source.as_ptr(),
            panel_bytes: source.len(),
            panels: 1,
            steps: end - start,
            out: std::ptr::null_mut(),
            stride: out.stride,
            resume: block.resume,
            kept: std::ptr::null_mut(),
            last: block.last,
            bias: block.bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
            prefetch: fetching.of(0),
            factors: block.factors.map_or(std::ptr::null(), <[f32]>::as_ptr),
            group: activations.step_values(),
            groups,
            affine: kernel.is_affine(),
            multiples: kernel.has_multiples(),
            numbers: std::ptr::null(),
            table: kernel.table(),
        };
        let numbers = operand.block_numbers();
        if numbers > 0 {
            // SAFETY: each thread has its own scratch; the panel holds these steps.
            unsafe {
                let scratch = out.scratch.part(block.place.numbers..block.place.numbers + numbers);
                kernel.expand(&tile, scratch);
                tile.numbers = scratch.as_ptr();
            }
        }
        Self { operand, block, out, tile, fetching, row_words, step_words }
    }

    /// Runs the tile of these rows, number `index` of all that pass over the block.
    ///
    /// # Safety
    /// As [`Pass::new`].
    unsafe fn run(&mut self, index: usize, rows: Range<usize>) {
        let Self { operand, block, out, tile, .. } = self;
        let (kernel, columns) = (operand.part.kernel(), block.columns.len());
        let first_word = rows.start * self.row_words + block.steps.start * self.step_words * rows.len();
        // Open-ended: a kernel may read some way past the rows.
        let words = &operand.packed[first_word..];
        assert!(words.len() >= SLACK_WORDS);
        (tile.rows, tile.activations, tile.prefetch) = (rows.len(), words.as_ptr(), self.fetching.of(index));
        if let Some(sums) = block.place.sums {
            let start = sums + index * REGION;
            // SAFETY: each thread has its own regions.
            tile.kept = unsafe { out.scratch.part(start..start + REGION) }.as_mut_ptr();
        }
        if columns < block.panels.len() * LANES {
            // SAFETY: the caller's promise.
            return unsafe { multiply_edge(kernel, *tile, rows, block, out) };
        }
        let last = (rows.end - 1) * out.stride + block.columns.start;
        // SAFETY: the slices above hold everything that the tile reads. It writes whole panels of
        // rows inside `out` (checked by `part`), and no other thread touches these columns.
        unsafe {
            let _ = out.values.part(last..last + columns);
            tile.out = out.values.as_ptr().add(rows.start * out.stride + block.columns.start);
            tile.panels = kernel.panels(tile.rows).min(block.panels.len());
            kernel.run(tile);
            // Only a stream, whose blocks are whole panels, has more than these.
            let mut left = block.panels.len() - tile.panels;
            while left > 0 {
                *tile = tile.next();
                tile.panels = tile.panels.min(left);
                kernel.run(tile);
                left -= tile.panels;
            }
        }
    }
}

/// Runs a tile over a last panel of fewer than 32 outputs, separately from its neighbours.
///
/// # Safety
/// As [`Pass::run`]; `tile` lacks only its output address.
unsafe fn multiply_edge(kernel: &Kernel, mut tile: Tile, rows: Range<usize>, block: &Block<'_>, out: &Output<'_>) {
    let columns = block.columns.len();
    let mut sums = [[0.0; LANES]; MAX_ROWS];
    let mut bias = [0.0; LANES];
    if let Some(values) = block.bias {
        bias[..columns].copy_from_slice(values);
        tile.bias = bias.as_ptr();
    }
    // SAFETY: the caller's promise; no other thread touches these columns.
    let row = |row: usize| unsafe {
        let start = row * out.stride + block.columns.start;
        out.values.part(start..start + columns)
    };
    for (values, r) in sums.iter_mut().zip(rows.clone()) {
        values[..columns].copy_from_slice(row(r));
    }
    (tile.out, tile.stride) = (sums.as_mut_ptr().cast(), LANES);
    // SAFETY: the caller's promise, and room for 32 columns of the highest tile.
    unsafe { kernel.run(&tile) };
    for (values, r) in sums.iter().zip(rows) {
        row(r).copy_from_slice(&values[..columns]);
    }
}

/// Cache lines that each tile of a pass prefetches. A lone tile prefetches a little ahead of
/// itself; several tiles divide the next block among them, as does a lone tile of several rows with
/// its passes. For one row the AVX2 kernel decides by itself.
struct Fetching {
    /// The first tile's prefetches.
    first: Prefetch,
    /// Bytes from one tile's share to the next, and the number of shares.
    share: usize,
    count: usize,
}

impl Fetching {
    fn new(source: &[u8], next: *const u8, kernel: &Kernel, tiles: &RowTiles) -> Self {
        let (packing, ahead) = (kernel.packing(), kernel.ahead(tiles.rows));
        let lines = packing.step_bytes() / 64;
        let at = source.as_ptr();
        let (first, share, count) = match (packing, tiles.num_tiles) {
            // In whole runs, and evenly: the tiles follow one another too fast for the first to
            // prefetch all.
            (_, num_tiles) if kernel.keeps_sums() => {
                let runs = source.len().div_ceil(packing.step_bytes() * PAIR_RUN).max(1);
                let count = num_tiles.min(GROUP_TILES);
                let lines = (source.len() / 64).div_ceil(runs * count);
                let first = match (num_tiles, ahead) {
                    (1, 0) => Prefetch::near(at, 0),
                    (1, _) => Prefetch { far: false, ..Prefetch::far_units(at.wrapping_add(ahead), lines) },
                    _ => Prefetch::far_units(next, lines),
                };
                (first, runs * lines * 64, count)
            }
            // Half of a share with each of two passes. Two rows make one pass, and leave the other
            // half to the hardware.
            (_, num_tiles) if kernel.fetches_in_turn(tiles.rows) => {
                let count = num_tiles.min(MAX_SHARES);
                let share = source.len() / count;
                (Prefetch::in_turn(next, share / 2, source.len() / packing.step_bytes()), share, count)
            }
            (Packing::Coded(_), 1) => (Prefetch::following(ahead), 0, 1),
            (_, 1) => (Prefetch::near(at.wrapping_add(ahead), if ahead > 0 { lines } else { 0 }), 0, 1),
            // A step has several units.
            (Packing::Coded(_), num_tiles) => {
                let units = source.len() / packing.step_bytes() * (packing.step_values() / integer::UNIT);
                let unit_lines = (source.len() / 64).div_ceil((units * num_tiles).max(1));
                let share = units * unit_lines * 64;
                (Prefetch::far_units(next, unit_lines), share, source.len().div_ceil(share.max(1)))
            }
            _ => (Prefetch::far(next), source.len() / lines, lines),
        };
        Self { first, share, count }
    }

    fn of(&self, tile: usize) -> Prefetch {
        match tile < self.count {
            true => Prefetch { at: self.first.at.wrapping_add(tile * self.share), ..self.first },
            false => Prefetch::near(self.first.at, 0),
        }
    }
}
