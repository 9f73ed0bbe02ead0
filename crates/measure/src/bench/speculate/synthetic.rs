//! Guesses of a known agreement, so that nothing but the cost of drafts is measured: each request
//! is biased to one token of its own, which a draft names with a given chance. By theory a pass
//! then gives `(1 - a^(k+1)) / (1 - a)` tokens a stream, and a device on which drafts cost nothing
//! is as much faster.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use folio_device::cuda::driver::StepTime;
use folio_engine::speculate::Synthetic;
use folio_session::{Method, Session};
use serde_json::{Value, json};

use super::super::streams::{self, Ask, ms};
use super::{Options, check};
use crate::stats::percentile;
use crate::table;

/// The bias of the request's token; more than any logit.
const BIAS: f32 = 100.0;
const MOST: usize = 4;

/// Rates of plain decoding and with drafts, for each number of streams, beside the theory.
pub struct Report {
    name: String,
    device: String,
    input_len: usize,
    output_len: usize,
    agreement: f64,
    most: usize,
    lines: Vec<Line>,
}

struct Line {
    json: Value,
    cells: Vec<String>,
}

/// Drafts are accepted with the probability `agreement`; [`Options::methods`], the text and the
/// temperature do not count.
pub fn measure(args: &Options, agreement: f64) -> Result<Report> {
    check(args)?;
    ensure!((0.0..1.0).contains(&agreement), "--agreement is {agreement}, but must be at least 0 and below 1");
    let most = args.model.options.speculate.tokens.unwrap_or(MOST);
    let method = Method::Synthetic((agreement * 1e3).round() as u32);
    let mut lanes = [Lane::start(args, Method::Off, most)?, Lane::start(args, method, most)?];
    let theory = Synthetic::tokens_per_pass(agreement, most);
    let mut lines = Vec::new();
    for &streams in &args.concurrency {
        for lane in &mut lanes {
            // Sizes of steps are recorded when they come for the second time.
            lane.round(args, streams, 0)?;
            let busy = lane.busy_steps(args, streams)?;
            lane.totals = Totals { steps: busy, ..Totals::default() };
        }
        for round in 1..=args.prompts.div_ceil(streams) {
            for turn in 0..2 {
                lanes[(turn + round) % 2].round(args, streams, round)?;
            }
        }
        let [plain, drafted] = lanes.each_ref().map(|lane| &lane.totals);
        lines.push(Line::new(streams, agreement, most, theory, plain, drafted));
    }
    let session = &lanes[0].session;
    let (name, device) = (session.assets.name.clone(), session.plan.device.clone());
    let Options { input_len, output_len, .. } = *args;
    Ok(Report { name, device, input_len, output_len, agreement, most, lines })
}

impl Report {
    /// An object for each number of streams.
    pub fn json(&self) -> Vec<Value> {
        self.lines.iter().map(|line| line.json.clone()).collect()
    }

    pub fn text(&self) -> String {
        let mut rows = vec![HEADINGS.map(str::to_owned).to_vec()];
        rows.extend(self.lines.iter().map(|line| line.cells.clone()));
        format!(
            "{}: {}, {} in / {} out, drafts of {} tokens that are right with a chance of {}\n{}",
            self.name,
            self.device,
            self.input_len,
            self.output_len,
            self.most,
            self.agreement,
            table::render(&rows)
        )
    }
}

impl Line {
    fn new(streams: usize, agreement: f64, most: usize, theory: f64, plain: &Totals, drafted: &Totals) -> Self {
        let gain = drafted.rate() / plain.rate();
        let json = json!({
            "streams": streams, "agreement": agreement, "speculate_tokens": most, "plain_tokens_per_s": plain.rate(),
            "tokens_per_s": drafted.rate(), "gain": gain, "tokens_per_pass": drafted.tokens_per_pass(),
            "theory": theory, "plain_step_ms": plain.step_ms(streams), "step_ms": drafted.step_ms(streams),
            "plain_busy_ms": plain.busy_ms(streams), "busy_ms": drafted.busy_ms(streams * (most + 1)),
            "idle_ms": drafted.idle_ms(streams * (most + 1)),
        });
        let milliseconds = |time: Option<f32>| time.map_or("-".to_owned(), |time| format!("{time:.3} ms"));
        let cells = vec![
            streams.to_string(),
            format!("{:.1}", plain.rate()),
            format!("{:.1}", drafted.rate()),
            format!("{gain:.2}x"),
            format!("{:.2}", drafted.tokens_per_pass()),
            format!("{theory:.2}"),
            format!("{:.1}%", 100.0 * gain / theory),
            format!("{:.3} ms", plain.step_ms(streams)),
            format!("{:.3} ms", drafted.step_ms(streams)),
            milliseconds(drafted.busy_ms(streams * (most + 1))),
            milliseconds(drafted.idle_ms(streams * (most + 1))),
        ];
        Self { json, cells }
    }
}

const HEADINGS: [&str; 11] = [
    "streams",
    "plain tok/s",
    "tok/s",
    "gain",
    "tok/pass",
    "theory",
    "of theory",
    "plain step",
    "step",
    "GPU busy",
    "GPU idle",
];

struct Lane {
    session: Session,
    totals: Totals,
}

