//! Embeddings have the same bits however the prompt was run, and nearly equal those of the
//! reference backend.

use folio_device::{
    Backend, Batch, GroupTables, KvFormat, Span,
    cpu::{Cpu, CpuConfig},
    reference::Reference,
};
use folio_engine::{Engine, EngineConfig, Event, Pooling, SamplingParams};
use folio_model::{Decoder, DecoderLimits, OpenModel};

use crate::{
    harness::{BUDGET, Bench, MAX_LEN, MAX_SEQS, read, submit},
    take_turn, tiny,
};

const LENGTHS: [usize; 4] = [1, 16, 33, 100];
const POOLINGS: [Pooling; 2] = [Pooling::Mean, Pooling::Last];

fn embed(engine: &Engine, prompt: Vec<u32>, pooling: Pooling) -> impl FnOnce() -> Vec<f32> + use<> {
    let mut stream = engine.submit(engine.embedding(prompt, pooling).expect("valid")).expect("room");
    move || match stream.recv() {
        Some(Event::Embedding(vector)) => vector,
        other => panic!("{other:?}"),
    }
}

/// All lengths and poolings at once, among requests that sample.
fn together(bench: &Bench, config: EngineConfig) -> Vec<Vec<f32>> {
    let engine = bench.start(config);
    let beside = |i: u64| {
        let params = SamplingParams { max_tokens: 20, prompt_logprobs: Some(1), ..SamplingParams::default() };
        submit(&engine, bench.prompt(900 + i, 10 + 7 * i as usize), params)
    };
    let others: Vec<_> = (0..6).map(beside).collect();
    let start = |len: usize| POOLINGS.map(|pooling| embed(&engine, bench.prompt(len as u64, len), pooling));
    let pending: Vec<_> = LENGTHS.into_iter().flat_map(start).collect();
    let vectors = pending.into_iter().map(|finish| finish()).collect();
    others.into_iter().for_each(|stream| drop(read(stream)));
    engine.shutdown();
    vectors
}

/// Each alone, in one step if its length allows.
fn alone(bench: &Bench, config: EngineConfig) -> Vec<Vec<f32>> {
    let engine = bench.start(config);
    let run = |len: usize| POOLINGS.map(|pooling| embed(&engine, bench.prompt(len as u64, len), pooling)());
    let vectors = LENGTHS.into_iter().flat_map(run).collect();
    engine.shutdown();
    vectors
}

/// One step of a decoder for nothing else, with its rows added in a plain loop.
fn plainly<B: Backend>(backend: B, model: &OpenModel, prompt: &[u32]) -> [Vec<f64>; 2] {
    let (groups, blocks) = (model.spec.kv_groups().len(), MAX_LEN / 16);
    let limits = DecoderLimits {
        rows: BUDGET,
        spans: 1,
        outputs: MAX_LEN,
        table_entries: blocks,
        blocks: vec![blocks; groups],
        kv_format: KvFormat::BF16,
    };
    let mut decoder = Decoder::load(backend, model, limits, &mut |_| {}).expect("the model loads");
    let rows: Vec<u32> = (0..prompt.len() as u32).collect();
    let blocks = (0..prompt.len().div_ceil(16) as u32).collect();
    let group = GroupTables { slots: rows.clone(), blocks, first_block: vec![0] };
    let len = prompt.len() as u32;
    let batch = Batch {
        tokens: prompt.to_vec(),
        positions: rows.clone(),
        spans: vec![Span { first_row: 0, num_rows: len, context: len }],
        ancestors: Vec::new(),
        groups: vec![group; groups],
        outputs: rows,
    };
    decoder.forward_with(&batch, 0).expect("a sound step");
    let mut hidden = Vec::new();
    decoder.hidden(&mut hidden);
    let width = model.spec.hidden;
    let column = |i: usize| hidden.chunks_exact(width).map(move |row| f64::from(row[i]));
    let mean = (0..width).map(|i| column(i).sum::<f64>() / prompt.len() as f64).collect();
    let last = hidden[hidden.len() - width..].iter().copied().map(f64::from).collect();
    [mean, last]
}

/// Relative to the expected vector's length.
fn distance(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let off: f64 = found.iter().zip(expected).map(|(found, expected)| (f64::from(*found) - expected).powi(2)).sum();
    (off / expected.iter().map(|value| value * value).sum::<f64>()).sqrt()
}

fn check(name: &str, model: &OpenModel) {
    let _turn = take_turn();
    let bits = |vectors: &[Vec<f32>]| -> Vec<Vec<u32>> {
        vectors.iter().map(|vector| vector.iter().map(|value| value.to_bits()).collect()).collect()
    };
    let bench = Bench::new(model, 1);
    let config = || EngineConfig { embedding_width: model.spec.hidden, ..bench.config() };
    let expected = alone(&bench, config());
    for (found, len) in expected.chunks_exact(2).zip(LENGTHS) {
        let prompt = bench.prompt(len as u64, len);
        let cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).expect("a CPU");
        // The same arithmetic with another order of addition; and another backend, which does not
        // round between operations.
        for (plain, most) in [(plainly(cpu, model, &prompt), 1e-5), (plainly(Reference::new(), model, &prompt), 0.2)] {
            for (found, plain) in found.iter().zip(plain) {
                let part = distance(found, &plain);
                assert!(part < most, "{name}: {len} tokens are off by {part} of their length");
            }
        }
    }
    for threads in [1, 2] {
        let bench = Bench::new(model, threads);
        let same = |found: Vec<Vec<f32>>, how: &str| {
            assert!(bits(&found) == bits(&expected), "{name}: {how} on {threads} threads gives other vectors");
        };
        same(alone(&bench, config()), "alone");
        same(together(&bench, config()), "in a batch");
        same(together(&bench, EngineConfig { overlap: false, ..config() }), "without overlap");
        for chunk in [7, 64] {
            same(
                together(&bench, EngineConfig { max_chunk: Some(chunk), ..config() }),
                &format!("in chunks of {chunk}"),
            );
        }
        let config = EngineConfig { force_preempt_every: Some(3), max_seqs: MAX_SEQS, ..config() };
        for prefix_caching in [false, true] {
            same(together(&bench, EngineConfig { prefix_caching, ..config.clone() }), "after forced preemption");
        }
    }
}

#[test]
fn embeddings_of_a_model_with_two_block_tables() {
    check("tiny alternating", &tiny::alternating());
}

#[test]
fn embeddings_of_a_model_with_experts() {
    check("tiny experts", &tiny::experts());
}
