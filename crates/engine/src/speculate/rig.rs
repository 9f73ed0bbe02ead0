//! A decoder of a small model, driven step by step, for tests of methods that read its states and
//! blocks.

use std::collections::BTreeMap;

use folio_device::{BLOCK_TOKENS, Batch, GroupTables, KvFormat, Span, reference::Reference, tree};
use folio_formats::{Format, TensorView, WeightSource};
use folio_model::{Decoder, DecoderLimits, Error, OpenModel};
use folio_scheduler::RequestId;

use super::{Ahead, Draft, Drafter, Known, Owner, Settled, SettledRequest, ancestors};

pub const VOCAB: usize = 32;
pub const HIDDEN: usize = 32;
const BLOCKS: usize = 40;

/// Tensors in memory.
#[derive(Clone, Default)]
pub struct Memory(BTreeMap<String, (Format, Vec<usize>, Vec<u8>)>);

impl Memory {
    pub fn put(&mut self, name: &str, shape: &[usize], values: impl IntoIterator<Item = f32>) {
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(bytes.len(), 4 * shape.iter().product::<usize>(), "{name}");
        self.0.insert(name.to_owned(), (Format::F32, shape.to_vec(), bytes));
    }

    pub fn put_integers(&mut self, name: &str, values: &[i64]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.0.insert(name.to_owned(), (Format::I64, vec![values.len()], bytes));
    }

