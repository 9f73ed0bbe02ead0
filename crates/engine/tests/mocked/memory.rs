//! How much of the blocks that running requests hold is used.

use folio_engine::EngineConfig;

use crate::mock::{answer, config, params, start, submit, tokens};

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
        "200 requests, {total} tokens: {found:.5} slots a token at a mean live length of {length:.1} (at most {bound:.5})"
    );
    assert!(found <= bound);
    assert!(length > 100.0 && found > 1.0);
}
