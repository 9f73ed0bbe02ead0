//! Draft trees: every row against a chain that holds its path and nothing else, bit for bit; and an
//! accepted path, copied to the chain's slots, against that chain.
//!
//! Storage starts as NaN in every slot, and each step has other sequences beside the tested one.

use folio_device::{
    Attention, BLOCK_TOKENS, Backend, Batch, GroupTables, InputLimits, KvFormat, KvShape, NormSpan, Span, TensorKind,
    tree,
};

use crate::data::{Random, download, tensor};
use crate::{paged, same};

#[derive(Clone, Debug)]
pub struct Case {
    pub shape: paged::Case,
    /// Tokens before the tree.
    prefix: usize,
    rows: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Random,
    /// Several roots, and parents that are the latest row or a much earlier one.
    Forest,
    Chain,
    /// All rows are children of the first.
    Star,
}

pub fn cases() -> Vec<Case> {
    let base = paged::cases().remove(0);
    let base = paged::Case { heads: 4, kv_heads: 2, head_dim: 64, format: KvFormat::F32, lengths: Vec::new(), ..base };
    let with = |shape: paged::Case, prefix, rows, kind| Case { shape, prefix, rows, kind };
    let mut cases = Vec::new();
    for (index, prefix) in [0, 5, 16, 31, 60, 250, 300].into_iter().enumerate() {
        let kind = [Kind::Random, Kind::Chain, Kind::Forest, Kind::Star][index % 4];
        let rows = [1, 7, 64, 20, 33, 12, 64][index];
        cases.push(with(paged::Case { rope: Some(32), ..base.clone() }, prefix, rows, kind));
        let bounded = paged::Case { window: Some([1, 3, 16, 40][index % 4]), sinks: index % 2 == 0, ..base.clone() };
        cases.push(with(bounded, prefix, rows, Kind::Random));
    }
    for (index, format) in KvFormat::ALL.into_iter().enumerate() {
        let prefix = [45, 19, 33, 250, 70, 8][index];
        let normed = paged::Case { format, rope: Some(20), norm: Some(NormSpan::Head), head_dim: 128, ..base.clone() };
        cases.push(with(normed, prefix, 24, Kind::Random));
        let bounded = paged::Case {
            format,
            window: Some(21),
            soft_cap: Some(4.0),
            sinks: true,
            heads: 6,
            head_dim: [80, 51][index % 2],
            ..base.clone()
        };
        cases.push(with(bounded, prefix, 40, Kind::Forest));
    }
    // Formats for matrix instructions in the other head sizes; and groups larger than one of their
    // tiles.
    for (format, head_dim) in [(KvFormat::BF16, 64), (KvFormat::BF16, 256), (KvFormat::Fp8, 64), (KvFormat::Int8, 192)]
    {
        let grouped = paged::Case { format, head_dim, heads: 20, kv_heads: 1, ..base.clone() };
        cases.push(with(grouped, 240, 18, Kind::Random));
    }
    // Across the border of two splits, the CPU's included.
    let long = paged::Case { heads: 3, kv_heads: 1, head_dim: 32, ..base.clone() };
    cases.push(with(long.clone(), 1000, 64, Kind::Chain));
    cases.push(with(paged::Case { format: KvFormat::BF16, ..long.clone() }, 1020, 30, Kind::Random));
    cases.push(with(paged::Case { window: Some(300), format: KvFormat::Int8, ..long }, 1010, 40, Kind::Random));
    cases
}

impl Case {
    fn parents(&self) -> Vec<Option<usize>> {
        let mut random = Random::new((self.prefix * 100 + self.rows) as u64);
        let mut parent = |row: usize| match self.kind {
            _ if row == 0 => None,
            Kind::Random => Some(random.below(row)),
            Kind::Forest if random.below(4) == 0 => None,
            Kind::Forest => Some(if random.below(2) == 0 { row - 1 } else { random.below(row) }),
            Kind::Chain => Some(row - 1),
            Kind::Star => Some(0),
        };
        (0..self.rows).map(&mut parent).collect()
    }

