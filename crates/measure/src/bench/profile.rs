//! GPU time by kernel: the steps of a bench once more, without an engine around them.
//!
//! While a profile is taken kernels run one by one and nothing is replayed, so that only their own
//! times are right. How long a step takes when the device is never kept waiting is measured beside
//! that, as the engine runs it: recorded, and each asked for while the one before is under way. The
//! device's own clock tells how busy it was in the run itself: events at the beginning and the end
//! of every step.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use folio_device::cuda::Cuda;
use folio_device::cuda::driver::{KernelTime, StepTime, Stream};
use folio_device::{BLOCK_TOKENS, Batch, Draw, Draws, GroupTables, Span};
use folio_model::Decoder;
use folio_session::{Gpu, Session, Target};

use super::rates::Options;
use super::rounds::Measured;
use super::streams;
use crate::stats::percentile;
use crate::table;

/// Steps of a long prefill that are enough.
const MOST_PREFILL_STEPS: usize = 4;
/// Steps of decode before any is timed: the first is asked for, the second recorded.
const WARM_STEPS: usize = 3;
const TIMED_STEPS: usize = 32;
const PROFILED_STEPS: usize = 4;

/// Fails before anything is measured if there will be no profile.
pub fn check(options: &Options, session: &Session) -> Result<()> {
    match (options.profile, &session.target) {
        (true, Target::Cpu(_)) => bail!("--profile times the kernels of a GPU, and none is used here"),
        _ => Ok(()),
    }
}

/// Ends the session, whose memory is needed, and makes the tables.
pub fn tables(args: &Options, session: Session, results: &[Measured]) -> Result<String> {
    let Target::Cuda(gpu) = session.target.clone() else { bail!("--profile times the kernels of a GPU") };
    let (assets, plan) = (session.assets.clone(), session.plan.clone());
    session.end();
    let mut bench = Bench::new(&gpu, Decoder::load(gpu.open()?, &assets.model, plan.limits(), &mut |_| {})?);
    let mut text = format!("{}: {}, {} in / {} out\n", assets.name, plan.device, args.input_len, args.output_len);
    for result in results {
        text.push_str(&bench.prefill(args, result)?);
        if args.output_len > 1 {
            text.push_str(&bench.decode(args, result)?);
        }
    }
    Ok(text)
}

struct Bench {
    decoder: Decoder<Cuda>,
    /// Whether steps of decode are recorded at all.
    recorded: bool,
}

impl Bench {
    fn new(gpu: &Gpu, decoder: Decoder<Cuda>) -> Self {
        Self { decoder, recorded: !gpu.eager }
    }

    fn prefill(&mut self, args: &Options, result: &Measured) -> Result<String> {
        let steps = prefill_steps(result.streams, args.input_len, self.decoder.limits().rows);
        let steps: Vec<Batch> = steps.iter().take(MOST_PREFILL_STEPS).map(|rows| self.batch(rows)).collect();
        let rows: usize = steps.iter().map(Batch::num_rows).sum();
        self.run(&steps)?;
        let took = self.run(&steps)?;
        let kernels = self.profile(&steps)?;
        let mut text = format!(
            "\nprefill, {} prompts: {} steps of {rows} tokens in all; back to back {:.3} ms, {:.0} tokens a second\n",
            result.streams,
            steps.len(),
            took.as_secs_f64() * 1e3,
            rows as f64 / took.as_secs_f64(),
        );
        text.push_str(&kernel_table(&kernels, steps.len()));
        Ok(text)
    }

