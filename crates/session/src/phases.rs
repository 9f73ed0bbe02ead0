//! Duration of each part of a start, and a first step, which shows whether the device works at all
//! and allocates the memory that it needs between kernels.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use folio_device::{BLOCK_TOKENS, Backend, Batch, Draw, Draws, GroupTables, Span};
use folio_model::Decoder;
use serde_json::{Value, json};

/// Rows of the first step: more than the kernels for few rows take.
const FIRST_ROWS: usize = 96;

#[derive(Clone, Debug, Default)]
pub struct Phases {
    parts: Vec<Part>,
    /// Notes for the user, such as a library that was not found.
    pub notes: Vec<String>,
}

#[derive(Clone, Debug)]
struct Part {
    what: &'static str,
    took: Duration,
    remark: Option<String>,
}

impl Phases {
    pub fn add(&mut self, what: &'static str, took: Duration, remark: Option<String>) {
        self.parts.push(Part { what, took, remark });
    }

    /// Runs a part of the start.
    pub fn time<T>(&mut self, what: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let done = work()?;
        self.add(what, start.elapsed(), None);
        Ok(done)
    }

    pub fn describe(&self) -> String {
        let part = |part: &Part| {
            let remark = part.remark.as_ref().map_or(String::new(), |remark| format!(" ({remark})"));
            format!("{} {:.2} s{remark}", part.what, part.took.as_secs_f64())
        };
        self.parts.iter().map(part).collect::<Vec<_>>().join(", ")
    }

    pub fn json(&self) -> Value {
        let part = |part: &Part| json!({"what": part.what, "seconds": part.took.as_secs_f64(), "remark": part.remark});
        self.parts.iter().map(part).collect()
    }
}

/// A prompt chunk and a decode step of one sequence, in unused blocks.
pub fn first_step<B: Backend>(decoder: &mut Decoder<B>) -> Result<()> {
    let limits = decoder.limits().clone();
    let blocks = limits.blocks.iter().copied().min().unwrap_or(0).min(limits.table_entries);
    let context = decoder.spec().max_context.min(blocks * BLOCK_TOKENS);
    ensure!(context > 0, "there is no room for a token");
    let rows = FIRST_ROWS.min(limits.rows).min(context);
    step(decoder, 0, rows).context("the first step")?;
    if rows < context {
        step(decoder, rows, 1).context("the first decode step")?;
    }
    Ok(())
}

fn step<B: Backend>(decoder: &mut Decoder<B>, first: usize, rows: usize) -> Result<()> {
    let positions = || first as u32..(first + rows) as u32;
    let blocks = (0..(first + rows).div_ceil(BLOCK_TOKENS) as u32).collect();
    let tables = GroupTables { slots: positions().collect(), blocks, first_block: vec![0] };
    let batch = Batch {
        tokens: vec![0; rows],
        positions: positions().collect(),
        spans: vec![Span { first_row: 0, num_rows: rows as u32, context: (first + rows) as u32 }],
        ancestors: Vec::new(),
        groups: vec![tables; decoder.limits().blocks.len()],
        outputs: vec![rows as u32 - 1],
    };
    decoder.forward(&batch)?;
    if decoder.draws_tokens() {
        decoder.draw(&Draws { draws: vec![Draw::greedy(0)], ..Draws::default() });
        return Ok(decoder.drawn(&mut Vec::new())?);
    }
    decoder.logits(&mut Vec::new());
    Ok(())
}

#[cfg(test)]
mod tests {
    use folio_device::KvFormat;
    use folio_device::cpu::{Cpu, CpuConfig};
    use folio_model::DecoderLimits;

    use super::*;
    use crate::assets::Assets;

    #[test]
    fn phases_in_words() {
        let mut phases = Phases::default();
        phases.add("kernels", Duration::from_millis(1500), Some("prebuilt".into()));
        phases.time("weights", || Ok(())).expect("nothing fails");
        assert_eq!(phases.describe(), "kernels 1.50 s (prebuilt), weights 0.00 s");
        assert_eq!(phases.json()[0]["seconds"], 1.5);
    }

    #[test]
    fn a_first_step_in_little_room() {
        let Ok(assets) = Assets::open(None, &crate::Options::default()) else {
            eprintln!("skipped: this build has no built-in model");
            return;
        };
        for (rows, blocks) in [(8, 1), (16, 1), (200, 7), (200, 6)] {
            let cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).expect("a CPU");
            let groups = assets.model.spec.kv_groups().len();
            let limits = DecoderLimits {
                rows,
                spans: 1,
                outputs: 1,
                table_entries: blocks,
                blocks: vec![blocks; groups],
                kv_format: KvFormat::BF16,
            };
            let mut decoder = Decoder::load(cpu, &assets.model, limits, &mut |_| {}).expect("it loads");
            first_step(&mut decoder).unwrap_or_else(|error| panic!("{rows} rows, {blocks} blocks: {error:#}"));
        }
    }
}