    /// The values that must be equal, and the tree's rows.
    pub fn run<B: Backend>(&self, backend: &mut B) -> Vec<f32> {
        let words = tree::ancestors(&self.parents());
        let mut rig = Rig::new(self, backend);
        let prefix: Vec<Row> = (0..self.prefix).map(|at| Row { values: (0, at), place: at, position: at }).collect();
        if !prefix.is_empty() {
            rig.step(backend, &prefix, &[]);
        }
        let rows: Vec<Row> = (0..self.rows).map(|row| rig.row(row, words[row])).collect();
        let found = rig.step(backend, &rows, &words);
        // As a tree that grows, in three steps: the same bits.
        let cuts = [0, self.rows / 3, (self.rows / 3 + 1).min(self.rows), self.rows];
        let mut grown = Vec::new();
        for range in cuts.windows(2).map(|pair| pair[0]..pair[1]).filter(|range| !range.is_empty()) {
            grown.extend(rig.step(backend, &rows[range.clone()], &words[range]));
        }
        same(&grown, &found, rig.width()).unwrap_or_else(|why| panic!("a tree that grows and one at once: {why}"));
        // One leaf is accepted, and the sequence continues behind it.
        let leaf = words.iter().copied().max_by_key(|word| (word.count_ones(), *word)).unwrap();
        let pairs: Vec<(u32, u32)> =
            tree::moves(self.prefix, leaf).map(|(from, to)| (rig.slot(from), rig.slot(to))).collect();
        backend.move_tokens(&mut rig.kv, &pairs);
        let next = self.prefix + leaf.count_ones() as usize;
        let next = [Row { values: (4, 0), place: next, position: next }];
        let behind = rig.step(backend, &next, &[]);

        let width = rig.width();
        let is_inner = |word: u64| words.iter().any(|&other| other != word && other & word == word);
        for &end in words.iter().filter(|&&word| !is_inner(word)) {
            for (depth, row) in tree::path(end).enumerate() {
                let place = self.prefix + depth;
                let alone = rig.step(backend, &[Row { values: (1, row), place, position: place }], &[]);
                same(&found[row * width..(row + 1) * width], &alone, width)
                    .unwrap_or_else(|why| panic!("row {row} at depth {depth} of a tree and of a chain: {why}"));
            }
            if end == leaf {
                let alone = rig.step(backend, &next, &[]);
                same(&behind, &alone, width).unwrap_or_else(|why| panic!("behind a moved path: {why}"));
            }
        }
        found
    }

    /// Number of values in a row of the result.
    pub fn width(&self) -> usize {
        2 * LAYERS * self.shape.heads * self.shape.head_dim
    }
}

const LAYERS: usize = 2;
/// Lengths of the other sequences and their rows in the step: a chunk, and one token.
const BESIDE: [(usize, usize); 2] = [(17, 3), (270, 1)];

/// A row: a key that determines its values, its index in storage, and its position.
#[derive(Clone, Copy)]
struct Row {
    values: (usize, usize),
    place: usize,
    position: usize,
}

struct Rig<'a, B: Backend> {
    case: &'a Case,
    kv: B::Kv,
    inputs: B::Inputs,
    inv_freq: B::Vector,
    q_norm: B::Vector,
    k_norm: B::Vector,
    sinks: B::Vector,
    /// Tables of the sequence, and of the other sequences.
    tables: Vec<Vec<u32>>,
    poison: u32,
}

impl<'a, B: Backend> Rig<'a, B> {
    fn new(case: &'a Case, backend: &mut B) -> Self {
        let shape = &case.shape;
        let lengths = [case.prefix + case.rows + 1, BESIDE[0].0, BESIDE[1].0];
        let need = lengths.map(|length| length.div_ceil(BLOCK_TOKENS));
        let blocks = need.iter().sum::<usize>() + 1;
        let mut order: Vec<u32> = (0..blocks as u32).collect();
        Random::new(3).shuffle(&mut order);
        let mut order = order.into_iter();
        let tables = need.iter().map(|&need| order.by_ref().take(need).collect()).collect();
        let limits = InputLimits {
            rows: blocks * BLOCK_TOKENS,
            spans: case.rows + 3,
            outputs: 1,
            table_entries: case.rows * need[0] + blocks,
            groups: 1,
            ropes: 1,
            rope_pairs: shape.head_dim / 2,
        };
        let (kv_heads, head_dim, format) = (shape.kv_heads, shape.head_dim, shape.format);
        let pairs = shape.rope.unwrap_or(1);
        let inv_freq: Vec<f32> = (0..pairs).map(|i| 500f32.powf(-(i as f32) / pairs as f32)).collect();
        let mut random = Random::new(99);
        let mut rig = Self {
            case,
            kv: backend.kv(KvShape { layers: LAYERS, blocks, kv_heads, head_dim, format }).unwrap(),
            inputs: backend.inputs(limits).unwrap(),
            inv_freq: backend.vector(&inv_freq).unwrap(),
            q_norm: backend.vector(&random.values(head_dim)).unwrap(),
            k_norm: backend.vector(&random.values(head_dim)).unwrap(),
            sinks: backend.vector(&random.values(shape.heads)).unwrap(),
            tables,
            poison: order.next().unwrap(),
        };
        rig.fill(backend, blocks);
        rig
    }

    fn width(&self) -> usize {
        self.case.width()
    }

    fn row(&self, row: usize, word: u64) -> Row {
        let prefix = self.case.prefix;
        Row { values: (1, row), place: prefix + row, position: prefix + word.count_ones() as usize - 1 }
    }

