//! Measures the speed of attention against this machine's peaks in the same minute:
//! `cargo run --release -p folio-device --example attention [threads]`. Prefill is compared with
//! the peak of f32 multiply-adds, decode with a plain read of memory, and the formats of keys and
//! values with each other at one long context.

use std::time::Instant;

use folio_device::cpu::{Cpu, CpuConfig, ceilings};
use folio_device::{
    Attention, BLOCK_TOKENS, Batch, GroupTables, Handles, InputLimits, KvFormat, KvShape, Memory, NormSpan, Operations,
    PrepareQkv, Result, Span, Steps, TensorKind,
};

/// Query heads, and KV heads.
type Heads = (usize, usize);

const HEADS: Heads = (32, 8);
const ROUNDS: usize = 20;

struct Setup {
    cpu: Cpu,
    kv: <Cpu as Handles>::Kv,
    inputs: <Cpu as Handles>::Inputs,
    qkv: <Cpu as Handles>::Tensor,
    out: <Cpu as Handles>::Tensor,
    heads: Heads,
    head_dim: usize,
    /// The shortest time of each layer so far: a layer is short enough to run without interference.
    best: Vec<f64>,
}

impl Setup {
    /// Sequences of `context` tokens with their last `rows` in the step, and every block written.
    fn new(
        threads: usize,
        heads: Heads,
        head_dim: usize,
        format: KvFormat,
        layers: usize,
        context: usize,
        rows: usize,
    ) -> Result<Self> {
        let mut cpu = Cpu::new(CpuConfig { threads, isa: None })?;
        let blocks = context.div_ceil(BLOCK_TOKENS);
        let mut kv = cpu.kv(KvShape { layers, blocks, kv_heads: heads.1, head_dim, format })?;
        let mut inputs = cpu.inputs(InputLimits {
            rows: context,
            spans: 1,
            outputs: 0,
            table_entries: blocks,
            groups: 1,
            ropes: 0,
            rope_pairs: 0,
        })?;
        let mut qkv = cpu.tensor(context, (heads.0 + 2 * heads.1) * head_dim, TensorKind::Activation)?;
        for row in 0..context {
            for (i, value) in qkv.row_mut(row).iter_mut().enumerate() {
                *value = ((row * 31 + i * 17) % 97) as f32 / 97.0 - 0.5;
            }
        }
        let out = cpu.tensor(context, heads.0 * head_dim, TensorKind::Activation)?;
        cpu.upload(&mut inputs, &batch(context, context, blocks));
        for layer in 0..layers {
            cpu.prepare_qkv(&mut qkv, &mut kv, layer, prepare(heads, head_dim), &inputs);
        }
        cpu.upload(&mut inputs, &batch(context, rows, blocks));
        Ok(Self { cpu, kv, inputs, qkv, out, heads, head_dim, best: vec![f64::INFINITY; layers] })
    }

    /// Seconds of storing the step's rows in all layers.
    fn store(&mut self) -> f64 {
        let start = Instant::now();
        for layer in 0..self.best.len() {
            self.cpu.prepare_qkv(&mut self.qkv, &mut self.kv, layer, prepare(self.heads, self.head_dim), &self.inputs);
        }
        start.elapsed().as_secs_f64()
    }

    /// Runs one more pass; returns the sum of all layers' best times in seconds.
    fn pass(&mut self) -> f64 {
        let op = |(heads, kv_heads): Heads, head_dim| Attention {
            heads,
            kv_heads,
            head_dim,
            group: 0,
            scale: 0.125,
            window: None,
            soft_cap: None,
            sinks: None,
        };
        for (layer, best) in self.best.iter_mut().enumerate() {
            let start = Instant::now();
            let op = op(self.heads, self.head_dim);
            self.cpu.attention(&mut self.out, &self.qkv, &self.kv, layer, op, &self.inputs);
            *best = best.min(start.elapsed().as_secs_f64());
        }
        self.best.iter().sum()
    }
}

fn prepare(heads: Heads, head_dim: usize) -> PrepareQkv<'static, Cpu> {
    PrepareQkv {
        heads: heads.0,
        kv_heads: heads.1,
        head_dim,
        group: 0,
        rope: None,
        q_norm: None,
        k_norm: None,
        norm_span: NormSpan::Head,
        eps: 1e-6,
    }
}

