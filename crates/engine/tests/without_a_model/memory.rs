//! The used part of running requests' blocks, and the log lines of preemptions.

use std::sync::atomic::{AtomicU64, Ordering};

use folio_engine::EngineConfig;

use crate::mock::{answer, config, params, reference, start, submit, tokens};

#[test]
fn at_most_half_a_block_a_request_is_wasted() {
    let engine = start(EngineConfig { max_seqs: 32, budget_tokens: 256, ..config(4096) });
    let streams: Vec<_> = (0..200u64)
        .map(|i| {
            let len = 64 + tokens(i, 1)[0] as usize % 961;
            let prompt_len = len / 4 + tokens(i, 2)[1] as usize % (len / 2);
            submit(&engine, tokens(1000 + i, prompt_len), params(len - prompt_len))
        })
        .collect();
    let total: usize = streams
        .into_iter()
        .map(|stream| {
            let usage = answer(stream).usage;
            usage.prompt_tokens + usage.completion_tokens
        })
        .sum();
    let occupancy = engine.stats().occupancy;
    let (found, length) = (occupancy.slots_per_token(), occupancy.mean_live_length());
    let bound = 1.0 + 8.0 / length;
    println!(
        "200 requests, {total} tokens: {found:.5} slots a token at a mean live length of {length:.1} \
         (at most {bound:.5})"
    );
    assert!(found <= bound);
    assert!(length > 100.0 && found > 1.0);
}

#[test]
fn who_gives_way_is_explained_and_counted() {
    static LINES: AtomicU64 = AtomicU64::new(0);
    let debug = |line: std::fmt::Arguments<'_>| {
        assert!(line.to_string().starts_with("request 0 is preempted"), "{line}");
        LINES.fetch_add(1, Ordering::SeqCst);
    };
    let engine = start(EngineConfig { force_preempt_every: Some(3), debug: Some(debug), ..config(32) });
    let found = answer(submit(&engine, tokens(0, 20), params(12)));
    assert_eq!(found.tokens, reference(&tokens(0, 20), 12));
    assert!(found.usage.preemptions > 0);
    assert_eq!(LINES.load(Ordering::SeqCst), u64::from(found.usage.preemptions));
}
