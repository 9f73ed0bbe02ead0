//! A loaded model that reads windows of tokens and gives the logits of what it expects next.
//!
//! It drives the decoder itself: one sequence, blocks in order, no scheduler and no sampling
//! between the weights and the figures.

use std::ops::Range;

use anyhow::Result;
use folio_device::cpu::{Cpu, CpuConfig};
use folio_device::reference::Reference;
use folio_device::{BLOCK_TOKENS, Backend, Batch, GroupTables, KvFormat, Span};
use folio_model::{Decoder, DecoderLimits, OpenModel};
use folio_session::Gpu;

/// Most logits of one step, in values: 32 MiB as f32.
const STEP_LOGITS: usize = 1 << 23;
const STEP_ROWS_MOST: usize = 512;
const STEP_ROWS_LEAST: usize = 16;

/// How a model is run.
#[derive(Clone, Debug)]
pub struct Setup {
    pub device: Device,
    /// Threads of the host.
    pub threads: usize,
    pub kv_format: KvFormat,
    /// The longest window.
    pub window: usize,
}

/// The backend that computes.
#[derive(Clone, Debug)]
pub enum Device {
    Cpu(CpuConfig),
    Reference,
    Cuda(Gpu),
}

pub trait Reader {
    /// Reads tokens `rows` of a window, whose earlier tokens have been read just before, and puts
    /// the logits of what follows each of them into `logits`: `[rows, vocabulary]`.
    fn read(&mut self, window: &[u32], rows: Range<usize>, logits: &mut Vec<f32>) -> Result<()>;

    /// Bytes of its matrices as they are held to compute with.
    fn weight_bytes(&self) -> u64;
}

pub fn load(model: &OpenModel, setup: &Setup) -> Result<Box<dyn Reader>> {
    Ok(match &setup.device {
        Device::Cpu(cpu) => Box::new(Loaded::new(Cpu::new(*cpu)?, model, setup)?),
        Device::Reference => Box::new(Loaded::new(Reference::new(), model, setup)?),
        Device::Cuda(gpu) => Box::new(Loaded::new(gpu.open()?, model, setup)?),
    })
}

/// How many tokens are read at once: as many as keep their logits within bounds.
pub fn step_rows(vocabulary: usize) -> usize {
    (STEP_LOGITS / vocabulary.max(1)).clamp(STEP_ROWS_LEAST, STEP_ROWS_MOST)
}

struct Loaded<B: Backend> {
    decoder: Decoder<B>,
    num_groups: usize,
}

impl<B: Backend> Loaded<B> {
    fn new(backend: B, model: &OpenModel, setup: &Setup) -> Result<Self> {
        let rows = step_rows(model.spec.vocab_size);
        let blocks = setup.window.div_ceil(BLOCK_TOKENS);
        let num_groups = model.spec.kv_groups().len();
        let limits = DecoderLimits {
            rows,
            spans: 1,
            outputs: rows,
            table_entries: blocks,
            blocks: vec![blocks; num_groups],
            kv_format: setup.kv_format,
        };
        Ok(Self { decoder: Decoder::load(backend, model, limits, &mut |_| {})?, num_groups })
    }
}

impl<B: Backend> Reader for Loaded<B> {
    fn read(&mut self, window: &[u32], rows: Range<usize>, logits: &mut Vec<f32>) -> Result<()> {
        self.decoder.forward(&step(window, rows, self.num_groups))?;
        self.decoder.logits(logits);
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        self.decoder.memory().weights
    }
}

/// Position p lies in slot p, in every layer group.
fn step(window: &[u32], rows: Range<usize>, num_groups: usize) -> Batch {
    let positions = || rows.clone().map(|position| position as u32);
    let (num_rows, context) = (rows.len() as u32, rows.end as u32);
    let blocks = (0..context.div_ceil(BLOCK_TOKENS as u32)).collect();
    let tables = GroupTables { slots: positions().collect(), blocks, first_block: vec![0] };
    Batch {
        tokens: window[rows.clone()].to_vec(),
        positions: positions().collect(),
        spans: vec![Span { first_row: 0, num_rows, context }],
        ancestors: Vec::new(),
        groups: vec![tables; num_groups],
        outputs: (0..num_rows).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_in_the_middle_of_a_window() {
        let window: Vec<u32> = (100..140).collect();
        let batch = step(&window, 15..18, 2);
        assert_eq!(batch.tokens, [115, 116, 117]);
        assert_eq!(batch.positions, [15, 16, 17]);
        assert_eq!(batch.spans, [Span { first_row: 0, num_rows: 3, context: 18 }]);
        assert_eq!(batch.groups[0], batch.groups[1]);
        assert_eq!((&batch.groups[0].slots[..], &batch.groups[0].blocks[..]), (&[15, 16, 17][..], &[0, 1][..]));
        assert_eq!(batch.outputs, [0, 1, 2]);
    }

    #[test]
    fn steps_keep_their_logits_within_bounds() {
        assert_eq!([step_rows(8), step_rows(16_384), step_rows(131_072)], [512, 512, 64]);
        assert_eq!(step_rows(usize::MAX), 16);
    }
}
