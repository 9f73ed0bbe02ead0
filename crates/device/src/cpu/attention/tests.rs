//! Attention against plain loops in f64, and against itself: alone or beside others, whole or in
//! chunks, on any number of threads, the bits are the same. Every slot that no token was written to
//! holds NaN throughout.

use half::bf16;

use super::*;
use crate::cpu::qkv::prepare_qkv;
use crate::cpu::simd::testing::{close, each_setup, filled, tensor, vector};
use crate::cpu::{Isa, Pool, Vector, inputs};
use crate::reference::codes;
use crate::{Batch, GroupTables, InputLimits, KvFormat, KvShape, NormSpan, PrepareQkv, Span};

#[derive(Clone, Copy, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    format: KvFormat,
    window: Option<usize>,
    soft_cap: Option<f32>,
    sinks: bool,
}

const PLAIN: Case =
    Case { heads: 4, kv_heads: 2, head_dim: 16, format: KvFormat::F32, window: None, soft_cap: None, sinks: false };

impl Case {
    fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn scale(&self) -> f32 {
        1.3 / (self.head_dim as f32).sqrt()
    }

    fn sinks(&self) -> Option<Vec<f32>> {
        self.sinks.then(|| (0..self.heads).map(|head| head as f32 - 1.0).collect())
    }

    /// Rows `[q | k | v]` of a sequence; scores have a standard deviation of a few units.
    fn rows(&self, tokens: usize, seed: u64) -> Vec<f32> {
        filled(tokens * self.width(), seed).iter().map(|value| value * 3.0).collect()
    }

    /// Whether products are computed in pairs, with queries and weights in bf16.
    fn paired(&self, isa: Isa) -> bool {
        self.format == KvFormat::BF16 && matches!(isa, Isa::Avx512 | Isa::Amx)
    }

    /// One head, stored and read back.
    fn stored(&self, head: &[f32]) -> Vec<f64> {
        let mut bytes = vec![0; self.format.head_bytes(head.len())];
        codes::encode(self.format, head, &mut bytes);
        codes::decode(self.format, head.len(), &bytes)
    }

    /// Plain loops in two passes; queries are rounded as they are for pairs, weights are not.
    fn expected(&self, rows: &[f32], paired: bool) -> Vec<f32> {
        let (dim, width) = (self.head_dim, self.width());
        // Queries are stored too, but not read.
        let stored: Vec<Vec<f64>> = rows.chunks_exact(dim).map(|head| self.stored(head)).collect();
        let mut out = Vec::new();
        for position in 0..rows.len() / width {
            let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
            for head in 0..self.heads {
                let kv_head = head / (self.heads / self.kv_heads);
                let key_at = |token: usize| token * (width / dim) + self.heads + kv_head;
                let value_at = |token: usize| key_at(token) + self.kv_heads;
                let query = rows[position * width + head * dim..][..dim].iter().map(|value| {
                    let scaled = bf16::from_f32(value * (self.scale() * std::f32::consts::LOG2_E));
                    let exactly = f64::from(*value) * f64::from(self.scale());
                    if paired { scaled.to_f64() * std::f64::consts::LN_2 } else { exactly }
                });
                let query: Vec<f64> = query.collect();
                let mut weights: Vec<f64> = (first..=position)
                    .map(|token| {
                        let key = &stored[key_at(token)];
                        let score: f64 = query.iter().zip(key).map(|(&q, &k)| q * k).sum();
                        self.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                    })
                    .collect();
                let sink = self.sinks().map(|sinks| f64::from(sinks[head]));
                let largest = weights.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                weights.iter_mut().for_each(|weight| *weight = (*weight - largest).exp());
                let sum = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
                out.extend((0..dim).map(|i| {
                    let terms = weights.iter().zip(first..).map(|(w, token)| w * stored[value_at(token)][i]);
                    (terms.sum::<f64>() / sum) as f32
                }));
            }
        }
        out
    }
}

/// Sequences that go through steps together, each with a given number of tokens a step.
struct Steps<'a> {
    case: Case,
    sequences: &'a [Vec<f32>],
    /// Blocks of the sequences' tables, in the order of the pool.
    shuffle: usize,
}

