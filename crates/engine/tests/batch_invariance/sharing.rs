//! Sharing, copying and freeing blocks changes no answer: prefix hits, samples of one prompt,
//! blocks in the host tier, blocks behind a window.

use folio_device::Backend;
use folio_engine::{Engine, EngineConfig, GroupConfig, RequestStream, SamplingParams};

use crate::{
    harness::{Answer, Bench, read, read_samples, submit},
    tiny,
};

/// A hit ends with a block; the prompt ends there or one token before or after.
pub fn check_prefix_hits<B: Backend>(name: &str, bench: &Bench<B>, num_tokens: usize) {
    let params = |len: usize| SamplingParams {
        max_tokens: num_tokens,
        temperature: if len.is_multiple_of(2) { 0.0 } else { 0.9 },
        seed: 5,
        logprobs: Some(4),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let cold = bench.start(bench.config());
    let warm = bench.start(EngineConfig { prefix_caching: true, ..bench.config() });
    let document = bench.prompt(77, 96);
    // The engines share one KV memory, so the cold one must end before the warm one writes.
    let lengths = [31, 32, 33, 63, 64, 65];
    let expected: Vec<Answer> =
        lengths.iter().map(|&len| read(submit(&cold, document[..len].to_vec(), params(len)))).collect();
    cold.shutdown();
    read(submit(&warm, document.clone(), params(1)));
    for (&len, expected) in lengths.iter().zip(&expected) {
        let found = read(submit(&warm, document[..len].to_vec(), params(len)));
        assert_eq!(found.cached_tokens, (len - 1) / 16 * 16, "{name}: prompt of {len}");
        let found = Answer { cached_tokens: 0, ..found };
        assert!(found == *expected, "{name}: a prefix hit changes the answer to a prompt of {len}");
    }
    warm.shutdown();
}

/// Samples of one prompt share its blocks, the partial one included, and each equals the sample
/// without sharing.
pub fn check_samples<B: Backend>(name: &str, bench: &Bench<B>, num_tokens: usize) {
    let params = |temperature: f32, n: usize| SamplingParams {
        max_tokens: num_tokens,
        temperature,
        seed: 9,
        n,
        logprobs: Some(4),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let run = |temperature: f32, n: usize, overlap: bool| {
        let engine = bench.start(EngineConfig { prefix_caching: true, overlap, ..bench.config() });
        let answers = read_samples(submit(&engine, bench.prompt(8, 37), params(temperature, n)), n);
        let cached: Vec<usize> = answers.iter().map(|a| a.cached_tokens).collect();
        assert_eq!(cached, (0..n).map(|i| if i == 0 { 0 } else { 36 }).collect::<Vec<_>>(), "{name}");
        engine.shutdown();
        answers.into_iter().map(|a| Answer { cached_tokens: 0, ..a }).collect::<Vec<_>>()
    };
    for overlap in [true, false] {
        let (alone, greedy) = (run(0.0, 1, overlap), run(0.0, 4, overlap));
        assert!(greedy.iter().all(|a| *a == alone[0]), "{name}: sharing a prompt's blocks changes a greedy sample");
    }
    let drawn = run(1.0, 4, true);
    assert!(drawn[0] == run(1.0, 1, true)[0], "{name}: other samples change the first");
    assert!(drawn == run(1.0, 4, false), "{name}: overlap changes a sample");
    assert!(drawn.iter().skip(1).any(|other| other.tokens != drawn[0].tokens), "{name}: samples are copies");
}

/// A small pool for many requests: preempted ones find their blocks in the host tier. Answers are
/// longer than admission foresees, or none would be preempted.
pub fn check_host_swap<B: Backend>(name: &str, bench: &Bench<B>) {
    let params = |seed: u64| SamplingParams {
        max_tokens: 36,
        temperature: if seed.is_multiple_of(2) { 0.0 } else { 0.9 },
        seed,
        logprobs: Some(4),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let submit_all = |engine: &Engine| -> Vec<RequestStream> {
        (0..8).map(|i| submit(engine, bench.prompt(i, 31), params(i))).collect()
    };
    let roomy = bench.start(bench.config());
    let expected: Vec<Answer> = submit_all(&roomy).into_iter().map(read).collect();
    roomy.shutdown();
    for overlap in [true, false] {
        let config = EngineConfig { groups: bench.groups(12), prefix_caching: true, overlap, ..bench.config() };
        let engine = bench.start(bench.with_host(config));
        let found: Vec<Answer> = submit_all(&engine).into_iter().map(read).collect();
        let stats = engine.stats().scheduler;
        assert!(stats.preemptions > 0, "{name}: the pool is too large to test anything");
        assert!(stats.groups[0].host_slots_used > 0, "{name}: nothing went to the host tier");
        println!(
            "{name}: {} preemptions, {} blocks in the host tier",
            stats.preemptions, stats.groups[0].host_slots_used
        );
        assert!(found == expected, "{name}: swapped to the host tier, another answer");
        engine.shutdown();
    }
}

/// A layer with a window frees the blocks behind it: the answer equals that with all blocks.
#[test]
fn blocks_out_of_the_window_are_not_missed() {
    let bench = Bench::new(&tiny::alternating(), 2);
    let params = |seed: u64| SamplingParams {
        max_tokens: 60,
        temperature: if seed.is_multiple_of(2) { 0.0 } else { 0.9 },
        seed,
        logprobs: Some(4),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let run = |groups: Vec<GroupConfig>, overlap: bool, max_chunk: usize| {
        let max_chunk = Some(max_chunk);
        let engine = bench.start(EngineConfig { groups, overlap, max_chunk, ..bench.config() });
        let streams: Vec<_> =
            (0..6).map(|i| submit(&engine, bench.prompt(i, 30 + 25 * i as usize), params(i))).collect();
        let answers: Vec<Answer> = streams.into_iter().map(read).collect();
        let preemptions = engine.stats().scheduler.preemptions;
        engine.shutdown();
        (answers, preemptions)
    };
    let kept = |group: GroupConfig| GroupConfig { window: None, ..group };
    let (expected, _) = run(bench.groups(160).into_iter().map(kept).collect(), false, 512);
    let windowed = bench.groups(160).iter().position(|group| group.window.is_some()).expect("a window");
    // Six sequences of up to 215 tokens need 69 blocks; with a window of 24 and chunks of 16, six
    // blocks each are plenty.
    for (blocks, overlap, chunk) in [(160, true, 512), (160, false, 16), (36, true, 16), (36, false, 16), (36, true, 1)]
    {
        let mut groups = bench.groups(160);
        groups[windowed].blocks = blocks;
        let (found, preemptions) = run(groups, overlap, chunk);
        assert!(found == expected, "{blocks} blocks, overlap {overlap}, chunks of {chunk}: another answer");
        assert_eq!(preemptions, 0, "{blocks} blocks, overlap {overlap}, chunks of {chunk}");
    }
}
