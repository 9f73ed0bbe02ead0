//! Rows that are not numbers end their own requests: neither requests in the same step nor later
//! ones in the same blocks are affected.

use folio_device::{Backend, KvFormat};
use folio_engine::{Event, FinishReason, RequestStream, SamplingParams};

use crate::{
    harness::{Answer, Bench, read, submit},
    take_turn,
    tiny::{self, Size},
};

/// A token with an embedding that is not a number.
pub const HOLE: u32 = 7;
const LENGTHS: [usize; 6] = [1, 15, 16, 17, 40, 130];

fn params() -> SamplingParams {
    SamplingParams {
        max_tokens: 10,
        temperature: 0.0,
        logprobs: Some(3),
        ignore_eos: true,
        banned_tokens: vec![HOLE],
        ..SamplingParams::default()
    }
}

fn end(mut stream: RequestStream) -> Option<FinishReason> {
    let events = std::iter::from_fn(|| stream.recv());
    events.filter_map(|event| if let Event::Finished { reason, .. } = event { Some(reason) } else { None }).last()
}

/// On a model with a [`HOLE`].
pub fn check<B: Backend>(name: &str, bench: &Bench<B>) {
    let whole = |seed: usize, len: usize| -> Vec<u32> {
        bench.prompt(seed as u64, len).into_iter().map(|token| if token == HOLE { HOLE + 1 } else { token }).collect()
    };
    let probes = || LENGTHS.iter().enumerate().map(|(seed, &len)| whole(seed, len));
    let engine = bench.start(bench.config());
    let expected: Vec<Answer> = probes().map(|prompt| read(submit(&engine, prompt, params()))).collect();
    let with_hole = |(seed, len): (usize, usize)| {
        let mut prompt = whole(50 + seed, len);
        // Sometimes after good rows, sometimes before them.
        prompt[seed * 5 % len] = HOLE;
        prompt
    };
    for round in 0..2 {
        let bad = |first: usize| {
            let prompts = (first..first + 6).map(|seed| with_hole((seed, 1 + seed * 23 % 90)));
            prompts.map(|prompt| submit(&engine, prompt, params())).collect::<Vec<_>>()
        };
        let before = bad(0);
        let good: Vec<_> = probes().map(|prompt| submit(&engine, prompt, params())).collect();
        let after = bad(6);
        for (stream, expected) in good.into_iter().zip(&expected) {
            assert!(read(stream) == *expected, "{name}: another answer beside rows that are no numbers, round {round}");
        }
        for stream in before.into_iter().chain(after) {
            let end = end(stream);
            assert!(matches!(&end, Some(FinishReason::Error(_))), "{name}: a row that is no number ends in {end:?}");
        }
    }
    assert_eq!(engine.stats().steps_failed, 0, "{name}");
    engine.shutdown();
}

#[test]
fn rows_that_are_no_numbers_harm_nobody_else() {
    let _turn = take_turn();
    let model = tiny::experts_of(&Size { hole: Some(HOLE), ..tiny::SMALL });
    for kv_format in [KvFormat::BF16, KvFormat::Int8] {
        check(&format!("on the CPU, keys in {}", kv_format.name()), &Bench::in_format(&model, 2, kv_format));
    }
}
