//! Attention over paged storage: the same sequences in several schedules, chunk sizes and block
//! tables.
//!
//! Storage starts as NaN in every slot, and block-table entries that are completely outside a
//! window point at a NaN block: an operation that reads a forbidden slot cannot pass.

use folio_device::{
    Attention, BLOCK_TOKENS, Backend, Batch, GroupTables, HostMemory, InputLimits, KvFormat, KvShape, NormSpan,
    PrepareQkv, Span, TensorKind, cpu::Isa,
};

use crate::data::{Random, download, tensor};

#[derive(Clone, Debug)]
pub struct Case {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub format: KvFormat,
    pub window: Option<usize>,
    pub soft_cap: Option<f32>,
    pub sinks: bool,
    /// Rotated pairs.
    pub rope: Option<usize>,
    pub norm: Option<NormSpan>,
    pub lengths: Vec<usize>,
}

/// The division of the sequences into steps.
#[derive(Clone, Copy, Debug)]
pub enum Schedule {
    /// All sequences whole, in one step.
    Whole,
    /// All together, a few tokens of each per step, in reverse order; the first one moves to other
    /// blocks each step.
    Chunked(usize),
    /// One sequence after the other.
    Alone(usize),
    /// Like `Chunked`, moving through the host: each block is saved, poisoned, and loaded into
    /// another.
    Saved(usize),
    /// Like `Whole`, with one entry of a block table wrong.
    WrongBlock,
}

pub fn cases() -> Vec<Case> {
    let base = Case {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        format: KvFormat::F32,
        window: None,
        soft_cap: None,
        sinks: false,
        rope: None,
        norm: None,
        lengths: vec![33, 1, 16, 70, 5],
    };
    let mut cases = Vec::new();
    for (index, head_dim) in [32, 40, 64, 80, 96, 128, 192, 256].into_iter().enumerate() {
        let group = [1, 2, 3, 5, 8][index % 5];
        let format = KvFormat::ALL[index % 6];
        let kv_heads = 1 + index % 3;
        cases.push(Case { heads: group * kv_heads, kv_heads, head_dim, format, ..base.clone() });
        cases.push(Case {
            heads: group * kv_heads,
            kv_heads,
            head_dim,
            rope: Some(head_dim / 2),
            norm: [None, Some(NormSpan::Head), Some(NormSpan::Row)][index % 3],
            ..base.clone()
        });
    }
    for window in [1, 7, 16, 17, 40] {
        cases.push(Case { window: Some(window), ..base.clone() });
        cases.push(Case { window: Some(window), sinks: true, heads: 6, head_dim: 32, ..base.clone() });
    }
    cases.push(Case { soft_cap: Some(2.0), ..base.clone() });
    cases.push(Case { sinks: true, heads: 10, kv_heads: 2, ..base.clone() });
    cases.push(Case { soft_cap: Some(5.0), window: Some(20), sinks: true, rope: Some(9), ..base.clone() });
    for format in KvFormat::ALL {
        cases.push(Case { format, rope: Some(32), norm: Some(NormSpan::Head), ..base.clone() });
        cases.push(Case { format, window: Some(21), soft_cap: Some(4.0), sinks: true, ..base.clone() });
    }
    // Heads with a short last group of scales, and an odd one.
    for (format, head_dim) in [(KvFormat::Int4, 40), (KvFormat::Int4, 80), (KvFormat::Int4, 51), (KvFormat::Int8, 51)] {
        cases.push(Case { format, head_dim, ..base.clone() });
    }
    let long = Case { heads: 3, kv_heads: 1, head_dim: 32, lengths: vec![1100, 20], ..base.clone() };
    for format in [KvFormat::F32, KvFormat::Int8, KvFormat::Int4] {
        cases.push(Case { format, ..long.clone() });
    }
    cases.push(Case { heads: 2, kv_heads: 2, head_dim: 32, lengths: vec![1060], window: Some(1030), ..base });
    cases
}

impl Case {
    pub fn tolerance(&self) -> f32 {
        // A key that differs in its last f32 bit may round to the next stored value.
        let key_rounds_twice = self.rope.is_some() || self.norm.is_some();
        match self.format {
            _ if !key_rounds_twice => 2e-5,
            KvFormat::F32 => 2e-5,
            KvFormat::F16 | KvFormat::BF16 | KvFormat::Int8 => 1.0 / 128.0,
            KvFormat::Fp8 | KvFormat::Int4 => 1.0 / 32.0,
        }
    }

