//! One sequence through a decoder and its paged cache, and the comparison with a golden file.

use folio_device::{BLOCK_TOKENS, Backend, Batch, GroupTables, KvFormat, Span};
use folio_model::{Decoder, DecoderLimits, OpenModel};

use crate::{file::Golden, generator};

/// A sequence with blocks in shuffled order, so that nothing can pass by reading the cache straight
/// through.
pub struct Sequence<B: Backend> {
    decoder: Decoder<B>,
    /// Block table of each layer group.
    tables: Vec<Vec<u32>>,
    computed: usize,
    vocab_size: usize,
}

impl<B: Backend> Sequence<B> {
    /// Room for `tokens` in all, at most `rows` per step.
    pub fn new(backend: B, model: &OpenModel, tokens: usize, rows: usize) -> Result<Self, String> {
        Self::with_kv(backend, model, tokens, rows, KvFormat::F32)
    }

    /// Room for `tokens`, with keys and values stored in another format.
    pub fn with_kv(
        backend: B,
        model: &OpenModel,
        tokens: usize,
        rows: usize,
        kv_format: KvFormat,
    ) -> Result<Self, String> {
        let needed = tokens.div_ceil(BLOCK_TOKENS);
        // More blocks than needed: the table is not merely a permutation of the whole cache.
        let blocks = needed + 5;
        let groups = model.spec.kv_groups().len();
        let limits = DecoderLimits {
            rows,
            spans: 1,
            outputs: rows,
            table_entries: needed,
            blocks: vec![blocks; groups],
            kv_format,
        };
        let decoder = Decoder::load(backend, model, limits, &mut |_| ()).map_err(|e| e.to_string())?;
        let table = |group: usize| {
            let mut order = generator::shuffled(7, &format!("blocks of group {group}"), blocks as u32);
            order.truncate(needed);
            order
        };
        let vocab_size = model.spec.vocab_size;
        Ok(Self { decoder, tables: (0..groups).map(table).collect(), computed: 0, vocab_size })
    }

    /// Appends tokens; returns logits of each, one row per token.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, String> {
        let batch = self.append(tokens);
        self.decoder.forward(&batch).map_err(|e| e.to_string())?;
        let mut logits = Vec::new();
        self.decoder.logits(&mut logits);
        Ok(logits.chunks_exact(self.vocab_size).map(<[f32]>::to_vec).collect())
    }

    /// Appends tokens; returns the states behind the last norm, and computes no logits.
    pub fn feed_for_states(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, String> {
        let batch = self.append(tokens);
        self.decoder.forward_with(&batch, 0).map_err(|e| e.to_string())?;
        let (mut hidden, width) = (Vec::new(), self.decoder.spec().hidden);
        self.decoder.hidden(&mut hidden);
        Ok(hidden.chunks_exact(width).map(<[f32]>::to_vec).collect())
    }

    fn append(&mut self, tokens: &[u32]) -> Batch {
        let first = self.computed;
        let positions: Vec<u32> = (first..first + tokens.len()).map(|position| position as u32).collect();
        self.computed += tokens.len();
        let group = |table: &Vec<u32>| {
            let size = BLOCK_TOKENS as u32;
            let slot = |position: &u32| table[(position / size) as usize] * size + position % size;
            let used = self.computed.div_ceil(BLOCK_TOKENS);
            GroupTables {
                slots: positions.iter().map(slot).collect(),
                blocks: table[..used].to_vec(),
                first_block: vec![0],
            }
        };
        let num_rows = tokens.len() as u32;
        Batch {
            tokens: tokens.to_vec(),
            spans: vec![Span { first_row: 0, num_rows, context: self.computed as u32 }],
            ancestors: Vec::new(),
            groups: self.tables.iter().map(group).collect(),
            outputs: (0..num_rows).collect(),
            positions,
        }
    }

    /// Plants a mistake: one entry of a group's table names a block that is not this sequence's.
    pub fn misplace(&mut self, group: usize, entry: usize) {
        let table = &mut self.tables[group];
        table[entry] = (0..).find(|block| !table.contains(block)).unwrap_or_default();
    }

    /// The prompt in steps of `chunk` tokens: logits of every position.
    pub fn prompt(&mut self, tokens: &[u32], chunk: usize) -> Result<Vec<Vec<f32>>, String> {
        let mut rows = Vec::new();
        for step in tokens.chunks(chunk) {
            rows.extend(self.feed(step)?);
        }
        Ok(rows)
    }
}

