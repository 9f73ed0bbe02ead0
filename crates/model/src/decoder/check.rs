//! A step must fit the allocated sizes, and name only existing tokens, rows and blocks: a step that
//! passes here cannot make a backend read outside its memory.

use folio_device::{BLOCK_TOKENS, Batch, DRAWN_TOKEN, GroupTables};

use super::DecoderLimits;
use crate::{Error, ModelSpec, Result};

pub(super) fn limits(spec: &ModelSpec, limits: &DecoderLimits) -> Result<()> {
    let expected = spec.kv_groups().len();
    if limits.blocks.len() != expected {
        return Err(Error::GroupCount { family: spec.family, found: limits.blocks.len(), expected });
    }
    Ok(())
}

/// `draws`: tokens may be ones that the device sampled and the host has not seen.
pub(crate) fn batch(spec: &ModelSpec, limits: &DecoderLimits, batch: &Batch, draws: bool) -> Result<()> {
    let rows = batch.num_rows();
    most("the number of rows", rows, limits.rows)?;
    most("the number of spans", batch.spans.len(), limits.spans)?;
    most("the number of output rows", batch.outputs.len(), limits.outputs)?;
    same("positions", batch.positions.len(), rows)?;
    same("groups", batch.groups.len(), limits.blocks.len())?;
    if !batch.ancestors.is_empty() {
        same("ancestors", batch.ancestors.len(), rows)?;
    }
    for &token in &batch.tokens {
        match draws && token >= DRAWN_TOKEN {
            true => most("the number of a draw", (token - DRAWN_TOKEN) as usize + 1, limits.outputs)?,
            false => most("a token id", token as usize, spec.vocab_size - 1)?,
        }
    }
    most("a position", largest(&batch.positions), spec.max_context - 1)?;
    most("an output row", largest(&batch.outputs), rows - 1)?;
    let in_spans = batch.spans.iter().map(|span| span.num_rows as usize).sum();
    same("spans' rows together", in_spans, rows)?;
    for span in &batch.spans {
        most("a span's last row", span.first_row as usize + span.num_rows as usize, rows)?;
        most("a span's context", span.context as usize, spec.max_context)?;
        most("the number of a span's rows", span.num_rows as usize, span.context as usize)?;
    }
    for (tables, blocks) in batch.groups.iter().zip(&limits.blocks) {
        group(batch, tables, *blocks, limits.table_entries)?;
    }
    Ok(())
}

fn group(batch: &Batch, tables: &GroupTables, blocks: usize, table_entries: usize) -> Result<()> {
    same("slots", tables.slots.len(), batch.num_rows())?;
    same("first_block", tables.first_block.len(), batch.spans.len())?;
    most("the number of block-table entries", tables.blocks.len(), table_entries)?;
    most("a slot", largest(&tables.slots), (blocks * BLOCK_TOKENS).saturating_sub(1))?;
    most("a block", largest(&tables.blocks), blocks.saturating_sub(1))?;
    for (span, first) in batch.spans.iter().zip(&tables.first_block) {
        let end = *first as usize + (span.context as usize).div_ceil(BLOCK_TOKENS);
        most("the end of a span's block table", end, tables.blocks.len())?;
    }
    Ok(())
}

pub(crate) fn most(what: &'static str, found: usize, limit: usize) -> Result<()> {
    if found <= limit { Ok(()) } else { Err(Error::BatchLimit { what, found, limit }) }
}

pub(crate) fn same(what: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::BatchShape { what, found, expected }) }
}

pub(crate) fn largest(values: &[u32]) -> usize {
    values.iter().copied().max().map_or(0, |value| value as usize)
}