    fn decode(&mut self, args: &Options, result: &Measured) -> Result<String> {
        // In the middle of the answers; the values of their keys do not matter.
        let position = args.input_len + args.output_len / 2 - 1;
        let rows: Vec<Rows> =
            (0..result.streams).map(|sequence| Rows { sequence, first: position, count: 1 }).collect();
        let step = self.batch(&rows);
        let steps = |count: usize| vec![step.clone(); count];
        self.run(&steps(WARM_STEPS))?;
        let took = self.run(&steps(TIMED_STEPS))?.as_secs_f64() * 1e3 / TIMED_STEPS as f64;
        let kernels = self.profile(&steps(PROFILED_STEPS))?;
        let how = if self.recorded { "recorded" } else { "not recorded" };
        let mut text = format!(
            "\ndecode, {} streams at {} tokens: back to back ({how}) {took:.3} ms a step",
            result.streams,
            position + 1
        );
        if let Some(rate) = result.decode_tokens_per_s {
            let _ = write!(text, "; in the run {:.3} ms while contexts grow", result.streams as f64 / rate * 1e3);
        }
        text.push('\n');
        text.push_str(&Between::of(result.streams, &result.steps).map_or(String::new(), |between| between.describe()));
        text.push_str(&kernel_table(&kernels, PROFILED_STEPS));
        Ok(text)
    }

    /// One after the other as the engine asks for them, the next while one is under way.
    fn run(&mut self, steps: &[Batch]) -> Result<Duration> {
        self.wait()?;
        let start = Instant::now();
        let (mut under_way, mut drawn) = (0, Vec::new());
        for step in steps {
            self.decoder.forward(step)?;
            let draws = (0..step.outputs.len() as u32).map(Draw::greedy).collect();
            self.decoder.draw(&Draws { draws, ..Draws::default() });
            under_way += 1;
            if under_way == 2 {
                self.decoder.drawn(&mut drawn)?;
                under_way -= 1;
            }
        }
        for _ in 0..under_way {
            self.decoder.drawn(&mut drawn)?;
        }
        self.wait()?;
        Ok(start.elapsed())
    }

    fn profile(&mut self, steps: &[Batch]) -> Result<Vec<KernelTime>> {
        self.decoder.backend().device().start_profile();
        self.run(steps)?;
        Ok(self.decoder.backend().device().end_profile()?)
    }

    fn wait(&self) -> Result<()> {
        Ok(self.decoder.backend().device().synchronize(Stream::Compute)?)
    }

    /// Sequences lie one behind the other in all the blocks there are, and begin anew at their end:
    /// whose keys are read does not matter here.
    fn batch(&self, rows: &[Rows]) -> Batch {
        let vocab = self.decoder.spec().vocab_size;
        let limits = self.decoder.limits();
        let per_sequence = (limits.table_entries / limits.spans.max(1)).max(1);
        let mut batch = Batch { groups: vec![GroupTables::default(); limits.blocks.len()], ..Batch::default() };
        for Rows { sequence, first, count } in rows {
            let (positions, first_row) = (*first..first + count, batch.tokens.len() as u32);
            batch.spans.push(Span { first_row, num_rows: *count as u32, context: positions.end as u32 });
            batch.tokens.extend(streams::prompt(vocab, *count, *sequence));
            batch.positions.extend(positions.clone().map(|position| position as u32));
            for (group, &blocks) in batch.groups.iter_mut().zip(&limits.blocks) {
                let block = |number: usize| ((sequence * per_sequence + number) % blocks) as u32;
                let slot = |at: usize| block(at / BLOCK_TOKENS) * BLOCK_TOKENS as u32 + (at % BLOCK_TOKENS) as u32;
                group.slots.extend(positions.clone().map(slot));
                group.first_block.push(group.blocks.len() as u32);
                group.blocks.extend((0..positions.end.div_ceil(BLOCK_TOKENS)).map(block));
            }
            batch.outputs.push(batch.tokens.len() as u32 - 1);
        }
        batch
    }
}

/// Gaps between the run's decode steps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Between {
    steps: usize,
    /// In microseconds.
    median: f64,
    percentile_99: f64,
    /// A share of the time of all these steps and of the gap before each.
    busy: f64,
}

impl Between {
    /// Counts steps in which all streams had a row.
    fn of(streams: usize, steps: &[StepTime]) -> Option<Self> {
        let full = steps.iter().filter(|step| step.decodes && step.rows >= streams);
        let timed: Vec<(f64, f64)> = full.filter_map(|step| Some((step.gap_ms?.into(), step.busy_ms.into()))).collect();
        let gaps: Vec<f64> = timed.iter().map(|step| step.0 * 1e3).collect();
        let (gap, busy) = timed.iter().fold((0.0, 0.0), |sum, step| (sum.0 + step.0, sum.1 + step.1));
        Some(Self {
            steps: gaps.len(),
            median: percentile(&gaps, 50.0)?,
            percentile_99: percentile(&gaps, 99.0)?,
            busy: busy / (gap + busy),
        })
    }