    fn slot(&self, place: usize) -> u32 {
        self.tables[0][place / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (place % BLOCK_TOKENS) as u32
    }

    /// Fills the storage with NaN, except for the other sequences' slots.
    fn fill(&mut self, backend: &mut B, blocks: usize) {
        let rows = (blocks * BLOCK_TOKENS) as u32;
        let batch = Batch {
            tokens: vec![0; rows as usize],
            positions: (0..rows).collect(),
            spans: vec![Span { first_row: 0, num_rows: rows, context: rows }],
            ancestors: Vec::new(),
            groups: vec![GroupTables {
                slots: (0..rows).collect(),
                blocks: (0..blocks as u32).collect(),
                first_block: vec![0],
            }],
            outputs: Vec::new(),
        };
        backend.upload(&mut self.inputs, &batch);
        let shape = &self.case.shape;
        let values: Vec<f32> = (0..rows)
            .flat_map(|slot| match self.tables[1..].iter().any(|table| table.contains(&(slot / 16))) {
                true => shape.row_values(2, slot as usize),
                false => vec![f32::NAN; shape.qkv_width()],
            })
            .collect();
        let plain = paged::Case { rope: None, norm: None, ..shape.clone() };
        for layer in 0..LAYERS {
            let mut qkv = tensor(backend, shape.qkv_width(), &values, TensorKind::Activation);
            let op = plain.prepare::<B>(&self.q_norm, &self.k_norm);
            backend.prepare_qkv(&mut qkv, &mut self.kv, layer, op, &self.inputs);
        }
    }

    /// Rows of the sequence, a tree if there are words, between rows of the other sequences.
    fn batch(&self, rows: &[Row], words: &[u64]) -> Batch {
        let mut batch = Batch { groups: vec![GroupTables::default()], ..Batch::default() };
        let mut push = |sequence: usize, places: &[(usize, usize)]| {
            let context = places[places.len() - 1].0 + 1;
            let first = places.iter().map(|&(_, position)| position).min().unwrap();
            let first_row = batch.num_rows() as u32;
            batch.spans.push(Span { first_row, num_rows: places.len() as u32, context: context as u32 });
            let (table, tables) = (&self.tables[sequence], &mut batch.groups[0]);
            tables.first_block.push(tables.blocks.len() as u32);
            let seen_from = self.case.shape.window.map_or(0, |window| (first + 1).saturating_sub(window));
            let entries = table.iter().enumerate().take(context.div_ceil(BLOCK_TOKENS));
            tables.blocks.extend(entries.map(|(index, &block)| {
                let is_unseen = (index + 1) * BLOCK_TOKENS <= seen_from;
                if is_unseen { self.poison } else { block }
            }));
            for &(place, position) in places {
                batch.tokens.push(0);
                batch.positions.push(position as u32);
                tables.slots.push(table[place / BLOCK_TOKENS] * 16 + (place % BLOCK_TOKENS) as u32);
            }
        };
        let beside = |number: usize| -> Vec<(usize, usize)> {
            let (length, rows) = BESIDE[number];
            (length - rows..length).map(|place| (place, place)).collect()
        };
        push(1, &beside(0));
        push(0, &rows.iter().map(|row| (row.place, row.position)).collect::<Vec<_>>());
        push(2, &beside(1));
        if !words.is_empty() {
            batch.ancestors = [&[0; BESIDE[0].1], words, &[0; BESIDE[1].1]].concat();
        }
        batch
    }

    /// Attention's output and q of the sequence's rows, layer by layer.
    fn step(&mut self, backend: &mut B, rows: &[Row], words: &[u64]) -> Vec<f32> {
        let shape = &self.case.shape;
        let batch = self.batch(rows, words);
        let (before, behind) = ((0..BESIDE[0].1).map(|row| (3, row)), (0..BESIDE[1].1).map(|row| (5, row)));
        let sources = before.chain(rows.iter().map(|row| row.values)).chain(behind);
        let values: Vec<f32> = sources.flat_map(|(sequence, at)| shape.row_values(sequence, at)).collect();
        backend.upload(&mut self.inputs, &batch);
        backend.rope_angles(&mut self.inputs, 0, &self.inv_freq, 1.1);
        let width = shape.heads * shape.head_dim;
        let mut found = vec![f32::NAN; rows.len() * self.case.width()];
        for layer in 0..LAYERS {
            let values: Vec<f32> = values.iter().map(|value| value * (1.0 + 0.25 * layer as f32)).collect();
            let mut qkv = tensor(backend, shape.qkv_width(), &values, TensorKind::Activation);
            let mut out = backend.tensor(batch.num_rows(), width, TensorKind::Activation).unwrap();
            let Self { kv, inputs, q_norm, k_norm, sinks, .. } = self;
            backend.prepare_qkv(&mut qkv, kv, layer, shape.prepare::<B>(q_norm, k_norm), inputs);
            let attention = Attention {
                heads: shape.heads,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                group: 0,
                scale: 2.0 / (shape.head_dim as f32).sqrt(),
                window: shape.window,
                soft_cap: shape.soft_cap,
                sinks: shape.sinks.then_some(&*sinks),
            };
            backend.attention(&mut out, &qkv, kv, layer, attention, inputs);
            let num_rows = batch.num_rows();
            let (out, qkv) = (download(backend, &out, num_rows), download(backend, &qkv, num_rows));
            for row in 0..rows.len() {
                let to = &mut found[row * self.case.width() + layer * 2 * width..][..2 * width];
                let from = BESIDE[0].1 + row;
                to[..width].copy_from_slice(&out[from * width..][..width]);
                to[width..].copy_from_slice(&qkv[from * shape.qkv_width()..][..width]);
            }
        }
        found
    }
}