/// Compares prompt logits with the recorded ones: returns the largest difference, or an error.
pub fn compare(golden: &Golden, logits: &[Vec<f32>]) -> Result<f64, String> {
    compare_within(golden, logits, golden.tolerance())
}

pub fn compare_within(golden: &Golden, logits: &[Vec<f32>], tolerance: f64) -> Result<f64, String> {
    let mut worst = 0.0f64;
    for top in &golden.top {
        for (id, expected) in top.ids.iter().zip(&top.logits) {
            let found = f64::from(logits[top.position][*id]);
            // Written so that a NaN fails.
            let near = (found - expected).abs() <= tolerance;
            if !near {
                let position = top.position;
                return Err(format!("position {position}, token {id}: logit {found:.6}, but expected {expected:.6}"));
            }
            worst = worst.max((found - expected).abs());
        }
    }
    for (position, (row, expected)) in logits.iter().zip(&golden.log_sum_exp).enumerate() {
        let found = log_sum_exp(row);
        let near = (found - expected).abs() <= tolerance;
        if !near {
            return Err(format!("position {position}: log-sum-exp {found:.6}, but expected {expected:.6}"));
        }
        worst = worst.max((found - expected).abs());
    }
    Ok(worst)
}

pub fn log_sum_exp(row: &[f32]) -> f64 {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|logit| (f64::from(*logit) - f64::from(largest)).exp()).sum();
    f64::from(largest) + sum.ln()
}

/// Index of the largest value, the first of equals.
pub fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in row.iter().enumerate() {
        if *logit > row[best] {
            best = id;
        }
    }
    best as u32
}

/// For a backend that rounds activations to eight bits before it multiplies them with packed
/// weights. Compares only logits, within the rounding error for a small network of random weights,
/// which is large: a few hundredths of their spread.
pub fn check_rounded<B: Backend>(golden: &Golden, model: &OpenModel, backend: impl Fn() -> B) -> Result<f64, String> {
    let rows = golden.prompt.len();
    let logits = Sequence::new(backend(), model, rows, rows)?.prompt(&golden.prompt, rows)?;
    let worst = compare_within(golden, &logits, 200.0 * golden.tolerance())?;
    match Sequence::new(backend(), model, rows, 7)?.prompt(&golden.prompt, 7)? == logits {
        true => Ok(worst),
        false => Err("the prompt in steps of 7 gives other logits than in one step".to_owned()),
    }
}

/// The whole check: prompt in one step, greedy continuation, prompt in small steps. Returns the
/// largest difference.
pub fn check<B: Backend>(golden: &Golden, model: &OpenModel, backend: impl Fn() -> B) -> Result<f64, String> {
    let tokens = golden.prompt.len() + golden.greedy.len();
    let mut whole = Sequence::new(backend(), model, tokens, golden.prompt.len())?;
    let logits = whole.prompt(&golden.prompt, golden.prompt.len())?;
    let worst = compare(golden, &logits)?;
    let mut last = logits.last().cloned().unwrap_or_default();
    for (step, expected) in golden.greedy.iter().enumerate() {
        let found = argmax(&last);
        if found != *expected {
            return Err(format!("greedy token {step} is {found}, but expected {expected}"));
        }
        last = whole.feed(&[found])?.remove(0);
    }
    let mut chunked = Sequence::new(backend(), model, tokens, 7)?;
    if chunked.prompt(&golden.prompt, 7)? != logits {
        return Err("the prompt in steps of 7 gives other logits than in one step".to_owned());
    }
    Ok(worst)
}