impl Steps<'_> {
    /// Block `entry` of sequence `index`: scattered over the pool, every third block unused.
    fn block(&self, index: usize, entry: usize, blocks: usize) -> u32 {
        let number = entry * self.sequences.len() + index;
        ((number * self.shuffle) % (blocks / 3) * 3) as u32
    }

    /// Outputs of every sequence when `chunks[i]` of its tokens go into a step.
    fn run(&self, ctx: Ctx<'_>, chunks: &[usize]) -> Vec<Vec<f32>> {
        let (case, width) = (self.case, self.case.width());
        let lengths: Vec<usize> = self.sequences.iter().map(|rows| rows.len() / width).collect();
        let longest = lengths.iter().max().unwrap().div_ceil(BLOCK_TOKENS);
        let blocks = 3 * (longest * lengths.len() + 1).next_power_of_two();
        let shape =
            KvShape { layers: 2, blocks, kv_heads: case.kv_heads, head_dim: case.head_dim, format: case.format };
        let mut kv = Kv::new(shape).unwrap();
        (0..blocks).for_each(|block| kv.poison(block));
        let rows: usize = chunks.iter().sum();
        let limits =
            InputLimits { rows, spans: 8, outputs: 1, table_entries: blocks, groups: 1, ropes: 0, rope_pairs: 0 };
        let mut inputs = Inputs::new(limits).unwrap();
        let mut outputs = vec![Vec::new(); lengths.len()];
        let mut done = vec![0; lengths.len()];
        while done != lengths {
            let mut batch = Batch { groups: vec![GroupTables::default()], ..Batch::default() };
            let mut values = Vec::new();
            let mut taken = Vec::new();
            for (index, sequence) in self.sequences.iter().enumerate() {
                let count = chunks[index].min(lengths[index] - done[index]);
                if count == 0 {
                    continue;
                }
                let (start, end) = (done[index], done[index] + count);
                taken.push((index, count));
                let tables = &mut batch.groups[0];
                tables.first_block.push(tables.blocks.len() as u32);
                tables.blocks.extend((0..end.div_ceil(BLOCK_TOKENS)).map(|entry| self.block(index, entry, blocks)));
                batch.spans.push(Span {
                    first_row: batch.tokens.len() as u32,
                    num_rows: count as u32,
                    context: end as u32,
                });
                for position in start..end {
                    batch.tokens.push(0);
                    batch.positions.push(position as u32);
                    let block = self.block(index, position / BLOCK_TOKENS, blocks);
                    tables.slots.push(block * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32);
                }
                values.extend_from_slice(&sequence[start * width..end * width]);
                done[index] = end;
            }
            let rows = batch.num_rows();
            inputs::upload(ctx, &mut inputs, &batch);
            let mut qkv = tensor(rows, width, &values);
            let prepare = PrepareQkv {
                heads: case.heads,
                kv_heads: case.kv_heads,
                head_dim: case.head_dim,
                group: 0,
                rope: None,
                q_norm: None,
                k_norm: None,
                norm_span: NormSpan::Head,
                eps: 1e-6,
            };
            prepare_qkv(ctx, &mut qkv, &mut kv, 1, &prepare, &inputs);
            let out_width = case.heads * case.head_dim;
            let mut out = tensor(rows, out_width, &vec![f32::NAN; rows * out_width]);
            let sinks: Option<Vector> = case.sinks().map(|sinks| vector(&sinks));
            let op = Attention {
                heads: case.heads,
                kv_heads: case.kv_heads,
                head_dim: case.head_dim,
                group: 0,
                scale: case.scale(),
                window: case.window,
                soft_cap: case.soft_cap,
                sinks: sinks.as_ref(),
            };
            attention(ctx, &mut out, &qkv, &kv, 1, &op, &inputs);
            let mut row = 0;
            for (index, count) in taken {
                outputs[index].extend_from_slice(&out.head(rows)[row * out_width..(row + count) * out_width]);
                row += count;
            }
        }
        outputs
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Compares one sequence, computed whole, with plain loops, and then with itself in other company,
/// chunks and blocks.
fn check(case: Case, tokens: usize, chunks: &[usize]) {
    let rows = case.rows(tokens, 1);
    let expected = [false, true].map(|paired| case.expected(&rows, paired));
    let alone = [rows.clone()];
    let together = [case.rows(37, 2), rows, case.rows(5, 3)];
    each_setup(|ctx| {
        let whole = Steps { case, sequences: &alone, shuffle: 1 }.run(ctx, &[tokens]).remove(0);
        let paired = case.paired(ctx.isa);
        // A weight that is rounded to eight bits is wrong by at most 2^-8 of itself, and values go
        // up to 3.
        close(&whole, &expected[usize::from(paired)], if paired { 3.0 / 256.0 } else { 2e-5 });
        for &chunk in chunks {
            let parts = Steps { case, sequences: &alone, shuffle: 5 }.run(ctx, &[chunk]).remove(0);
            assert!(bits(&parts) == bits(&whole), "{case:?}: chunks of {chunk} change the result under {:?}", ctx.isa);
            let others = Steps { case, sequences: &together, shuffle: 7 }.run(ctx, &[3, chunk, 1]).remove(1);
            assert!(bits(&others) == bits(&whole), "{case:?}: company changes the result under {:?}", ctx.isa);
        }
        bits(&whole)
    });
}

#[test]
fn head_shapes_and_formats() {
    for (heads, kv_heads, head_dim, format) in [
        (4, 4, 64, KvFormat::F32),
        (6, 2, 24, KvFormat::BF16),
        (7, 1, 80, KvFormat::F16),
        (14, 2, 40, KvFormat::F32),
        (5, 5, 8, KvFormat::BF16),
        (70, 1, 8, KvFormat::F16),
        (4, 2, 7, KvFormat::F16),
        (3, 1, 33, KvFormat::BF16),
        (2, 2, 1, KvFormat::F32),
        (2, 1, 256, KvFormat::F32),
    ] {
        check(Case { heads, kv_heads, head_dim, format, ..PLAIN }, 83, &[13]);
    }
}

#[test]
fn coded_formats_at_every_head_shape() {
    for format in [KvFormat::Fp8, KvFormat::Int8, KvFormat::Int4] {
        for (heads, kv_heads, head_dim) in
            [(4, 2, 64), (6, 2, 24), (7, 1, 80), (4, 2, 7), (3, 1, 33), (2, 2, 1), (9, 1, 49)]
        {
            check(Case { heads, kv_heads, head_dim, format, ..PLAIN }, 83, &[13]);
        }
        let bounded = Case { window: Some(21), soft_cap: Some(3.0), sinks: true, head_dim: 40, format, ..PLAIN };
        check(bounded, 70, &[1, 17]);
        check(Case { heads: 2, kv_heads: 1, head_dim: 8, window: Some(600), format, ..PLAIN }, SPLIT + 60, &[217]);
    }
}

#[test]
fn windows_caps_and_sinks() {
    for window in [None, Some(1), Some(5), Some(16), Some(70)] {
        for (soft_cap, sinks) in [(None, false), (Some(2.0), false), (None, true), (Some(5.0), true)] {
            let chunks: &[usize] = if sinks { &[17] } else { &[29] };
            check(Case { window, soft_cap, sinks, ..PLAIN }, 101, chunks);
        }
    }
}

#[test]
fn one_token_at_a_time() {
    for (window, soft_cap) in [(None, None), (Some(20), Some(3.0))] {
        check(Case { window, soft_cap, ..PLAIN }, 70, &[1]);
    }
}

#[test]
fn long_contexts_are_split_by_position() {
    for (window, sinks) in [(None, false), (Some(600), true), (Some(40), false)] {
        let case = Case { heads: 2, kv_heads: 1, head_dim: 8, window, sinks, ..PLAIN };
        check(case, SPLIT + 100, &[217]);
    }
}

/// The range of tokens that a row sees ends inside a pair; the other half is NaN until it is
/// written.
#[test]
fn pairs_that_are_seen_in_part() {
    let format = KvFormat::BF16;
    for window in [None, Some(1), Some(2), Some(5), Some(16), Some(70)] {
        check(Case { window, format, ..PLAIN }, 101, &[1, 17]);
        check(Case { heads: 8, window, soft_cap: Some(3.0), sinks: true, format, head_dim: 35, ..PLAIN }, 90, &[29]);
    }
    for window in [None, Some(601)] {
        check(Case { heads: 2, kv_heads: 1, head_dim: 8, window, format, ..PLAIN }, SPLIT + 101, &[217]);
    }
}

/// A sequence with keys or values that are not finite harms itself and no other sequence.
#[test]
fn what_is_not_a_number_stays_where_it_is() {
    for format in KvFormat::ALL {
        let case = Case { format, head_dim: 40, ..PLAIN };
        let good = case.rows(45, 1);
        let mut bad = case.rows(45, 2);
        // The first key of token 20, and a value of token 30.
        bad[20 * case.width() + case.heads * case.head_dim] = f32::NAN;
        bad[30 * case.width() + case.width() - 1] = f32::INFINITY;
        each_setup(|ctx| {
            let alone = Steps { case, sequences: std::slice::from_ref(&good), shuffle: 1 }.run(ctx, &[45]).remove(0);
            let beside = Steps { case, sequences: &[bad.clone(), good.clone()], shuffle: 7 }.run(ctx, &[11, 7]);
            assert!(bits(&beside[1]) == bits(&alone), "{format:?} under {:?}", ctx.isa);
            let out_width = case.heads * case.head_dim;
            let (before, after) = beside[0].split_at(20 * out_width);
            assert!(before.iter().all(|value| value.is_finite()), "{format:?} under {:?}", ctx.isa);
            assert!(after.chunks_exact(out_width).all(|row| row[0].is_nan()), "{format:?} under {:?}", ctx.isa);
            bits(&alone)
        });
    }
}

/// A tile lives on the stack, and threads with less than the usual two MiB must work.
#[test]
fn a_small_stack_is_enough() {
    let case = Case { heads: 8, kv_heads: 2, head_dim: 128, ..PLAIN };
    let sequences = [case.rows(SPLIT + 70, 1)];
    let isas = Isa::available();
    std::thread::scope(|scope| {
        let run = || {
            let pool = Pool::new(1).unwrap();
            for isa in isas {
                Steps { case, sequences: &sequences, shuffle: 1 }.run(Ctx { pool: &pool, isa }, &[SPLIT + 70]);
            }
        };
        std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, run).unwrap();
    });
}

#[test]
fn a_wrong_table_entry_shows() {
    let case = PLAIN;
    let sequences = [case.rows(40, 1), case.rows(40, 2)];
    each_setup(|ctx| {
        let right = Steps { case, sequences: &sequences, shuffle: 1 }.run(ctx, &[40, 40]);
        // The pool is permuted so that all blocks of a sequence are one: each step overwrites the
        // previous one.
        let wrong = Steps { case, sequences: &sequences, shuffle: 4 }.run(ctx, &[16, 16]);
        assert_ne!(bits(&right[0]), bits(&wrong[0]));
        Vec::new()
    });
}