    /// Random numbers; norms are about one.
    pub fn invent(&mut self, name: &str, shape: &[usize]) {
        let mut state = name
            .bytes()
            .fold(0x9e37_79b9_7f4a_7c15u64, |all, byte| (all ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let (scale, offset) = if shape.len() == 1 { (0.2, 1.0) } else { (2.5 / (shape[1] as f32).sqrt(), 0.0) };
        let values = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            offset + scale * ((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
        });
        self.put(name, shape, values.take(shape.iter().product()).collect::<Vec<_>>());
    }

    /// Makes missing tensors with `make`, until `load` finds all.
    pub fn complete<T>(
        &mut self,
        mut load: impl FnMut(&Self) -> Result<T, Error>,
        make: impl Fn(&mut Self, &str, &[usize]),
    ) -> T {
        loop {
            match load(self) {
                Ok(loaded) => return loaded,
                Err(Error::MissingTensor { name, expected, .. }) => make(self, &name, &expected),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

impl WeightSource for Memory {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, (format, shape, bytes)) = self.0.get_key_value(name)?;
        Some(TensorView { name, format: *format, shape: shape.clone(), bytes })
    }

    fn release(&self, _: &str) {}
}

/// A request of the default owner.
pub fn known(id: RequestId, tokens: &[u32]) -> Known<'_> {
    Known { id, owner: Owner::default(), tokens }
}

/// The token that follows each token in the predictable model.
pub fn follower(token: u32) -> u32 {
    (5 * token + 3) % VOCAB as u32
}

/// `rows` by `cols`, with `value` where `place` returns true.
pub fn sparse(rows: usize, cols: usize, place: impl Fn(usize) -> (usize, usize), value: f32) -> Vec<f32> {
    let mut values = vec![0.0; rows * cols];
    for number in 0..rows.min(cols) {
        let (row, col) = place(number);
        values[row * cols + col] = value;
    }
    values
}

/// A model whose states are its tokens, one column each, and which continues every token with its
/// [`follower`].
pub fn foreseeable(memory: &mut Memory, name: &str, shape: &[usize]) {
    match name {
        "model.embed_tokens.weight" => memory.put(name, shape, sparse(VOCAB, HIDDEN, |token| (token, token), 1.0)),
        "lm_head.weight" => {
            memory.put(name, shape, sparse(VOCAB, HIDDEN, |token| (follower(token as u32) as usize, token), 20.0));
        }
        _ if shape.len() == 1 => memory.put(name, shape, vec![1.0; shape[0]]),
        _ if name.contains("o_proj") || name.contains("down_proj") => {
            memory.put(name, shape, vec![0.0; shape[0] * shape[1]]);
        }
        _ => memory.invent(name, shape),
    }
}

/// A decoder and sequences on it.
pub struct Rig {
    pub decoder: Decoder<Reference>,
    pub sequences: Vec<Sequence>,
    next_block: u32,
}

pub struct Sequence {
    pub id: RequestId,
    pub owner: Owner,
    pub tokens: Vec<u32>,
    pub computed: usize,
    pub table: Vec<u32>,
    /// The draft of the next step.
    pub draft: Draft,
    /// Most nodes of its next draft.
    pub most: usize,
    /// Tokens that each step after the prompt gave.
    pub paces: Vec<usize>,
}

impl Rig {
    pub fn new(make: impl Fn(&mut Memory, &str, &[usize])) -> Self {
        let config = format!(
            r#"{{"model_type": "llama", "vocab_size": {VOCAB}, "hidden_size": {HIDDEN}, "intermediate_size": 24,
            "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 128}}"#
        );
        let limits = DecoderLimits {
            rows: 80,
            spans: 80,
            outputs: 80,
            table_entries: 1000,
            blocks: vec![BLOCKS],
            kv_format: KvFormat::F32,
        };
        let load = |weights: &Memory| {
            let model = OpenModel::from_config(&config, Box::new(weights.clone()))?;
            Decoder::load(Reference::new(), &model, limits.clone(), &mut |_| {})
        };
        Self { decoder: Memory::default().complete(load, make), sequences: Vec::new(), next_block: 0 }
    }

    /// Adds a prompt. Its first `held` tokens are in blocks of an earlier sequence.
    pub fn add(&mut self, prompt: &[u32], held: Option<(usize, usize)>) -> usize {
        let (computed, table) = held.map_or((0, Vec::new()), |(who, tokens)| {
            assert!(tokens.is_multiple_of(BLOCK_TOKENS));
            (tokens, self.sequences[who].table[..tokens / BLOCK_TOKENS].to_vec())
        });
        let number = self.sequences.len();
        self.sequences.push(Sequence {
            id: RequestId(number as u64),
            owner: Owner::default(),
            tokens: prompt.to_vec(),
            computed,
            table,
            draft: Draft::default(),
            most: 0,
            paces: Vec::new(),
        });
        number
    }

    /// Preempts the sequence: it restarts in other blocks, with nothing computed.
    pub fn preempt(&mut self, who: usize) {
        let sequence = &mut self.sequences[who];
        sequence.table.clear();
        (sequence.computed, sequence.draft) = (0, Draft::default());
    }

    /// A greedy step of these sequences with at most the given number of rows of each, and the
    /// drafts after it.
    pub fn step(&mut self, drafter: &mut dyn Drafter<Reference>, work: &[(usize, usize)]) {
        let mut batch = Batch::default();
        Ahead::clear(&mut batch, 1);
        for &(who, most) in work {
            self.push(who, most, &mut batch);
        }
        if batch.ancestors.iter().any(|&word| word != 0) {
            batch.ancestors.resize(batch.num_rows(), 0);
        } else {
            batch.ancestors.clear();
        }
        self.decoder.forward(&batch).expect("a step");
        let mut logits = Vec::new();
        self.decoder.logits(&mut logits);
        let best: Vec<u32> = logits.chunks_exact(VOCAB).map(argmax).collect();

        let (mut rows, mut outputs) = (Vec::new(), Vec::new());
        for (&(who, _), span) in work.iter().zip(&batch.spans) {
            let output = batch.outputs.iter().position(|&row| row == span.first_row + span.num_rows - 1);
            let (accepted, output) = self.settle(who, span, output, &best);
            rows.push(accepted);
            outputs.push(output);
        }
        let requests = work.iter().zip(rows.iter().zip(&outputs)).map(|(&(who, _), (rows, &output))| {
            let Sequence { id, owner, tokens, computed, most, .. } = &self.sequences[who];
            let most = if output.is_some() { *most } else { 0 };
            SettledRequest { id: *id, owner: *owner, tokens, computed: *computed, rows, output, guesses: &[], most }
        });
        let requests: Vec<_> = requests.collect();
        let mut drafts = vec![Draft::default(); work.len()];
        drafter.draft(&mut self.decoder, &Settled { batch: &batch, requests: &requests }, &mut drafts).expect("drafts");
        for (&(who, _), draft) in work.iter().zip(drafts) {
            assert!(draft.len() <= self.sequences[who].most);
            self.sequences[who].draft = draft;
        }
    }

    /// Adds the rows of one sequence: a chunk of known tokens, or the last token and its draft.
    fn push(&mut self, who: usize, most: usize, batch: &mut Batch) {
        let sequence = &mut self.sequences[who];
        let (first, known) = (sequence.computed, sequence.tokens.len() - sequence.computed);
        if known > 1 {
            sequence.draft.clear();
        }
        let known = known.min(most);
        let is_last = first + known == sequence.tokens.len();
        let mut tokens = sequence.tokens[first..first + known].to_vec();
        tokens.extend(sequence.draft.tokens());
        let row = batch.num_rows() as u32;
        let context = first + tokens.len();
        while sequence.table.len() * BLOCK_TOKENS < context {
            sequence.table.push(self.next_block % BLOCKS as u32);
            self.next_block += 1;
        }
        batch.spans.push(Span { first_row: row, num_rows: tokens.len() as u32, context: context as u32 });
        let words = if sequence.draft.is_chain() { vec![0; tokens.len()] } else { ancestors(&sequence.draft) };
        for (at, &word) in words.iter().enumerate() {
            let position = if word == 0 { first + at } else { first + word.count_ones() as usize - 1 };
            batch.positions.push(position as u32);
        }
        batch.ancestors.extend(words);
        let GroupTables { slots, blocks, first_block } = &mut batch.groups[0];
        let slot = |place: usize| sequence.table[place / BLOCK_TOKENS] as usize * BLOCK_TOKENS + place % BLOCK_TOKENS;
        slots.extend((first..context).map(|place| slot(place) as u32));
        first_block.push(blocks.len() as u32);
        blocks.extend(&sequence.table);
        if is_last {
            let rows = 1 + sequence.draft.len() as u32;
            batch.outputs.extend(row + tokens.len() as u32 - rows..row + tokens.len() as u32);
        }
        batch.tokens.extend(tokens);
    }

    /// Takes the results of one sequence: the rows that count, and the last of them among the
    /// outputs.
    fn settle(&mut self, who: usize, span: &Span, last: Option<usize>, best: &[u32]) -> (Vec<u32>, Option<u32>) {
        let sequence = &mut self.sequences[who];
        let draft = std::mem::take(&mut sequence.draft);
        let known = span.num_rows as usize - draft.len();
        let base = sequence.computed + known - 1;
        let mut rows: Vec<u32> = (span.first_row..span.first_row + known as u32).collect();
        sequence.computed += known;
        let Some(last) = last else { return (rows, None) };
        let first = last - draft.len();
        let (mut at, mut output, before) = (None, first, sequence.tokens.len());
        loop {
            sequence.tokens.push(best[output]);
            let Some(child) = draft.child(at, best[output]) else { break };
            (at, output) = (Some(child), first + 1 + usize::from(child));
            rows.push(span.first_row + known as u32 + u32::from(child));
            sequence.computed += 1;
        }
        let word = ancestors(&draft)[output - first];
        let slot =
            |place: usize| sequence.table[place / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (place % BLOCK_TOKENS) as u32;
        let pairs: Vec<(u32, u32)> = tree::moves(base, word).map(|(from, to)| (slot(from), slot(to))).collect();
        self.decoder.move_tokens(0, &pairs);
        sequence.paces.push(sequence.tokens.len() - before);
        (rows, Some(output as u32))
    }

    /// Computes known tokens in chunks, until one is sampled.
    pub fn read(&mut self, drafter: &mut dyn Drafter<Reference>, who: usize, chunk: usize) {
        let tokens = self.sequences[who].tokens.len();
        while self.sequences[who].tokens.len() == tokens {
            self.step(drafter, &[(who, chunk)]);
        }
    }

    /// Runs a number of steps of an answer.
    pub fn answer(&mut self, drafter: &mut dyn Drafter<Reference>, who: usize, steps: usize) {
        (0..steps).for_each(|_| self.step(drafter, &[(who, 1)]));
    }
}

pub fn argmax(row: &[f32]) -> u32 {
    let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)));
    best.expect("a row of logits") as u32
}