    fn describe(&self) -> String {
        let Self { steps, median, percentile_99, busy } = self;
        format!(
            "between {steps} such steps of the run the GPU was without a kernel for {median:.1} us (median; 99th percentile \
             {percentile_99:.1} us), copies included: busy {:.2}%\n",
            busy * 100.0
        )
    }
}

/// Rows of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rows {
    sequence: usize,
    first: usize,
    count: usize,
}

/// Prompts one after the other, as many tokens a step as there may be.
fn prefill_steps(sequences: usize, len: usize, most_rows: usize) -> Vec<Vec<Rows>> {
    let mut steps = vec![Vec::new()];
    let mut left = most_rows;
    for sequence in 0..sequences {
        let mut first = 0;
        while first < len {
            if left == 0 {
                steps.push(Vec::new());
                left = most_rows;
            }
            let count = left.min(len - first);
            steps.last_mut().expect("one at least").push(Rows { sequence, first, count });
            first += count;
            left -= count;
        }
    }
    steps
}

/// The slowest kernels first, each with its share of all kernels' time.
fn kernel_table(kernels: &[KernelTime], steps: usize) -> String {
    let total: f64 = kernels.iter().map(|kernel| kernel.milliseconds).sum();
    let mut lines = vec![["kernel", "calls a step", "us a call", "ms a step", "share"].map(String::from).to_vec()];
    let steps = steps.max(1) as f64;
    for KernelTime { name, calls, milliseconds } in kernels {
        lines.push(vec![
            name.clone(),
            format!("{:.1}", *calls as f64 / steps),
            format!("{:.1}", milliseconds * 1e3 / *calls as f64),
            format!("{:.4}", milliseconds / steps),
            format!("{:.1}%", 100.0 * milliseconds / total),
        ]);
    }
    let calls: u64 = kernels.iter().map(|kernel| kernel.calls).sum();
    let sum = [format!("{:.1}", calls as f64 / steps), String::new(), format!("{:.4}", total / steps), "100.0%".into()];
    lines.push([vec!["all".into()], sum.to_vec()].concat());
    table::render(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_fill_steps() {
        let rows = |sequence, first, count| Rows { sequence, first, count };
        let steps = prefill_steps(3, 5, 7);
        assert_eq!(steps[0], [rows(0, 0, 5), rows(1, 0, 2)]);
        assert_eq!(steps[1], [rows(1, 2, 3), rows(2, 0, 4)]);
        assert_eq!(steps[2], [rows(2, 4, 1)]);
        assert_eq!(prefill_steps(2, 4, 4), [[rows(0, 0, 4)], [rows(1, 0, 4)]]);
    }

    #[test]
    fn gaps_between_full_steps() {
        let step = |rows, decodes, gap_ms, busy_ms| StepTime { rows, decodes, gap_ms, busy_ms };
        let steps = [
            step(4, true, None, 8.0),
            step(4, true, Some(0.5), 8.5),
            step(40, false, Some(9.0), 90.0),
            step(4, true, Some(0.5), 8.5),
            step(4, true, Some(2.0), 5.0),
            step(2, true, Some(3.0), 7.0),
        ];
        let found = Between::of(3, &steps).expect("three");
        assert_eq!(found, Between { steps: 3, median: 500.0, percentile_99: 2000.0, busy: 22.0 / 25.0 });
        assert_eq!(Between::of(5, &steps), None);
    }

    #[test]
    fn shares_of_kernels() {
        let kernel = |name: &str, calls, milliseconds| KernelTime { name: name.into(), calls, milliseconds };
        let text = kernel_table(&[kernel("linear", 8, 3.0), kernel("norm", 4, 1.0)], 2);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["linear", "4.0", "375.0", "1.5000", "75.0%"]), "{text}");
        assert!(lines.contains(&vec!["all", "6.0", "2.0000", "100.0%"]), "{text}");
    }
}
