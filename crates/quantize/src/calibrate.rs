//! Calibration text on its way through the model: the hidden states of all sequences, held on the
//! host between layers.

use folio_device::{BLOCK_TOKENS, Backend, Batch, GroupTables, KvFormat, Span};
use folio_model::{Decoder, DecoderLimits, OpenModel};

use crate::{Error, Result};

/// Tokens that go through a layer together, unless one sequence is longer.
const BATCH_TOKENS: usize = 2048;

pub(crate) struct Calibration {
    hidden: usize,
    /// `[tokens, hidden]`, sequence after sequence: the next layer's input.
    stream: Vec<f32>,
    batches: Vec<Batch>,
    limits: DecoderLimits,
}

impl Calibration {
    /// Looks up the embeddings of all sequences.
    pub fn new(model: &OpenModel, sequences: &[Vec<u32>]) -> Result<Self> {
        check(model, sequences)?;
        let hidden = model.spec.hidden;
        let [table, _] = model.embedding_and_last_norm();
        let table = model.weights.require(&table)?.matrix()?;
        let tokens = sequences.iter().map(Vec::len).sum::<usize>();
        let mut stream = vec![0.0; tokens * hidden];
        for (values, token) in stream.chunks_exact_mut(hidden).zip(sequences.iter().flatten()) {
            table.read_row(*token as usize, values);
            values.iter_mut().for_each(|value| *value *= model.spec.embed_scale);
        }
        let batches = batches(sequences);
        let most = |of: fn(&Batch) -> usize| batches.iter().map(of).max().unwrap_or(0);
        let blocks = most(|batch| batch.groups[0].blocks.len());
        let limits = DecoderLimits {
            rows: most(Batch::num_rows),
            spans: most(|batch| batch.spans.len()),
            outputs: 0,
            table_entries: blocks,
            blocks: vec![blocks],
            kv_format: KvFormat::F32,
        };
        Ok(Self { hidden, stream, batches, limits })
    }

    /// Limits for a decoder of one layer.
    pub fn limits(&self) -> DecoderLimits {
        self.limits.clone()
    }

    /// Runs all sequences through `decoder`. Its results become the stream if `advance` is set.
    pub fn run<B: Backend>(
        &mut self,
        decoder: &mut Decoder<B>,
        advance: bool,
        progress: &mut dyn FnMut(f32),
    ) -> Result<()> {
        let mut out = Vec::new();
        let mut first = 0;
        for (number, batch) in self.batches.iter().enumerate() {
            progress(number as f32 / self.batches.len() as f32);
            let rows = batch.num_rows();
            let values = &mut self.stream[first * self.hidden..(first + rows) * self.hidden];
            decoder.forward_from(batch, values)?;
            if advance {
                decoder.stream(rows, &mut out);
                values.copy_from_slice(&out);
            }
            first += rows;
        }
        Ok(())
    }

    /// The normalized states, a batch at a time.
    pub fn normed(&self, weight: &[f32], eps: f32) -> impl Iterator<Item = Vec<f32>> + '_ {
        let weight = weight.to_vec();
        self.stream.chunks(BATCH_TOKENS * self.hidden).map(move |rows| {
            let mut out = rows.to_vec();
            for row in out.chunks_exact_mut(self.hidden) {
                let mean = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / row.len() as f64;
                let by = 1.0 / (mean + f64::from(eps)).sqrt();
                row.iter_mut().zip(&weight).for_each(|(x, weight)| *x = (f64::from(*x) * by) as f32 * weight);
            }
            out
        })
    }
}

fn check(model: &OpenModel, sequences: &[Vec<u32>]) -> Result<()> {
    for (index, sequence) in sequences.iter().enumerate() {
        let problem = if sequence.is_empty() {
            "is empty".to_owned()
        } else if sequence.len() > model.spec.max_context {
            format!("has {} tokens, but the model's context is {}", sequence.len(), model.spec.max_context)
        } else if let Some(token) = sequence.iter().find(|token| **token as usize >= model.spec.vocab_size) {
            format!("has token {token}, but the vocabulary ends at {}", model.spec.vocab_size)
        } else {
            continue;
        };
        return Err(Error::Calibration { index, problem });
    }
    Ok(())
}

/// Whole sequences, from position 0, as many together as fit. One layer is one layer group.
fn batches(sequences: &[Vec<u32>]) -> Vec<Batch> {
    let mut all: Vec<Batch> = Vec::new();
    for sequence in sequences {
        let room = all.last().is_some_and(|batch| batch.num_rows() + sequence.len() <= BATCH_TOKENS);
        if !room {
            all.push(Batch { groups: vec![GroupTables::default()], ..Batch::default() });
        }
        let batch = all.last_mut().expect("pushed above");
        let (first_row, len) = (batch.num_rows() as u32, sequence.len() as u32);
        let group = &mut batch.groups[0];
        let first_block = group.blocks.len() as u32;
        group.first_block.push(first_block);
        group.blocks.extend(first_block..first_block + len.div_ceil(BLOCK_TOKENS as u32));
        group.slots.extend((0..len).map(|position| first_block * BLOCK_TOKENS as u32 + position));
        batch.spans.push(Span { first_row, num_rows: len, context: len });
        batch.positions.extend(0..len);
        // Only their number counts: the stream has the embeddings.
        batch.tokens.extend(sequence.iter().map(|_| 0));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_share_a_batch_and_no_block() {
        let found = batches(&[vec![1; 20], vec![2; 3], vec![3; BATCH_TOKENS], vec![4; BATCH_TOKENS + 5], vec![5; 1]]);
        assert_eq!(found.iter().map(Batch::num_rows).collect::<Vec<_>>(), [23, 2048, 2053, 1]);
        let group = &found[0].groups[0];
        assert_eq!((&group.blocks[..], &group.first_block[..]), (&[0, 1, 2][..], &[0, 2][..]));
        assert_eq!(group.slots[19..], [19, 32, 33, 34]);
        assert_eq!(found[0].positions[18..], [18, 19, 0, 1, 2]);
        assert_eq!(found[0].spans[1], Span { first_row: 20, num_rows: 3, context: 3 });
    }
}