/// Sums over all rounds.
#[derive(Clone, Debug, Default)]
struct Totals {
    /// While all streams decode: time, of a stream on average, and tokens of all.
    time: Duration,
    tokens: u64,
    drafts: u64,
    accepted: u64,
    /// On a GPU's own clock.
    steps: Vec<StepTime>,
}

impl Totals {
    fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64()
    }

    /// Tokens a pass of one stream.
    fn tokens_per_pass(&self) -> f64 {
        1.0 + self.accepted as f64 / self.drafts.max(1) as f64
    }

    fn step_ms(&self, streams: usize) -> f64 {
        self.tokens_per_pass() * streams as f64 * ms(self.time) / self.tokens.max(1) as f64
    }

    /// The median of how long a GPU was busy with a step of `rows` rows.
    fn busy_ms(&self, rows: usize) -> Option<f32> {
        self.median(rows, |step| Some(step.busy_ms))
    }

    /// And of how long it had waited for it.
    fn idle_ms(&self, rows: usize) -> Option<f32> {
        self.median(rows, |step| step.gap_ms)
    }

    fn median(&self, rows: usize, of: impl Fn(&StepTime) -> Option<f32>) -> Option<f32> {
        let times: Vec<f32> = self.steps.iter().filter(|step| step.rows == rows).filter_map(of).collect();
        percentile(&times, 50.0)
    }

    /// Adds what came between the last of the first tokens and the first of the last ones: behind
    /// that the batch shrinks, with drafts sooner for one stream than for another. Each stream's
    /// time ends with a token of its own: those of one step come a little after each other, and
    /// what comes behind the end is neither counted nor waited for.
    fn add(&mut self, times: &[Vec<Instant>]) {
        let firsts = times.iter().filter_map(|stream| stream.first());
        let lasts = times.iter().filter_map(|stream| stream.last());
        let (Some(&began), Some(&ended)) = (firsts.max(), lasts.min()) else { return };
        let mut sum = Duration::ZERO;
        for stream in times {
            let inside = stream.iter().filter(|&&time| time > began && time <= ended);
            self.tokens += inside.clone().count() as u64;
            sum += inside.max().map_or(Duration::ZERO, |&last| last - began);
        }
        self.time += sum / times.len() as u32;
    }
}

impl Lane {
    fn start(args: &Options, method: Method, most: usize) -> Result<Self> {
        let seqs = args.concurrency.iter().copied().max().unwrap_or(1);
        let session = args.model.start(seqs, Some(args.input_len + args.output_len), |options| {
            options.prefix_caching = false;
            options.speculate.method = method;
            options.speculate.tokens = Some(most);
            options.speculate.fixed = true;
        })?;
        Ok(Self { session, totals: Totals::default() })
    }

    /// A round on a GPU's own clock, which costs time itself.
    fn busy_steps(&mut self, args: &Options, streams: usize) -> Result<Vec<StepTime>> {
        let Some(device) = self.session.device.upgrade() else { return Ok(Vec::new()) };
        device.start_steps();
        self.round(args, streams, 0)?;
        Ok(device.end_steps()?)
    }

    fn round(&mut self, args: &Options, streams: usize, round: usize) -> Result<()> {
        let vocab = self.session.assets.model.spec.vocab_size;
        let before = self.session.engine.stats().speculation;
        let asks = (0..streams).map(|stream| {
            let number = round * streams + stream;
            let mut ask = Ask::new(streams::prompt(vocab, args.input_len, number), args.output_len);
            ask.params.logit_bias = vec![(((7 * number + 100) % vocab) as u32, BIAS)];
            ask
        });
        let answers = streams::together(&self.session, asks.collect())?;
        for (stream, answer) in answers.iter().enumerate() {
            let token = ((7 * (round * streams + stream) + 100) % vocab) as u32;
            ensure!(answer.tokens.iter().all(|&said| said == token), "an answer is not the token that it is biased to");
        }
        let speculation = self.session.engine.stats().speculation.since(&before);
        self.totals.drafts += speculation.drafts;
        self.totals.accepted += speculation.accepted_tokens;
        let times: Vec<Vec<Instant>> = answers.into_iter().map(|answer| answer.times).collect();
        self.totals.add(&times);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_all_streams_together() {
        let start = Instant::now();
        let at = |times: &[u64]| times.iter().map(|&time| start + Duration::from_millis(time)).collect::<Vec<_>>();
        let mut totals = Totals { drafts: 4, accepted: 8, ..Totals::default() };
        totals.add(&[at(&[10, 20, 20, 20, 30, 30]), at(&[12, 22, 32, 42, 52])]);
        // From 12 to 30 five of the first, and from 12 to 22 one of the second.
        assert_eq!((totals.tokens, totals.time), (6, Duration::from_millis(14)));
        assert!((totals.tokens_per_pass() - 3.0).abs() < 1e-9);
        assert!((totals.step_ms(2) - 14.0).abs() < 1e-9 && (totals.rate() - 6.0 / 0.014).abs() < 1e-6);
        totals.add(&[]);
        assert_eq!(totals.tokens, 6);
        let step = |rows, busy_ms, gap_ms| StepTime { rows, decodes: false, gap_ms, busy_ms };
        totals.steps = vec![step(10, 3.0, None), step(10, 1.0, Some(0.5)), step(4, 9.0, None), step(10, 2.0, None)];
        assert_eq!((totals.busy_ms(10), totals.busy_ms(5), totals.idle_ms(10)), (Some(2.0), None, Some(0.5)));
    }
}
