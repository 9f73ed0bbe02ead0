//! Running the rounds: streams started together, every token's arrival noted.

use std::time::{Duration, Instant};

use anyhow::Result;
use folio_device::cuda::driver::StepTime;
use folio_session::Session;

use super::cost::Cost;
use super::rates::Options;
use super::streams::{self, Answer, Ask, ms};
use super::waste::Waste;
use crate::rates::{Ceilings, PerByte, Streams};
use crate::stats::{median, percentile};

/// One concurrency, over all rounds.
pub struct Measured {
    pub streams: usize,
    /// Best time from submission to the first token, of the first stream to have one.
    pub first_token: Duration,
    /// Best rate of all streams together while all of them decode; none if the first ended before
    /// the last began.
    pub decode_tokens_per_s: Option<f64>,
    /// That rate of every round that has one, over the bytes that the device read a second beside
    /// it.
    pub decode_tokens_per_byte: Vec<f64>,
    /// Best rate of output tokens from first submission to last token.
    pub total_tokens_per_s: f64,
    /// The same of prompts' tokens.
    pub input_tokens_per_s: f64,
    /// Gaps between tokens of a stream, over all rounds.
    pub gaps: Vec<Duration>,
    /// Over all rounds.
    pub waste: Waste,
    /// Steps of all rounds, if the device was asked for them.
    pub steps: Vec<StepTime>,
}

impl Measured {
    pub fn new(streams: usize) -> Self {
        Self {
            streams,
            first_token: Duration::MAX,
            decode_tokens_per_s: None,
            decode_tokens_per_byte: Vec::new(),
            total_tokens_per_s: 0.0,
            input_tokens_per_s: 0.0,
            gaps: Vec::new(),
            waste: Waste::default(),
            steps: Vec::new(),
        }
    }

    /// The round's decode rate, if it has one.
    pub fn round(&mut self, session: &Session, args: &Options, round: usize) -> Result<Option<f64>> {
        let vocab = session.assets.model.spec.vocab_size;
        let prompt = |stream| streams::prompt(vocab, args.input_len, round * self.streams + stream);
        let asks = (0..self.streams).map(|stream| Ask::new(prompt(stream), args.output_len)).collect();
        let before = session.engine.stats().occupancy;
        // Two events a step, whose times a profile shows.
        let device = args.profile.then(|| session.device.upgrade()).flatten();
        if let Some(device) = &device {
            device.start_steps();
        }
        let start = Instant::now();
        let answers = streams::together(session, asks)?;
        if let Some(device) = &device {
            self.steps.extend(device.end_steps()?);
        }
        self.waste.add(&before, &session.engine.stats().occupancy);
        let times: Vec<Vec<Instant>> = answers.into_iter().map(|answer: Answer| answer.times).collect();
        Ok(self.take(start, args.input_len, &times))
    }

    /// A round's decode rate beside the bytes read a second just before it and just after.
    pub fn pair(&mut self, tokens_per_s: Option<f64>, [before, after]: [f64; 2]) {
        self.decode_tokens_per_byte.extend(tokens_per_s.map(|rate| rate / ((before + after) / 2.0)));
    }

    /// The figures of all rounds beside the peak rates of the device.
    pub fn figures(&self, args: &Options, cost: &Cost, ceilings: &Ceilings) -> Streams {
        let first = self.first_token.as_secs_f64();
        let prefill = (self.streams == 1).then(|| args.input_len as f64 / first);
        let prefill_flops = cost.prefill_flops(args.input_len) / first;
        let [itl_ms_p50, itl_ms_p95, itl_ms_p99] =
            [50.0, 95.0, 99.0].map(|percent| ms(percentile(&self.gaps, percent).unwrap_or_default()));
        let mut streams = Streams {
            streams: self.streams,
            first_token_ms: first * 1e3,
            prefill_tokens_per_s: prefill,
            prefill_of_bf16_peak: prefill.map(|_| prefill_flops / ceilings.bf16_flops),
            itl_ms_p50,
            itl_ms_p95,
            itl_ms_p99,
            total_tokens_per_s: self.total_tokens_per_s,
            input_tokens_per_s: self.input_tokens_per_s,
            waste: self.waste.share(),
            waste_bound: self.waste.bound(),
            mean_live_length: self.waste.mean_live_length(),
            slots_held: self.waste.slots_held(),
            ..Streams::default()
        };
        let context = args.input_len + args.output_len / 2;
        self.decode(&mut streams, cost.decode_bytes(self.streams), cost.decode_flops(context), ceilings);
        streams
    }

