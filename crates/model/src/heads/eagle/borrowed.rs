//! The decoder's output rows of a draft vocabulary, as a small matrix: for a head that was trained
//! with them and does not repeat them in its file. They are read back through the embedding, which
//! is the same table if it is tied.

use folio_device::{BLOCK_TOKENS, Backend, Batch, GroupTables, Span};
use folio_formats::{Format, Matrix, quant};

use crate::Result;

/// Reads at most `most_rows` rows at a time through `embedded`, which has `hidden` columns.
pub(super) struct Reader<'a, B: Backend> {
    pub inputs: &'a mut B::Inputs,
    pub embedded: &'a mut B::Tensor,
    pub hidden: usize,
    pub most_rows: usize,
}

impl<B: Backend> Reader<'_, B> {
    /// `[tokens, hidden]`. Eight bits suffice for drafts, and take half the reads of sixteen.
    pub fn rows(self, backend: &mut B, embedding: &B::Weight, tokens: &[u32]) -> Result<Matrix<'static>> {
        let Self { inputs, embedded, hidden, most_rows } = self;
        let format = if hidden.is_multiple_of(Format::Q8_0.block_len()) { Format::Q8_0 } else { Format::BF16 };
        let (mut values, mut rows) = (Vec::new(), Vec::with_capacity(tokens.len()));
        // One block's worth at a time, for which every head has room; nothing is written there.
        for tokens in tokens.chunks(most_rows.min(BLOCK_TOKENS)) {
            backend.upload(inputs, &one_span(tokens));
            backend.embed(embedded, embedding, inputs, 1.0);
            backend.download(embedded, tokens.len(), &mut values);
            for row in values.chunks_exact(hidden) {
                rows.push(quant::encode(format, row)?.into());
            }
        }
        Ok(Matrix::from_rows(format, hidden, rows)?)
    }
}

fn one_span(tokens: &[u32]) -> Batch {
    let rows = tokens.len() as u32;
    Batch {
        tokens: tokens.to_vec(),
        positions: (0..rows).collect(),
        spans: vec![Span { first_row: 0, num_rows: rows, context: rows }],
        groups: vec![GroupTables { slots: (0..rows).collect(), blocks: vec![0], first_block: vec![0] }],
        ..Batch::default()
    }
}
