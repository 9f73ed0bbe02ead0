//! Steps on the CPU allocate no memory once a step of their size has run.
//!
//! This is one test in a program of its own, since other tests beside it would be counted too.
#![allow(unsafe_code)] // a global allocator that counts

#[allow(dead_code)]
#[path = "../golden/file.rs"]
mod file;
#[allow(dead_code)]
#[path = "../golden/generator.rs"]
mod generator;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use file::Golden;
use folio_device::cpu::{Cpu, CpuConfig};
use folio_device::{BLOCK_TOKENS, Batch, GroupTables, KvFormat, Span};
use folio_model::{Config, Decoder, DecoderLimits, OpenModel};

struct Counting;

static TAKEN: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; only the number of calls is counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.fetch_add(1, SeqCst);
        // SAFETY: the caller's promises are passed on unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on unchanged.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Sequences of a step, and the most tokens of each.
const SEQUENCES: usize = 3;
const TOKENS: usize = 2 * BLOCK_TOKENS;
/// Number of tries for a step; one of them must allocate nothing.
const TRIES: usize = 5;

/// Every sequence has `rows` rows behind `first` tokens.
fn batch(golden: &Golden, groups: usize, first: usize, rows: usize) -> Batch {
    let context = first + rows;
    let blocks = TOKENS / BLOCK_TOKENS;
    let used = context.div_ceil(BLOCK_TOKENS);
    let places = |sequence: usize| (first..context).map(move |place| (sequence * TOKENS + place) as u32);
    let group = GroupTables {
        slots: (0..SEQUENCES).flat_map(places).collect(),
        blocks: (0..SEQUENCES)
            .flat_map(|sequence| sequence * blocks..sequence * blocks + used)
            .map(|b| b as u32)
            .collect(),
        first_block: (0..SEQUENCES).map(|sequence| (sequence * used) as u32).collect(),
    };
    let span =
        |sequence: usize| Span { first_row: (sequence * rows) as u32, num_rows: rows as u32, context: context as u32 };
    Batch {
        tokens: golden.prompt[first..context].repeat(SEQUENCES),
        positions: (0..SEQUENCES).flat_map(|_| first as u32..context as u32).collect(),
        spans: (0..SEQUENCES).map(span).collect(),
        ancestors: Vec::new(),
        groups: vec![group; groups],
        outputs: (0..SEQUENCES).map(|sequence| ((sequence + 1) * rows - 1) as u32).collect(),
    }
}

/// Number of allocations of the first steps, which are permitted; or the later step that allocated.
fn check(golden: &Golden, kv_format: KvFormat) -> Result<usize, String> {
    let config = Config::from_json("config.json", &golden.config.to_string()).map_err(|e| e.to_string())?;
    let model = OpenModel::from_parsed(&config, Box::new(golden.weights())).map_err(|e| e.to_string())?;
    let groups = model.spec.kv_groups().len();
    let blocks = SEQUENCES * TOKENS / BLOCK_TOKENS;
    let limits = DecoderLimits {
        rows: SEQUENCES * TOKENS,
        spans: SEQUENCES,
        outputs: SEQUENCES,
        table_entries: blocks,
        blocks: vec![blocks; groups],
        kv_format,
    };
    let cpu = Cpu::new(CpuConfig { threads: 2, isa: None }).map_err(|e| e.to_string())?;
    let mut decoder = Decoder::load(cpu, &model, limits, &mut |_| ()).map_err(|e| e.to_string())?;
    // A prompt of more than a block, and tokens behind it.
    let prompt = BLOCK_TOKENS + 1;
    let mut logits = Vec::new();
    let mut step = |first: usize, rows: usize| -> Result<usize, String> {
        let batch = batch(golden, groups, first, rows);
        let before = TAKEN.load(SeqCst);
        decoder.forward(&batch).map_err(|e| e.to_string())?;
        decoder.logits(&mut logits);
        Ok(TAKEN.load(SeqCst) - before)
    };
    let at_first = step(0, prompt)? + step(prompt, 1)?;
    for (first, rows) in [(0, prompt), (prompt, 1), (prompt + 1, 1), (prompt + 2, 2)] {
        // On a busy machine a thread of the pool may start late, and allocates then.
        let mut taken = usize::MAX;
        for _ in 0..TRIES {
            taken = taken.min(step(first, rows)?);
        }
        if taken > 0 {
            return Err(format!("{rows} rows a sequence behind {first} took memory {taken} times"));
        }
    }
    Ok(at_first)
}

#[test]
fn a_step_takes_no_memory() {
    let seeded = file::folder().join("../quantized/seeded");
    let goldens: Vec<Golden> = file::all().into_iter().chain(file::all_in(&seeded)).collect();
    assert!(goldens.len() > 26, "{} golden files", goldens.len());
    let (mut at_first, mut failures) = (0, Vec::new());
    for golden in &goldens {
        for format in [KvFormat::BF16, KvFormat::Int8] {
            match check(golden, format) {
                Ok(taken) => at_first += taken,
                Err(problem) => failures.push(format!("{} with {}: {problem}", golden.name, format.name())),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(at_first > 0, "nothing is counted");
}
