//! Measures a step of one sequence by its number of rows, on this machine's CPU: the cost of
//! verifying a draft against that of decode. `cargo run --release -p folio-model --example rows
//! MODEL [threads] [context] [rounds] [rows,rows,...]`.
//!
//! Numbers of rows take turns, so that all see the same conditions, and the best time of each
//! counts. A chain is a draft of one branch; in a tree every row but the first follows the first.

use std::path::Path;
use std::time::Instant;

use folio_device::cpu::{Cpu, CpuConfig};
use folio_device::{BLOCK_TOKENS, Batch, GroupTables, KvFormat, Span, tree};
use folio_model::{Decoder, DecoderLimits, OpenModel};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const ROWS: &str = "1,2,3,4,5,6,7,8,10,12,14,16,32";
const PROMPT_CHUNK: usize = 256;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: usize| args.get(at).map_or(Ok(default), |arg| arg.parse());
    let model = args.first().ok_or("which model?")?;
    let (threads, context, rounds) = (number(1, 2)?, number(2, 256)?, number(3, 40)?);
    let rows: Vec<usize> =
        args.get(4).map_or(ROWS, String::as_str).split(',').map(str::parse).collect::<Result<_, _>>()?;
    let model = folio_model::open(Path::new(model))?;
    let mut decoder = load(&model, threads, context)?;
    for first in (0..context).step_by(PROMPT_CHUNK) {
        decoder.forward_with(&batch(&model, first, PROMPT_CHUNK.min(context - first), false), 0)?;
    }
    // Seconds of the step, and of copying its logits.
    let mut best = [vec![(f64::MAX, f64::MAX); rows.len()], vec![(f64::MAX, f64::MAX); rows.len()]];
    let mut logits = Vec::new();
    for round in 0..rounds {
        for (index, &rows) in rows.iter().enumerate() {
            for is_tree in [false, true] {
                let batch = batch(&model, context, rows, is_tree);
                let started = Instant::now();
                decoder.forward(&batch)?;
                let computed = started.elapsed().as_secs_f64();
                decoder.logits(&mut logits);
                let fetched = started.elapsed().as_secs_f64() - computed;
                let best = &mut best[usize::from(is_tree)][index];
                if round > 0 {
                    *best = (best.0.min(computed), best.1.min(fetched));
                }
            }
        }
    }
    println!("{threads} threads, {context} tokens of context, best of {rounds}");
    println!("{:>4} {:>9} {:>7} {:>9} {:>7} {:>9}", "rows", "chain ms", "to 1", "tree ms", "to 1", "logits ms");
    let one = best[0][0].0;
    for (index, rows) in rows.into_iter().enumerate() {
        let ((chain, fetch), (tree, _)) = (best[0][index], best[1][index]);
        let (chain_ms, tree_ms, fetch_ms) = (1e3 * chain, 1e3 * tree, 1e3 * fetch);
        println!("{rows:4} {chain_ms:9.3} {:7.3} {tree_ms:9.3} {:7.3} {fetch_ms:9.3}", chain / one, tree / one);
    }
    Ok(())
}

fn load(model: &OpenModel, threads: usize, context: usize) -> Result<Decoder<Cpu>> {
    let groups = model.spec.kv_groups().len();
    let blocks = (context + 64).div_ceil(BLOCK_TOKENS);
    let limits = DecoderLimits {
        rows: PROMPT_CHUNK,
        spans: 64,
        outputs: 64,
        table_entries: 64 * blocks,
        blocks: vec![blocks; groups],
        kv_format: KvFormat::BF16,
    };
    let cpu = Cpu::new(CpuConfig { threads, isa: None })?;
    Ok(Decoder::load(cpu, model, limits, &mut |_| {})?)
}

/// `rows` rows behind `first` tokens of one sequence, all with logits.
fn batch(model: &OpenModel, first: usize, rows: usize, is_tree: bool) -> Batch {
    let vocab = model.spec.vocab_size;
    let context = first + rows;
    let parents: Vec<_> = (0..rows).map(|row| (row > 0).then_some(0)).collect();
    let ancestors = if is_tree { tree::ancestors(&parents) } else { Vec::new() };
    let position = |row: usize| if is_tree { first + row.min(1) } else { first + row };
    let group = GroupTables {
        slots: (first..context).map(|place| place as u32).collect(),
        blocks: (0..context.div_ceil(BLOCK_TOKENS) as u32).collect(),
        first_block: vec![0],
    };
    Batch {
        tokens: (first..context).map(|at| ((at * 7919 + 13) % vocab) as u32).collect(),
        positions: (0..rows).map(|row| position(row) as u32).collect(),
        spans: vec![Span { first_row: 0, num_rows: rows as u32, context: context as u32 }],
        ancestors,
        groups: vec![group; model.spec.kv_groups().len()],
        outputs: (0..rows.min(64) as u32).collect(),
    }
}