/// The last `rows` of one sequence; its blocks are scattered over the pool.
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
        ancestors: Vec::new(),
        groups: vec![GroupTables {
            slots: (context - rows..context).map(slot).collect(),
            blocks: table.clone(),
            first_block: vec![0],
        }],
        outputs: Vec::new(),
    }
}

fn prefill(threads: usize) -> Result<()> {
    println!("prefill of 512 rows, {} heads on {}, {threads} threads", HEADS.0, HEADS.1);
    let coded = [KvFormat::Fp8, KvFormat::Int8, KvFormat::Int4].map(|format| (64, format));
    let plain = [(64, KvFormat::F32), (64, KvFormat::BF16), (128, KvFormat::BF16), (96, KvFormat::F16)];
    for (head_dim, format) in plain.into_iter().chain(coded) {
        for context in [512, 2048] {
            let rows = 512;
            let mut setup = Setup::new(threads, HEADS, head_dim, format, 1, context, rows)?;
            let pairs: usize = (context - rows + 1..=context).sum();
            let operations = 4.0 * (HEADS.0 * head_dim * pairs) as f64;
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
    println!("decode of one row, {} heads on {}, {threads} threads", HEADS.0, HEADS.1);
    let reader = ceilings::Reader::new(threads, 1 << 29)?;
    for (head_dim, format) in [(64, KvFormat::BF16), (64, KvFormat::F32), (128, KvFormat::F16)] {
        for context in [1024, 4096] {
            let token_bytes = 2 * HEADS.1 * format.head_bytes(head_dim);
            let layers = (512 << 20) / (token_bytes * context);
            let mut setup = Setup::new(threads, HEADS, head_dim, format, layers, context, 1)?;
            let bytes = (token_bytes * context * layers) as f64;
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

/// Decode at one long context in every format, in turns, so that other load on the machine affects
/// all alike.
fn formats(threads: usize) -> Result<()> {
    const CONTEXT: usize = 3500;
    const FORMATS: [KvFormat; 4] = [KvFormat::BF16, KvFormat::Fp8, KvFormat::Int8, KvFormat::Int4];
    let reader = ceilings::Reader::new(threads, 1 << 28)?;
    for (heads, head_dim) in [((32, 8), 64), ((8, 2), 64), ((32, 8), 128)] {
        println!(
            "decode of one row at {CONTEXT} tokens, {} heads on {} of {head_dim}, {threads} threads",
            heads.0, heads.1
        );
        // Enough layers to make the smallest storage several times the cache.
        let layers = (256 << 20) / (2 * heads.1 * KvFormat::BF16.head_bytes(head_dim) * CONTEXT);
        let setup = |format| Setup::new(threads, heads, head_dim, format, layers, CONTEXT, 1);
        let mut setups = FORMATS.into_iter().map(setup).collect::<Result<Vec<_>>>()?;
        let (mut passes, mut stores) = ([f64::INFINITY; 4], [f64::INFINITY; 4]);
        let mut peak = 0.0f64;
        for _ in 0..ROUNDS {
            for (at, setup) in setups.iter_mut().enumerate() {
                passes[at] = passes[at].min(setup.pass());
                stores[at] = stores[at].min(setup.store());
            }
            peak = peak.max(reader.pass());
        }
        for (at, format) in FORMATS.into_iter().enumerate() {
            let rate = (2 * heads.1 * format.head_bytes(head_dim) * CONTEXT * layers) as f64 / passes[at];
            println!(
                "  {:4}: {:7.1} us a layer, {:4.2} x bf16, {:5.1} GB/s of {:5.1} ({:3.0} %); storing {:4.1} us",
                format.name(),
                passes[at] / layers as f64 * 1e6,
                passes[0] / passes[at],
                rate / 1e9,
                peak / 1e9,
                100.0 * rate / peak,
                stores[at] / layers as f64 * 1e6
            );
        }
    }
    Ok(())
}

/// `attention [threads] [prefill | decode | formats]`; without a name, all of them.
fn main() -> Result<()> {
    let threads = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(2);
    let only = std::env::args().nth(2);
    let wanted = |name: &str| only.as_deref().is_none_or(|only| only == name);
    for (name, run) in [("prefill", prefill as fn(usize) -> Result<()>), ("decode", decode), ("formats", formats)] {
        if wanted(name) {
            run(threads)?;
        }
    }
    Ok(())
}