    /// Figures of decoding, where a step reads `bytes` and a token takes `flops`.
    fn decode(&self, streams: &mut Streams, bytes: f64, flops: f64, ceilings: &Ceilings) {
        let Some(tokens_per_s) = self.decode_tokens_per_s else { return };
        let per_byte = median(&self.decode_tokens_per_byte);
        streams.decode_tokens_per_s = Some(tokens_per_s);
        streams.decode_of_read_bandwidth = Some(per_byte.middle / self.streams as f64 * bytes);
        streams.decode_of_bf16_peak = Some(tokens_per_s * flops / ceilings.bf16_flops);
        streams.decode_tokens_per_byte_read = Some(PerByte::new(per_byte, self.decode_tokens_per_byte.clone()));
    }

    fn take(&mut self, start: Instant, input_len: usize, times: &[Vec<Instant>]) -> Option<f64> {
        let firsts = times.iter().filter_map(|stream| stream.first());
        let lasts = times.iter().filter_map(|stream| stream.last());
        let (Some(&first), Some(&all_began)) = (firsts.clone().min(), firsts.max()) else { return None };
        let (Some(&one_ended), Some(&end)) = (lasts.clone().min(), lasts.max()) else { return None };
        self.first_token = self.first_token.min(first - start);
        let decode = (one_ended > all_began).then(|| {
            let within = times.iter().flatten().filter(|&&time| time > all_began && time <= one_ended).count();
            within as f64 / (one_ended - all_began).as_secs_f64()
        });
        self.decode_tokens_per_s = self.decode_tokens_per_s.into_iter().chain(decode).reduce(f64::max);
        let total = times.iter().map(Vec::len).sum::<usize>() as f64 / (end - start).as_secs_f64();
        self.total_tokens_per_s = self.total_tokens_per_s.max(total);
        let input = (times.len() * input_len) as f64 / (end - start).as_secs_f64();
        self.input_tokens_per_s = self.input_tokens_per_s.max(input);
        self.gaps.extend(times.iter().flat_map(|stream| stream.windows(2).map(|pair| pair[1] - pair[0])));
        decode
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_gaps() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut measured = Measured::new(2);
        let times = [vec![at(100), at(110), at(120), at(130)], vec![at(110), at(120), at(130), at(140)]];
        let decode = measured.take(start, 7, &times);
        assert_eq!(decode, measured.decode_tokens_per_s);
        assert_eq!(measured.first_token, Duration::from_millis(100));
        // From 110 to 130 both decode: two tokens of each.
        assert!(measured.decode_tokens_per_s.is_some_and(|rate| (rate - 4.0 / 0.020).abs() < 1e-6));
        assert!((measured.total_tokens_per_s - 8.0 / 0.140).abs() < 1e-6);
        assert!((measured.input_tokens_per_s - 14.0 / 0.140).abs() < 1e-6);
        assert_eq!(measured.gaps, [Duration::from_millis(10); 6]);
        // A slower round has its own rate, and leaves the best as it is; one that ends at once has
        // none.
        let slower = measured.take(start, 7, &[vec![at(100), at(200)], vec![at(100), at(200)]]);
        assert!(slower.is_some_and(|rate| (rate - 2.0 / 0.100).abs() < 1e-6));
        assert_eq!(measured.take(start, 7, &[vec![at(100)], vec![at(100)]]), None);
        assert_eq!(measured.decode_tokens_per_s, decode);
    }

    #[test]
    fn each_round_is_paired_with_the_reads_beside_it() {
        let mut measured = Measured::new(1);
        measured.pair(Some(20.0), [30e9, 50e9]);
        measured.pair(None, [30e9, 50e9]);
        measured.pair(Some(30.0), [60e9, 60e9]);
        assert_eq!(measured.decode_tokens_per_byte, [20.0 / 40e9, 30.0 / 60e9]);
    }

    #[test]
    fn the_share_of_reads_is_the_median_of_pairs() {
        let mut result = Measured::new(2);
        result.decode_tokens_per_s = Some(31.0);
        // The memory is slow for as long as anything decodes, and fast once before: the best read
        // says nothing.
        result.pair(Some(30.0), [32e9, 32e9]);
        result.pair(Some(30.0), [64e9, 32e9]);
        result.pair(Some(31.0), [32e9, 32e9]);
        let ceilings = Ceilings { read_bytes_per_s: 64e9, bf16_flops: 1e12, ..Ceilings::default() };
        let mut figures = Streams::default();
        result.decode(&mut figures, 2e9, 1e9, &ceilings);
        let near =
            |found: Option<f64>, expect: f64| assert!((found.expect("a rate") - expect).abs() < 1e-9, "{found:?}");
        near(figures.decode_of_read_bandwidth, 30.0 / 32.0);
        near(figures.decode_of_bf16_peak, 0.031);
        let per_byte = figures.decode_tokens_per_byte_read.expect("pairs");
        assert_eq!([per_byte.median, per_byte.low, per_byte.high], [30.0 / 32e9, 30.0 / 48e9, 31.0 / 32e9]);
        assert_eq!(per_byte.pairs.len(), 3);
        let mut figures = Streams::default();
        Measured::new(1).decode(&mut figures, 2e9, 1e9, &ceilings);
        assert_eq!(figures, Streams::default());
    }
}
