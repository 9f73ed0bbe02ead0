//! How fast attention runs, against what this machine could do at best in the same minute: `cargo run --release -p
//! folio-device --example attention [threads]`. Prefill is held against the peak of f32 multiply-adds, decode against
//! a plain read of memory.

use std::time::Instant;

use folio_device::cpu::{Cpu, CpuConfig, ceilings};
use folio_device::{
    Attention, BLOCK_TOKENS, Backend, Batch, GroupTables, InputLimits, KvFormat, KvShape, NormSpan, PrepareQkv, Result,
    Span,
};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const ROUNDS: usize = 20;

struct Setup {
    cpu: Cpu,
    kv: <Cpu as Backend>::Kv,
    inputs: <Cpu as Backend>::Inputs,
    qkv: <Cpu as Backend>::Tensor,
    out: <Cpu as Backend>::Tensor,
    layers: usize,
    head_dim: usize,
}

impl Setup {
    /// Sequences of `context` tokens whose last `rows` are in the step, with every block written.
    fn new(
        threads: usize,
        head_dim: usize,
        format: KvFormat,
        layers: usize,
        context: usize,
        rows: usize,
    ) -> Result<Self> {
        let mut cpu = Cpu::new(CpuConfig { threads, isa: None })?;
        let blocks = context.div_ceil(BLOCK_TOKENS);
        let mut kv = cpu.kv(KvShape { layers, blocks, kv_heads: KV_HEADS, head_dim, format })?;
        let mut inputs = cpu.inputs(InputLimits {
            rows: context,
            spans: 1,
            table_entries: blocks,
            groups: 1,
            ropes: 0,
            rope_pairs: 0,
        })?;
        let mut qkv = cpu.tensor(context, (HEADS + 2 * KV_HEADS) * head_dim)?;
        for row in 0..context {
            for (i, value) in qkv.row_mut(row).iter_mut().enumerate() {
                *value = ((row * 31 + i * 17) % 97) as f32 / 97.0 - 0.5;
            }
        }
        let out = cpu.tensor(context, HEADS * head_dim)?;
        let prepare = PrepareQkv {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim,
            group: 0,
            rope: None,
            q_norm: None,
            k_norm: None,
            norm_span: NormSpan::Head,
            eps: 1e-6,
        };
        cpu.upload(&mut inputs, &batch(context, context, blocks));
        for layer in 0..layers {
            cpu.prepare_qkv(&mut qkv, &mut kv, layer, &prepare, &inputs);
        }
        cpu.upload(&mut inputs, &batch(context, rows, blocks));
        Ok(Self { cpu, kv, inputs, qkv, out, layers, head_dim })
    }

    /// Seconds of one pass over all layers.
    fn pass(&mut self) -> f64 {
        let op = Attention {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: self.head_dim,
            group: 0,
            scale: 0.125,
            window: None,
            soft_cap: None,
            sinks: None,
        };
        let start = Instant::now();
        for layer in 0..self.layers {
            self.cpu.attention(&mut self.out, &self.qkv, &self.kv, layer, &op, &self.inputs);
        }
        start.elapsed().as_secs_f64()
    }
}

/// The last `rows` of one sequence; its blocks lie in the pool in an order that skips about.
fn batch(context: usize, rows: usize, blocks: usize) -> Batch {
    let stride = (3..).step_by(2).find(|stride| !blocks.is_multiple_of(*stride)).unwrap_or(1);
    let stride = if blocks.is_power_of_two() { stride } else { 1 };
    let table: Vec<u32> = (0..blocks).map(|entry| (entry * stride % blocks) as u32).collect();
    let slot =
        |position: usize| table[position / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32;
    Batch {
        tokens: vec![0; rows],
        positions: (context - rows..context).map(|position| position as u32).collect(),
        spans: vec![Span { first_row: 0, num_rows: rows as u32, context: context as u32 }],
        groups: vec![GroupTables {
            slots: (context - rows..context).map(slot).collect(),
            blocks: table.clone(),
            first_block: vec![0],
        }],
        outputs: Vec::new(),
    }
}

fn prefill(threads: usize) -> Result<()> {
    println!("prefill of 512 rows, {HEADS} heads on {KV_HEADS}, {threads} threads");
    for (head_dim, format) in [(64, KvFormat::F32), (64, KvFormat::BF16), (128, KvFormat::BF16), (96, KvFormat::F16)] {
        for context in [512, 2048] {
            let rows = 512;
            let mut setup = Setup::new(threads, head_dim, format, 1, context, rows)?;
            let pairs: usize = (context - rows + 1..=context).sum();
            let operations = 4.0 * (HEADS * head_dim * pairs) as f64;
            let (mut best, mut peak) = (f64::INFINITY, 0.0f64);
            for _ in 0..ROUNDS {
                best = best.min(setup.pass());
                peak = peak.max(ceilings::f32_peak(threads));
            }
            let rate = operations / best;
            println!(
                "  head {head_dim:3} {format:?} context {context}: {:6.1} GFLOP/s of {:6.1}: {:3.0} %",
                rate / 1e9,
                peak / 1e9,
                100.0 * rate / peak
            );
        }
    }
    Ok(())
}

fn decode(threads: usize) -> Result<()> {
    println!("decode of one row, {HEADS} heads on {KV_HEADS}, {threads} threads");
    let reader = ceilings::Reader::new(threads, 1 << 29)?;
    for (head_dim, format) in [(64, KvFormat::BF16), (64, KvFormat::F32), (128, KvFormat::F16)] {
        for context in [1024, 4096] {
            let layers = (512 << 20) / (2 * KV_HEADS * head_dim * context * format.bytes());
            let mut setup = Setup::new(threads, head_dim, format, layers, context, 1)?;
            let bytes = (2 * KV_HEADS * head_dim * context * format.bytes() * layers) as f64;
            let (mut best, mut peak) = (f64::INFINITY, 0.0f64);
            for _ in 0..ROUNDS {
                best = best.min(setup.pass());
                peak = peak.max(reader.pass());
            }
            let rate = bytes / best;
            println!(
                "  head {head_dim:3} {format:?} context {context}: {:5.1} GB/s of {:5.1}: {:3.0} %",
                rate / 1e9,
                peak / 1e9,
                100.0 * rate / peak
            );
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let threads = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(2);
    prefill(threads)?;
    decode(threads)
}