    /// The same for a device that holds activations in bf16 and multiplies attention's weights in
    /// it. Keys that were rotated or normalized are rounded a second time, to the format's own
    /// steps.
    pub fn bf16_tolerance(&self) -> f32 {
        let key_rounds_twice = self.rope.is_some() || self.norm.is_some();
        match self.format {
            KvFormat::Fp8 | KvFormat::Int4 if key_rounds_twice => 1.0 / 16.0,
            _ => 1.0 / 50.0,
        }
    }

    /// A CPU with dot products of pairs rounds queries and weights to bf16 if keys and values are
    /// bf16.
    pub fn cpu_tolerance(&self, isa: Isa) -> f32 {
        let has_pairs = self.format == KvFormat::BF16 && matches!(isa, Isa::Avx512 | Isa::Amx);
        if has_pairs { self.bf16_tolerance() } else { self.tolerance() }
    }

    /// Attention's output, then the prepared q.
    pub fn width(&self) -> usize {
        2 * self.heads * self.head_dim
    }

    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    pub fn row_values(&self, sequence: usize, position: usize) -> Vec<f32> {
        Random::new((sequence * 5000 + position) as u64).values(self.qkv_width())
    }

    pub fn prepare<'v, B: Backend>(&self, q_norm: &'v B::Vector, k_norm: &'v B::Vector) -> PrepareQkv<'v, B> {
        PrepareQkv {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            group: 0,
            rope: self.rope.map(|_| 0),
            q_norm: self.norm.map(|_| q_norm),
            k_norm: self.norm.map(|_| k_norm),
            norm_span: self.norm.unwrap_or(NormSpan::Head),
            eps: 1e-6,
        }
    }

    /// One row per token, sequence by sequence, for any schedule.
    pub fn run<B: Backend>(&self, backend: &mut B, schedule: Schedule) -> Vec<f32> {
        let mut run = Run::new(self, backend, schedule);
        let order: Vec<Vec<usize>> = match schedule {
            Schedule::Whole | Schedule::WrongBlock => vec![(0..self.lengths.len()).collect()],
            Schedule::Chunked(_) | Schedule::Saved(_) => vec![(0..self.lengths.len()).rev().collect()],
            Schedule::Alone(_) => (0..self.lengths.len()).map(|sequence| vec![sequence]).collect(),
        };
        let chunk = match schedule {
            Schedule::Whole | Schedule::WrongBlock => usize::MAX,
            Schedule::Chunked(chunk) | Schedule::Alone(chunk) | Schedule::Saved(chunk) => chunk,
        };
        for together in order {
            while together.iter().any(|&sequence| run.computed[sequence] < self.lengths[sequence]) {
                run.step(backend, &together, chunk);
                match schedule {
                    Schedule::Chunked(_) => run.relocate(backend, 0),
                    Schedule::Saved(_) => run.relocate_through_host(backend, 0),
                    _ => {}
                }
            }
        }
        run.results.concat()
    }
}

const LAYERS: usize = 2;
/// The layer under test is the second, so that accesses to the first would show.
const LAYER: usize = 1;

struct Run<'a, B: Backend> {
    case: &'a Case,
    shape: KvShape,
    kv: B::Kv,
    inputs: B::Inputs,
    inv_freq: B::Vector,
    q_norm: B::Vector,
    k_norm: B::Vector,
    sinks: B::Vector,
    tables: Vec<Vec<u32>>,
    /// Unused blocks, as many as the first sequence has.
    spare: Vec<u32>,
    /// A block that is never written.
    poison: u32,
    computed: Vec<usize>,
    results: Vec<Vec<f32>>,
}

