//! Prompts that are drawn: of known lengths, or of a few prefixes with many endings.

use anyhow::{Result, bail};

use super::{Ask, MAX_TOKENS, Prompt, Segment};
use crate::args::DatasetArgs;
use crate::bench::serve::rng::Rng;

/// Lengths uniform around the ones asked for, after a prefix that all share.
pub fn random(args: &DatasetArgs) -> Result<Vec<Ask>> {
    let ratio = args.random_range_ratio;
    if !(0.0..1.0).contains(&ratio) {
        bail!("--random-range-ratio is {ratio}, but must be at least 0 and below 1");
    }
    let input = range(args.random_input_len, ratio);
    let output = range(args.random_output_len, ratio);
    if args.random_prefix_len + input.0 == 0 {
        bail!("--random-input-len, --random-prefix-len and --random-range-ratio allow prompts without a token");
    }
    within_reason(args.random_prefix_len + input.1)?;
    within_reason(output.1)?;
    let mut rng = Rng::new(args.seed);
    let prefix = Segment { seed: rng.next_u64(), len: args.random_prefix_len };
    let asks = (0..args.num_prompts).map(|_| {
        let own = Segment { seed: rng.next_u64(), len: rng.between(input.0, input.1) };
        drawn([prefix, own], rng.between(output.0.max(1), output.1.max(1)))
    });
    Ok(asks.collect())
}

/// As many prompts of each prefix as divide evenly, in random order.
pub fn prefix_repetition(args: &DatasetArgs) -> Result<Vec<Ask>> {
    let (prefix_len, suffix_len) = (args.prefix_repetition_prefix_len, args.prefix_repetition_suffix_len);
    let (prefixes, output_len) = (args.prefix_repetition_num_prefixes, args.prefix_repetition_output_len);
    if prefixes == 0 || prefixes > args.num_prompts {
        bail!(
            "--prefix-repetition-num-prefixes is {prefixes}, but must be at least 1 and at most --num-prompts, which \
             is {}",
            args.num_prompts
        );
    }
    if prefix_len + suffix_len == 0 || output_len == 0 {
        bail!("prompts and answers of --prefix-repetition-* must have at least one token");
    }
    within_reason(prefix_len + suffix_len)?;
    within_reason(output_len)?;
    let mut rng = Rng::new(args.seed);
    let mut asks = Vec::with_capacity(args.num_prompts);
    for _ in 0..prefixes {
        let prefix = Segment { seed: rng.next_u64(), len: prefix_len };
        for _ in 0..args.num_prompts / prefixes {
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
    use crate::bench::serve::tests::dataset;

    fn segments(ask: &Ask) -> &[Segment] {
        let Prompt::Drawn(segments) = &ask.prompt else { panic!("a drawn prompt") };
        segments
    }

    #[test]
    fn lengths_lie_in_their_range() {
        let flags = "--num-prompts 500 --random-input-len 100 --random-output-len 10 --random-range-ratio 0.25 \
                     --random-prefix-len 7";
        let asks = random(&dataset(flags)).expect("valid");
        let least = |of: fn(&Ask) -> usize| (asks.iter().map(of).min(), asks.iter().map(of).max());
        assert_eq!(least(|ask| ask.prompt_len), (Some(82), Some(132)));
        assert_eq!(least(|ask| ask.output_len), (Some(7), Some(13)));
        assert!(asks.iter().all(|ask| segments(ask)[0] == segments(&asks[0])[0]));
        assert_ne!(segments(&asks[0])[1].seed, segments(&asks[1])[1].seed);
        assert_eq!(asks, random(&dataset(flags)).expect("valid"), "a seed repeats");
        assert_ne!(asks, random(&dataset(&format!("{flags} --seed 1"))).expect("valid"));
    }

    #[test]
    fn without_a_ratio_lengths_are_exact() {
        let asks = random(&dataset("--num-prompts 3 --random-input-len 5 --random-output-len 2")).expect("valid");
        assert!(asks.iter().all(|ask| (ask.prompt_len, ask.output_len) == (5, 2)));
    }

    #[test]
    fn each_prefix_has_as_many_endings() {
        let flags = "--num-prompts 11 --prefix-repetition-num-prefixes 3 --prefix-repetition-suffix-len 4";
        let asks = prefix_repetition(&dataset(flags)).expect("valid");
        assert_eq!(asks.len(), 9);
        let mut prefixes: Vec<u64> = asks.iter().map(|ask| segments(ask)[0].seed).collect();
        prefixes.sort_unstable();
        assert!(prefixes.chunk_by(|a, b| a == b).all(|same| same.len() == 3));
        assert!(asks.iter().all(|ask| (ask.prompt_len, ask.output_len) == (260, 128)));
    }

    #[test]
    fn lengths_that_mean_nothing_are_refused() {
        for flags in ["--random-range-ratio 1", "--random-input-len 0", "--random-output-len 99999999"] {
            assert!(random(&dataset(flags)).is_err(), "{flags}");
        }
        for flags in ["--prefix-repetition-num-prefixes 0", "--num-prompts 5", "--prefix-repetition-output-len 0"] {
            assert!(prefix_repetition(&dataset(flags)).is_err(), "{flags}");
        }
    }
}
