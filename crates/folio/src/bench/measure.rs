//! Running the rounds: streams started together, every token's arrival noted.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use folio_device::cpu::ceilings;
use folio_engine::{Event, FinishReason, SamplingParams};

use crate::args::BenchRun;
use crate::session::Session;

/// A buffer that no cache holds.
const READ_BYTES: usize = 2 << 30;

/// The machine's best so far.
pub struct Ceilings {
    threads: usize,
    reader: ceilings::Reader,
    pub read_bytes_per_s: f64,
    pub bf16_flops: f64,
    pub f32_flops: f64,
}

impl Ceilings {
    pub fn new(threads: usize) -> Result<Self> {
        let reader = ceilings::Reader::new(threads, READ_BYTES)?;
        Ok(Self { threads, reader, read_bytes_per_s: 0.0, bf16_flops: 0.0, f32_flops: 0.0 })
    }

    pub fn measure(&mut self) {
        for _ in 0..2 {
            self.read_bytes_per_s = self.read_bytes_per_s.max(self.reader.pass());
        }
        self.bf16_flops = self.bf16_flops.max(ceilings::bf16_peak(self.threads));
        self.f32_flops = self.f32_flops.max(ceilings::f32_peak(self.threads));
    }
}

/// One concurrency, over all rounds.
pub struct Measured {
    pub streams: usize,
    /// Best time from submission to the first token, of the first stream to have one.
    pub first_token: Duration,
    /// Best rate of all streams together while all of them decode; none if the first ended before the last began.
    pub decode_tokens_per_s: Option<f64>,
    /// Best rate of output tokens from first submission to last token.
    pub total_tokens_per_s: f64,
    /// Gaps between tokens of a stream, over all rounds.
    pub gaps: Vec<Duration>,
}

impl Measured {
    pub fn new(streams: usize) -> Self {
        Self {
            streams,
            first_token: Duration::MAX,
            decode_tokens_per_s: None,
            total_tokens_per_s: 0.0,
            gaps: Vec::new(),
        }
    }

    pub fn round(&mut self, session: &Session, args: &BenchRun, round: usize) -> Result<()> {
        let start = Instant::now();
        let streams: Result<Vec<_>> = (0..self.streams)
            .map(|stream| {
                let params = SamplingParams {
                    temperature: 0.0,
                    max_tokens: args.output_len,
                    ignore_eos: true,
                    ..SamplingParams::default()
                };
                let vocab = session.assets.model.spec.vocab_size;
                let prompt = prompt(vocab, args.input_len, round * self.streams + stream);
                Ok(session.engine.submit(session.engine.request(prompt, params)?)?)
            })
            .collect();
        let readers: Vec<_> = streams?.into_iter().map(|stream| std::thread::spawn(move || arrivals(stream))).collect();
        let mut times = Vec::new();
        for reader in readers {
            times.push(reader.join().map_err(|_| anyhow::anyhow!("a reader failed"))??);
        }
        self.take(start, &times);
        Ok(())
    }

    fn take(&mut self, start: Instant, times: &[Vec<Instant>]) {
        let firsts = times.iter().filter_map(|stream| stream.first());
        let lasts = times.iter().filter_map(|stream| stream.last());
        let (Some(&first), Some(&all_began)) = (firsts.clone().min(), firsts.max()) else { return };
        let (Some(&one_ended), Some(&end)) = (lasts.clone().min(), lasts.max()) else { return };
        self.first_token = self.first_token.min(first - start);
        if one_ended > all_began {
            let within = times.iter().flatten().filter(|&&time| time > all_began && time <= one_ended).count();
            let rate = within as f64 / (one_ended - all_began).as_secs_f64();
            self.decode_tokens_per_s = Some(self.decode_tokens_per_s.map_or(rate, |best| best.max(rate)));
        }
        let total = times.iter().map(Vec::len).sum::<usize>() as f64 / (end - start).as_secs_f64();
        self.total_tokens_per_s = self.total_tokens_per_s.max(total);
        self.gaps.extend(times.iter().flat_map(|stream| stream.windows(2).map(|pair| pair[1] - pair[0])));
    }

    /// The gap that this share of all gaps stays under.
    pub fn gap_percentile(&self, percent: f64) -> Duration {
        let mut gaps = self.gaps.clone();
        gaps.sort_unstable();
        let rank = ((percent / 100.0) * gaps.len() as f64).ceil() as usize;
        gaps.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }
}

fn arrivals(mut stream: folio_engine::RequestStream) -> Result<Vec<Instant>> {
    let mut times = Vec::new();
    while let Some(event) = stream.recv() {
        match event {
            Event::Token { .. } => times.push(Instant::now()),
            Event::Finished { reason: FinishReason::Error(message), .. } => bail!("{message}"),
            Event::Finished { .. } | Event::PromptLogprobs(_) => {}
        }
    }
    Ok(times)
}

/// Tokens without a pattern, different for every stream of every round.
fn prompt(vocab: usize, len: usize, number: usize) -> Vec<u32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64 ^ ((number as u64 + 1) << 32);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as u32 % vocab as u32
    };
    (0..len).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_percentiles() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut measured = Measured::new(2);
        measured.take(start, &[vec![at(100), at(110), at(120), at(130)], vec![at(110), at(120), at(130), at(140)]]);
        assert_eq!(measured.first_token, Duration::from_millis(100));
        // From 110 to 130 both decode: two tokens of each.
        assert!(measured.decode_tokens_per_s.is_some_and(|rate| (rate - 4.0 / 0.020).abs() < 1e-6));
        assert!((measured.total_tokens_per_s - 8.0 / 0.140).abs() < 1e-6);
        assert_eq!(measured.gap_percentile(50.0), Duration::from_millis(10));
    }

    #[test]
    fn prompts_differ() {
        assert_ne!(prompt(100, 32, 0), prompt(100, 32, 1));
        assert_eq!(prompt(100, 32, 3), prompt(100, 32, 3));
        assert!(prompt(7, 1000, 0).iter().all(|&token| token < 7));
    }
}