impl<'a, B: Backend> Run<'a, B> {
    fn new(case: &'a Case, backend: &mut B, schedule: Schedule) -> Self {
        let need: Vec<usize> = case.lengths.iter().map(|length| length.div_ceil(BLOCK_TOKENS)).collect();
        let blocks = need.iter().sum::<usize>() + need[0] + 1;
        let mut order: Vec<u32> = (0..blocks as u32).collect();
        Random::new(format!("{schedule:?}").bytes().map(u64::from).sum()).shuffle(&mut order);
        let mut order = order.into_iter();
        let mut tables: Vec<Vec<u32>> = need.iter().map(|&need| order.by_ref().take(need).collect()).collect();
        let spare = order.by_ref().take(need[0]).collect();
        let poison = order.next().unwrap();
        if matches!(schedule, Schedule::WrongBlock) {
            tables[3][1] = tables[0][0];
        }
        let rows = case.lengths.iter().sum::<usize>().max(blocks * BLOCK_TOKENS);
        let limits = InputLimits {
            rows,
            spans: case.lengths.len(),
            outputs: 1,
            table_entries: blocks,
            groups: 1,
            ropes: 1,
            rope_pairs: case.head_dim / 2,
        };
        let shape =
            KvShape { layers: LAYERS, blocks, kv_heads: case.kv_heads, head_dim: case.head_dim, format: case.format };
        let pairs = case.rope.unwrap_or(1);
        let inv_freq: Vec<f32> = (0..pairs).map(|i| 500f32.powf(-(i as f32) / pairs as f32)).collect();
        let norm_width = |heads| if case.norm == Some(NormSpan::Row) { heads * case.head_dim } else { case.head_dim };
        let mut random = Random::new(99);
        let mut run = Self {
            case,
            shape,
            kv: backend.kv(shape).unwrap(),
            inputs: backend.inputs(limits).unwrap(),
            inv_freq: backend.vector(&inv_freq).unwrap(),
            q_norm: backend.vector(&random.values(norm_width(case.heads))).unwrap(),
            k_norm: backend.vector(&random.values(norm_width(case.kv_heads))).unwrap(),
            sinks: backend.vector(&random.values(case.heads)).unwrap(),
            tables,
            spare,
            poison,
            computed: vec![0; case.lengths.len()],
            results: case.lengths.iter().map(|length| vec![f32::NAN; length * case.width()]).collect(),
        };
        run.poison_all(backend, blocks);
        run
    }

    fn poison_all(&mut self, backend: &mut B, blocks: usize) {
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
        let values = vec![f32::NAN; rows as usize * self.case.qkv_width()];
        let mut qkv = tensor(backend, self.case.qkv_width(), &values, TensorKind::Activation);
        let plain = Case { rope: None, norm: None, ..self.case.clone() };
        for layer in 0..LAYERS {
            let op = plain.prepare::<B>(&self.q_norm, &self.k_norm);
            backend.prepare_qkv(&mut qkv, &mut self.kv, layer, op, &self.inputs);
        }
    }

    /// The next tokens of each sequence: its number, its first position and how many.
    fn assign(&self, together: &[usize], chunk: usize) -> Vec<(usize, usize, usize)> {
        let assign = |&sequence: &usize| {
            let first = self.computed[sequence];
            (sequence, first, chunk.min(self.case.lengths[sequence] - first))
        };
        together.iter().map(assign).filter(|(.., count)| *count > 0).collect()
    }

    fn batch(&self, assigned: &[(usize, usize, usize)]) -> Batch {
        let mut batch = Batch { groups: vec![GroupTables::default()], ..Batch::default() };
        for &(sequence, first, count) in assigned {
            let context = (first + count) as u32;
            batch.spans.push(Span { first_row: batch.num_rows() as u32, num_rows: count as u32, context });
            let (table, tables) = (&self.tables[sequence], &mut batch.groups[0]);
            tables.first_block.push(tables.blocks.len() as u32);
            for (index, &block) in table.iter().enumerate().take((first + count).div_ceil(BLOCK_TOKENS)) {
                let seen_from = self.case.window.map_or(0, |window| (first + 1).saturating_sub(window));
                let unseen = (index + 1) * BLOCK_TOKENS <= seen_from;
                tables.blocks.push(if unseen { self.poison } else { block });
            }
            for position in first..first + count {
                batch.tokens.push(0);
                batch.positions.push(position as u32);
                let slot = table[position / BLOCK_TOKENS] as usize * BLOCK_TOKENS + position % BLOCK_TOKENS;
                tables.slots.push(slot as u32);
            }
        }
        batch
    }

