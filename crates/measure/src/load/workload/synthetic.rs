//! Random prompts: of known lengths, or of a few prefixes with many endings.

use anyhow::{Result, bail};

use super::{Ask, MAX_TOKENS, Prompt, Segment};
use crate::load::options::{PrefixRepetition, Random};
use crate::load::rng::Rng;

/// Lengths uniform around the requested ones, after a prefix that all share.
pub fn random(lengths: &Random, count: usize, seed: u64) -> Result<Vec<Ask>> {
    let Random { input_len, output_len, range_ratio: ratio, prefix_len } = *lengths;
    if !(0.0..1.0).contains(&ratio) {
        bail!("--random-range-ratio is {ratio}, but must be at least 0 and below 1");
    }
    let input = range(input_len, ratio);
    let output = range(output_len, ratio);
    if prefix_len + input.0 == 0 {
        bail!("--random-input-len, --random-prefix-len and --random-range-ratio allow prompts without a token");
    }
    within_reason(prefix_len + input.1)?;
    within_reason(output.1)?;
    let mut rng = Rng::new(seed);
    let prefix = Segment { seed: rng.next_u64(), len: prefix_len };
    let asks = (0..count).map(|_| {
        let own = Segment { seed: rng.next_u64(), len: rng.between(input.0, input.1) };
        drawn([prefix, own], rng.between(output.0.max(1), output.1.max(1)))
    });
    Ok(asks.collect())
}

/// The same number of prompts for each prefix, in random order.
pub fn prefix_repetition(lengths: &PrefixRepetition, count: usize, seed: u64) -> Result<Vec<Ask>> {
    let PrefixRepetition { prefix_len, suffix_len, num_prefixes: prefixes, output_len } = *lengths;
    if prefixes == 0 || prefixes > count {
        bail!(
            "--prefix-repetition-num-prefixes is {prefixes}, but must be at least 1 and at most --num-prompts, which \
             is {count}"
        );
    }
    if prefix_len + suffix_len == 0 || output_len == 0 {
        bail!("prompts and answers of --prefix-repetition-* must have at least one token");
    }
    within_reason(prefix_len + suffix_len)?;
    within_reason(output_len)?;
    let mut rng = Rng::new(seed);
    let mut asks = Vec::with_capacity(count);
    for _ in 0..prefixes {
        let prefix = Segment { seed: rng.next_u64(), len: prefix_len };
        for _ in 0..count / prefixes {
            asks.push(drawn([prefix, Segment { seed: rng.next_u64(), len: suffix_len }], output_len));
        }
    }
    rng.shuffle(&mut asks);
    Ok(asks)
}

fn drawn(segments: [Segment; 2], output_len: usize) -> Ask {
    let prompt_len = segments.iter().map(|segment| segment.len).sum();
    Ask { prompt: Prompt::Drawn(segments.to_vec()), prompt_len, output_len }
}

fn range(len: usize, ratio: f64) -> (usize, usize) {
    let len = len as f64;
    ((len * (1.0 - ratio)).floor() as usize, (len * (1.0 + ratio)).ceil() as usize)
}

fn within_reason(tokens: usize) -> Result<()> {
    if tokens > MAX_TOKENS {
        bail!("a prompt or answer of {tokens} tokens is more than the {MAX_TOKENS} that are supported");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(ask: &Ask) -> &[Segment] {
        let Prompt::Drawn(segments) = &ask.prompt else { panic!("a drawn prompt") };
        segments
    }

    #[test]
    fn lengths_lie_in_their_range() {
        let lengths = Random { input_len: 100, output_len: 10, range_ratio: 0.25, prefix_len: 7 };
        let asks = random(&lengths, 500, 0).expect("valid");
        let least = |of: fn(&Ask) -> usize| (asks.iter().map(of).min(), asks.iter().map(of).max());
        assert_eq!(least(|ask| ask.prompt_len), (Some(82), Some(132)));
        assert_eq!(least(|ask| ask.output_len), (Some(7), Some(13)));
        assert!(asks.iter().all(|ask| segments(ask)[0] == segments(&asks[0])[0]));
        assert_ne!(segments(&asks[0])[1].seed, segments(&asks[1])[1].seed);
        assert_eq!(asks, random(&lengths, 500, 0).expect("valid"), "a seed repeats");
        assert_ne!(asks, random(&lengths, 500, 1).expect("valid"));
    }

    #[test]
    fn without_a_ratio_lengths_are_exact() {
        let lengths = Random { input_len: 5, output_len: 2, ..Random::default() };
        let asks = random(&lengths, 3, 0).expect("valid");
        assert!(asks.iter().all(|ask| (ask.prompt_len, ask.output_len) == (5, 2)));
    }

    #[test]
    fn each_prefix_has_as_many_endings() {
        let lengths = PrefixRepetition { num_prefixes: 3, suffix_len: 4, ..PrefixRepetition::default() };
        let asks = prefix_repetition(&lengths, 11, 0).expect("valid");
        assert_eq!(asks.len(), 9);
        let mut prefixes: Vec<u64> = asks.iter().map(|ask| segments(ask)[0].seed).collect();
        prefixes.sort_unstable();
        assert!(prefixes.chunk_by(|a, b| a == b).all(|same| same.len() == 3));
        assert!(asks.iter().all(|ask| (ask.prompt_len, ask.output_len) == (260, 128)));
    }

    #[test]
    fn lengths_that_mean_nothing_are_refused() {
        let lengths = Random::default();
        for lengths in [
            Random { range_ratio: 1.0, ..lengths },
            Random { input_len: 0, ..lengths },
            Random { output_len: 99_999_999, ..lengths },
        ] {
            assert!(random(&lengths, 1000, 0).is_err(), "{lengths:?}");
        }
        let lengths = PrefixRepetition::default();
        assert!(prefix_repetition(&lengths, 10, 0).is_ok());
        for (lengths, count) in [
            (PrefixRepetition { num_prefixes: 0, ..lengths }, 1000),
            (lengths, 5),
            (PrefixRepetition { output_len: 0, ..lengths }, 1000),
        ] {
            assert!(prefix_repetition(&lengths, count, 0).is_err(), "{count} of {lengths:?}");
        }
    }
}
