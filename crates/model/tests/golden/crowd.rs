//! Several sequences in one decoder: each may continue by any number of tokens in a step.

use folio_device::{BLOCK_TOKENS, Backend, Batch, GroupTables, KvFormat, Span};
use folio_model::{Decoder, DecoderLimits, OpenModel, Tap};

use crate::generator;

/// Tokens of one sequence: a prompt, and the tokens that follow it.
#[derive(Clone)]
pub struct Story {
    pub prompt: Vec<u32>,
    pub rest: Vec<u32>,
}

/// Part of one sequence in a step.
pub struct Turn<'a> {
    pub who: usize,
    pub tokens: &'a [u32],
    /// Number of its last tokens with requested logits.
    pub outputs: usize,
}

/// Tokens behind one sequence, all with logits: a chain if there are no words, or the tree of the
/// words.
#[derive(Clone)]
pub struct Drafted {
    pub who: usize,
    pub tokens: Vec<u32>,
    pub words: Vec<u64>,
}

/// Sequences with blocks that are mixed in random order.
pub struct Crowd<B: Backend> {
    decoder: Decoder<B>,
    tables: Vec<Vec<u32>>,
    computed: Vec<usize>,
}

impl<B: Backend> Crowd<B> {
    /// Room for sequences of these lengths; steps of at most this number of tokens and outputs.
    pub fn new(
        backend: B,
        model: &OpenModel,
        lengths: &[usize],
        (rows, outputs): (usize, usize),
        kv_format: KvFormat,
    ) -> Result<Self, String> {
        let needed: usize = lengths.iter().map(|length| length.div_ceil(BLOCK_TOKENS)).sum();
        let limits = DecoderLimits {
            rows: rows.max(16),
            spans: lengths.len().max(16),
            outputs: outputs.max(16),
            // Each row of a tree counts as a sequence.
            table_entries: 4 * needed,
            blocks: vec![needed + 3; model.spec.kv_groups().len()],
            kv_format,
        };
        let decoder = Decoder::load(backend, model, limits, &mut |_| ()).map_err(|e| e.to_string())?;
        let mut order = generator::shuffled(11, "blocks of a crowd", needed as u32 + 3).into_iter();
        let table = |length: &usize| order.by_ref().take(length.div_ceil(BLOCK_TOKENS)).collect();
        Ok(Self { decoder, tables: lengths.iter().map(table).collect(), computed: vec![0; lengths.len()] })
    }

    /// Copies states of the steps to come.
    pub fn tap(&mut self, tap: Tap) -> Result<(), String> {
        self.decoder.tap(tap).map_err(|e| e.to_string())
    }

    /// The states of all rows of the last step.
    pub fn tapped(&mut self) -> Vec<f32> {
        let mut states = Vec::new();
        self.decoder.tapped(&mut states);
        states
    }

    /// Resets a sequence to its first `tokens` tokens.
    pub fn rewind(&mut self, who: usize, tokens: usize) {
        assert!(tokens <= self.computed[who], "a sequence of {} tokens has no {tokens}", self.computed[who]);
        self.computed[who] = tokens;
    }

    /// Runs one step: rows of logits, turn by turn, into `logits`.
    pub fn step(&mut self, turns: &[Turn<'_>], logits: &mut Vec<f32>) -> Result<(), String> {
        let batch = self.batch(turns);
        self.run(&batch, logits)
    }

    /// Runs one step that verifies drafts.
    pub fn verify(&mut self, drafts: &[Drafted], logits: &mut Vec<f32>) -> Result<(), String> {
        let bases: Vec<usize> = drafts.iter().map(|draft| self.computed[draft.who]).collect();
        let turns = drafts.iter().map(|Drafted { who, tokens, .. }| Turn { who: *who, tokens, outputs: tokens.len() });
        let mut batch = self.batch(&turns.collect::<Vec<_>>());
        if drafts.iter().any(|draft| !draft.words.is_empty()) {
            for (draft, base) in drafts.iter().zip(bases) {
                let first = batch.ancestors.len();
                batch.ancestors.extend(&draft.words);
                batch.ancestors.resize(first + draft.tokens.len(), 0);
                for (position, word) in batch.positions[first..].iter_mut().zip(&draft.words) {
                    *position = base as u32 + word.count_ones() - 1;
                }
            }
        }
        self.run(&batch, logits)
    }

    fn batch(&mut self, turns: &[Turn<'_>]) -> Batch {
        let mut batch =
            Batch { groups: vec![GroupTables::default(); self.decoder.limits().blocks.len()], ..Batch::default() };
        for turn in turns {
            let first = self.computed[turn.who];
            append(&mut batch, first, turn, &self.tables[turn.who]);
            self.computed[turn.who] += turn.tokens.len();
        }
        batch
    }

    fn run(&mut self, batch: &Batch, logits: &mut Vec<f32>) -> Result<(), String> {
        self.decoder.forward(batch).map_err(|e| e.to_string())?;
        self.decoder.logits(logits);
        Ok(())
    }
}

fn append(batch: &mut Batch, first: usize, turn: &Turn<'_>, table: &[u32]) {
    let tokens = turn.tokens;
    let context = first + tokens.len();
    let span = Span { first_row: batch.tokens.len() as u32, num_rows: tokens.len() as u32, context: context as u32 };
    batch.spans.push(span);
    batch.tokens.extend_from_slice(tokens);
    batch.positions.extend(first as u32..context as u32);
    let rows = batch.tokens.len();
    batch.outputs.extend((rows - turn.outputs..rows).map(|row| row as u32));
    for group in &mut batch.groups {
        group.first_block.push(group.blocks.len() as u32);
        group.blocks.extend_from_slice(&table[..context.div_ceil(BLOCK_TOKENS)]);
        let slot = |position| table[position / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32;
        group.slots.extend((first..context).map(slot));
    }
}

/// All prompts in one step, then one token of each per step. Returns logits of each sequence: of
/// its prompt's last token, then of every further token.
pub fn run<B: Backend>(
    backend: B,
    model: &OpenModel,
    stories: &[Story],
    kv_format: KvFormat,
) -> Result<Vec<Vec<Vec<f32>>>, String> {
    let lengths: Vec<usize> = stories.iter().map(|story| story.prompt.len() + story.rest.len()).collect();
    let rows = stories.iter().map(|story| story.prompt.len()).sum();
    let mut crowd = Crowd::new(backend, model, &lengths, (rows, stories.len()), kv_format)?;
    let mut results = vec![Vec::new(); stories.len()];
    let steps = stories.iter().map(|story| story.rest.len()).max().unwrap_or(0);
    let mut logits = Vec::new();
    for step in 0..=steps {
        let mut turns = Vec::new();
        for (who, story) in stories.iter().enumerate() {
            let tokens = match step {
                0 => Some(&story.prompt[..]),
                _ => story.rest.get(step - 1..step),
            };
            turns.extend(tokens.map(|tokens| Turn { who, tokens, outputs: 1 }));
        }
        crowd.step(&turns, &mut logits)?;
        for (turn, row) in turns.iter().zip(logits.chunks_exact(model.spec.vocab_size)) {
            results[turn.who].push(row.to_vec());
        }
    }
    Ok(results)
}