    fn step(&mut self, backend: &mut B, together: &[usize], chunk: usize) {
        let case = self.case;
        let assigned = self.assign(together, chunk);
        let batch = self.batch(&assigned);
        let rows = batch.num_rows();
        let places: Vec<(usize, usize)> = assigned
            .iter()
            .flat_map(|&(sequence, first, count)| (first..first + count).map(move |position| (sequence, position)))
            .collect();
        let values: Vec<f32> =
            places.iter().flat_map(|&(sequence, position)| case.row_values(sequence, position)).collect();
        let mut qkv = tensor(backend, case.qkv_width(), &values, TensorKind::Activation);
        let mut out = backend.tensor(rows, case.heads * case.head_dim, TensorKind::Activation).unwrap();

        backend.upload(&mut self.inputs, &batch);
        backend.rope_angles(&mut self.inputs, 0, &self.inv_freq, 1.1);
        // Borrows the storage separately from the vectors of the operation.
        let Self { kv, inputs, q_norm, k_norm, sinks, .. } = self;
        backend.prepare_qkv(&mut qkv, kv, LAYER, case.prepare::<B>(q_norm, k_norm), inputs);
        let attention = Attention {
            heads: case.heads,
            kv_heads: case.kv_heads,
            head_dim: case.head_dim,
            group: 0,
            // Scores of deviation 2.
            scale: 2.0 / (case.head_dim as f32).sqrt(),
            window: case.window,
            soft_cap: case.soft_cap,
            sinks: case.sinks.then_some(&*sinks),
        };
        backend.attention(&mut out, &qkv, kv, LAYER, attention, inputs);

        let (out, qkv) = (download(backend, &out, rows), download(backend, &qkv, rows));
        let width = case.heads * case.head_dim;
        for (row, (sequence, position)) in places.into_iter().enumerate() {
            let to = &mut self.results[sequence][position * 2 * width..(position + 1) * 2 * width];
            to[..width].copy_from_slice(&out[row * width..(row + 1) * width]);
            to[width..].copy_from_slice(&qkv[row * case.qkv_width()..][..width]);
        }
        for (sequence, _, count) in assigned {
            self.computed[sequence] += count;
        }
    }

    /// Moves a sequence to the spare blocks.
    fn relocate(&mut self, backend: &mut B, sequence: usize) {
        let pairs: Vec<(u32, u32)> = self.tables[sequence].iter().copied().zip(self.spare.iter().copied()).collect();
        backend.copy_blocks(&mut self.kv, &pairs);
        std::mem::swap(&mut self.tables[sequence], &mut self.spare);
    }

    /// The same through the host. The old blocks are poisoned before the new ones are filled, and
    /// every other block must stay unchanged.
    fn relocate_through_host(&mut self, backend: &mut B, sequence: usize) {
        let shape = self.shape;
        let save = |kv: &B::Kv, backend: &mut B, block: u32| {
            let mut bytes = vec![0xa5; shape.block_bytes() as usize];
            backend.save_block(kv, block, &mut bytes);
            bytes
        };
        let old = self.tables[sequence].clone();
        let poison = save(&self.kv, backend, self.poison);
        let others: Vec<u32> =
            (0..shape.blocks as u32).filter(|b| !old.contains(b) && !self.spare.contains(b)).collect();
        let before: Vec<Vec<u8>> = others.iter().map(|&block| save(&self.kv, backend, block)).collect();
        // Saves and loads run in the background, in order, if the device supports that.
        let room = || Box::new(vec![0xa5; shape.block_bytes() as usize]);
        let saving: Vec<_> = old.iter().map(|&block| backend.start_save(&self.kv, block, room())).collect();
        let poisoning = old.iter().map(|&block| backend.start_load(&mut self.kv, block, Box::new(poison.clone())));
        let poisoning: Vec<_> = poisoning.collect();
        let mut end = |memory: Option<Box<dyn HostMemory>>| memory.unwrap_or_else(|| backend.moved()).to_vec();
        let saved: Vec<Vec<u8>> = saving.into_iter().map(&mut end).collect();
        poisoning.into_iter().for_each(|memory| assert_eq!(end(memory), poison));
        for (index, (&block, bytes)) in self.spare.iter().zip(&saved).enumerate() {
            match index % 2 {
                0 => backend.load_block(&mut self.kv, block, bytes),
                _ => drop(
                    backend.start_load(&mut self.kv, block, Box::new(bytes.clone())).or_else(|| Some(backend.moved())),
                ),
            }
        }
        for (block, bytes) in self.spare.iter().zip(&saved).chain(others.iter().zip(&before)) {
            assert!(&save(&self.kv, backend, *block) == bytes, "block {block} is not what was loaded or left there");
        }
        std::mem::swap(&mut self.tables[sequence], &mut self.spare);
    }
}
