//! Several sequences in one decoder: prompts of different lengths in one step, then a token of each a step.

use folio_model::{
    Decoder, DecoderLimits, OpenModel,
    device::{BLOCK_TOKENS, Backend, Batch, GroupTables, KvFormat, Span},
};

use crate::generator;

/// What one sequence is given: a prompt, and the tokens that follow it.
#[derive(Clone)]
pub struct Story {
    pub prompt: Vec<u32>,
    pub rest: Vec<u32>,
}

/// Logits of each sequence: of its prompt's last token, then of every other.
pub fn run<B: Backend>(
    backend: B,
    model: &OpenModel,
    stories: &[Story],
    kv_format: KvFormat,
) -> Result<Vec<Vec<Vec<f32>>>, String> {
    let lengths: Vec<usize> = stories.iter().map(|story| story.prompt.len() + story.rest.len()).collect();
    let needed: usize = lengths.iter().map(|length| length.div_ceil(BLOCK_TOKENS)).sum();
    let rows: usize = stories.iter().map(|story| story.prompt.len()).sum();
    let groups = model.spec.kv_groups().len();
    let limits = DecoderLimits {
        rows: rows.max(16),
        spans: 16,
        outputs: 16,
        table_entries: needed,
        blocks: vec![needed + 3; groups],
        kv_format,
    };
    let mut decoder = Decoder::load(backend, model, limits, &mut |_| ()).map_err(|e| e.to_string())?;
    let mut order = generator::shuffled(11, "blocks of a crowd", needed as u32 + 3).into_iter();
    let tables: Vec<Vec<u32>> =
        lengths.iter().map(|length| order.by_ref().take(length.div_ceil(BLOCK_TOKENS)).collect()).collect();
    let mut results = vec![Vec::new(); stories.len()];
    let steps = stories.iter().map(|story| story.rest.len()).max().unwrap_or(0);
    for step in 0..=steps {
        let mut batch = Batch { groups: vec![GroupTables::default(); groups], ..Batch::default() };
        let mut who = Vec::new();
        for (number, story) in stories.iter().enumerate() {
            let (first, tokens) = match step {
                0 => (0, &story.prompt[..]),
                _ if step <= story.rest.len() => (story.prompt.len() + step - 1, &story.rest[step - 1..step]),
                _ => continue,
            };
            append(&mut batch, first, tokens, &tables[number]);
            who.push(number);
        }
        decoder.forward(&batch).map_err(|e| e.to_string())?;
        let mut logits = Vec::new();
        decoder.logits(&mut logits);
        for (number, row) in who.iter().zip(logits.chunks_exact(model.spec.vocab_size)) {
            results[*number].push(row.to_vec());
        }
    }
    Ok(results)
}

fn append(batch: &mut Batch, first: usize, tokens: &[u32], table: &[u32]) {
    let context = first + tokens.len();
    let span = Span { first_row: batch.tokens.len() as u32, num_rows: tokens.len() as u32, context: context as u32 };
    batch.spans.push(span);
    batch.tokens.extend_from_slice(tokens);
    batch.positions.extend(first as u32..context as u32);
    batch.outputs.push(batch.tokens.len() as u32 - 1);
    for group in &mut batch.groups {
        group.first_block.push(group.blocks.len() as u32);
        group.blocks.extend_from_slice(&table[..context.div_ceil(BLOCK_TOKENS)]);
        let slot = |position| table[position / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32;
        group.slots.extend((first..context).map(slot));
    }
}
