//! Sampling on the device. The parameters of rows arrive with one copy while the step computes
//! their logits, and the results return with another while the next step already runs on the tokens
//! themselves. If all draws are greedy, the kernel writes to the host's memory directly.

use std::collections::VecDeque;

use super::driver::{Buffer, Device, Event, KernelArg, Pinned, Plain, Stream, args};
use super::graphs::Recordings;
use super::inputs::ladder;
use super::launch;
use super::tensor::{Float, Tensor};
use crate::{Draw, DrawFailure, Drawn, DrawnLogprobs, Draws, Error, Result};

const NONE: u32 = u32::MAX;
/// Bytes of a row's state that the kernels share.
pub(super) const STATE_BYTES: usize = 40_992;
/// Tokens with weights that are summed together, and most such sums of a row.
const CHUNK: usize = 4096;
const MOST_TOKENS: usize = 64 * CHUNK;

/// Mirrors `SampleRow`.
#[derive(Clone, Copy)]
#[repr(C)]
struct SampleRow {
    uniform: f64,
    temperature: f32,
    min_p: f32,
    top_p: f32,
    top_k: u32,
    repetition: f32,
    frequency: f32,
    presence: f32,
    masks: u32,
    num_masks: u32,
    biases: u32,
    num_biases: u32,
    penalties: u32,
    num_penalties: u32,
    allowed: u32,
    target: u32,
    logprobs: u32,
    saved: u32,
    padding: u32,
}

const _: () = assert!(size_of::<SampleRow>() == 80);

// SAFETY: repr(C), numbers only, no padding that is not named.
unsafe impl Plain for SampleRow {}

/// Mirrors `SampleResult`.
#[derive(Clone, Copy)]
#[repr(C)]
struct SampleResult {
    token: u32,
    status: u32,
    value: f32,
    logprob: f32,
    rank: u32,
    num_top: u32,
}

const _: () = assert!(size_of::<SampleResult>() == 24);

// SAFETY: repr(C), numbers only, no padding.
unsafe impl Plain for SampleResult {}

/// Mirrors `SampleArgs`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
struct SampleArgs {
    logits: u64,
    rows: u64,
    lists: u64,
    saved: u64,
    states: u64,
    results: u64,
    tokens: u64,
    top_tokens: u64,
    top_logprobs: u64,
    vocab: i32,
    max_top: i32,
    num_rows: i32,
    padding: i32,
}

const _: () = assert!(size_of::<SampleArgs>() == 88);

// SAFETY: repr(C), numbers and addresses only, as in sample.cuh.
unsafe impl KernelArg for SampleArgs {}

/// Memory for draws of up to `rows` rows.
pub(super) struct Sampler {
    // Dropped before the memory that they use.
    recordings: Recordings<(SampleArgs, Steps)>,
    rows: usize,
    states: Buffer,
    tokens: Buffer,
    saved: Buffer,
    turns: [Turn; 2],
    next: usize,
    /// Turns with results that have not been collected, or the error of one, oldest first.
    pending: VecDeque<Result<usize>>,
    /// Row of the logits that each of the latest draws used.
    rows_drawn: Vec<u32>,
}

/// Memory of one draw: the next may be queued before this one's results are collected.
struct Turn {
    wanted: Pinned,
    results: Pinned,
    /// Copy of `wanted` on the device: rows, then lists.
    wanted_there: Buffer,
    /// Results, then best tokens, then their logprobs; all of it is copied back, even parts that no
    /// kernel had to write.
    results_there: Buffer,
    /// Events: `wanted` has arrived on the device, the results are computed, and they are on the
    /// host.
    copied: Event,
    drawn: Event,
    done: Event,
    draws: Vec<Asked>,
    max_top: usize,
    num_rows: usize,
}

#[derive(Clone, Copy)]
struct Asked {
    row: u32,
    target: Option<u32>,
    logprobs: bool,
}

/// Inputs of the kernels besides the logits.
#[derive(Default)]
struct Request {
    rows: Vec<SampleRow>,
    lists: Vec<u32>,
    saved: usize,
    max_top: usize,
    steps: Steps,
}

/// The kernels that have work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Steps {
    edits: bool,
    draws: bool,
    filters: bool,
    logprobs: bool,
}

impl Request {
    fn new(draws: &Draws, vocab: usize) -> Request {
        let num_rows = draws.draws.iter().map(|draw| draw.row as usize + 1).max().unwrap_or(0);
        let mut request = Request::default();
        request.pad(num_rows);
        for draw in &draws.draws {
            request.add(draws, draw, vocab);
        }
        request
    }

    /// Pads to `num_rows` with rows that no draw refers to, so that a recording for that size
    /// applies.
    fn pad(&mut self, num_rows: usize) {
        self.rows.resize(num_rows.max(self.rows.len()), row_of(&Draw::greedy(0)));
    }

    fn add(&mut self, draws: &Draws, draw: &Draw, vocab: usize) {
        let mut row = row_of(draw);
        let range = |range: &std::ops::Range<u32>| range.start as usize..range.end as usize;
        if draw.target.is_none() {
            (row.masks, row.num_masks) = self.list(draws.tokens[range(&draw.banned)].iter().copied(), 1);
            let biases = draws.biases[range(&draw.biases)].iter().flat_map(|(token, bias)| [*token, bias.to_bits()]);
            (row.biases, row.num_biases) = self.list(biases, 2);
            let seen = draws.seen[range(&draw.seen)].iter().flat_map(|seen| [seen.token, seen.outputs]);
            (row.penalties, row.num_penalties) = self.list(seen, 2);
            if let Some(allowed) = &draw.allowed {
                row.allowed = self.lists.len() as u32;
                self.lists.resize(self.lists.len() + vocab.div_ceil(32), 0);
                for &token in draws.tokens[range(allowed)].iter().filter(|token| (**token as usize) < vocab) {
                    self.lists[row.allowed as usize + token as usize / 32] |= 1 << (token % 32);
                }
            }
            self.steps.edits |= row.num_masks + row.num_biases + row.num_penalties > 0;
            self.steps.draws |= row.temperature > 0.0;
            self.steps.filters |= row.temperature > 0.0 && (row.top_k > 0 || row.top_p < 1.0);
        }
        row.saved = self.saved as u32;
        self.saved += (row.num_masks + row.num_biases + row.num_penalties) as usize;
        if let Some(count) = draw.logprobs {
            self.steps.logprobs = true;
            self.max_top = self.max_top.max((count as usize).min(vocab));
        }
        self.rows[draw.row as usize] = row;
    }

    /// Offset of the words, and their number in entries of `width`.
    fn list(&mut self, words: impl Iterator<Item = u32>, width: usize) -> (u32, u32) {
        let start = self.lists.len();
        self.lists.extend(words);
        (start as u32, ((self.lists.len() - start) / width) as u32)
    }
}

fn row_of(draw: &Draw) -> SampleRow {
    SampleRow {
        uniform: draw.uniform,
        temperature: draw.temperature,
        min_p: draw.min_p,
        top_p: draw.top_p,
        top_k: draw.top_k,
        repetition: draw.repetition_penalty,
        frequency: draw.frequency_penalty,
        presence: draw.presence_penalty,
        masks: 0,
        num_masks: 0,
        biases: 0,
        num_biases: 0,
        penalties: 0,
        num_penalties: 0,
        allowed: NONE,
        target: draw.target.unwrap_or(NONE),
        logprobs: draw.logprobs.unwrap_or(NONE),
        saved: 0,
        padding: 0,
    }
}

/// Initial bytes reserved per row for the request, the saved logits and the result; they grow on
/// demand.
const WANTED_BYTES: usize = size_of::<SampleRow>() + 1024;
const SAVED_BYTES: usize = 512;
const RESULT_BYTES: usize = size_of::<SampleResult>() + 8 * 20;

/// Device bytes of a sampler for this number of rows.
pub fn device_bytes(rows: usize) -> usize {
    rows * (STATE_BYTES + 4 + SAVED_BYTES + 2 * (WANTED_BYTES + RESULT_BYTES))
}

impl Sampler {
    pub fn new(device: &Device, rows: usize) -> Result<Sampler> {
        let (wanted, results) = (rows * WANTED_BYTES, rows * RESULT_BYTES);
        let turn = || -> Result<Turn> {
            Ok(Turn {
                wanted: device.pinned("draws", wanted)?,
                results: device.pinned("drawn tokens", results)?,
                wanted_there: device.alloc("draws", wanted)?,
                results_there: device.alloc_zeroed("drawn tokens", results)?,
                copied: device.event()?,
                drawn: device.event()?,
                done: device.event()?,
                draws: Vec::new(),
                max_top: 0,
                num_rows: 0,
            })
        };
        Ok(Sampler {
            recordings: Recordings::default(),
            rows,
            states: device.alloc_zeroed("what is kept of rows that are sampled", rows * STATE_BYTES)?,
            tokens: device.alloc_zeroed("drawn tokens", rows * 4)?,
            saved: device.alloc("logits that were changed", rows * SAVED_BYTES)?,
            turns: [turn()?, turn()?],
            next: 0,
            pending: VecDeque::new(),
            rows_drawn: Vec::new(),
        })
    }

    /// Grows the memory if this draw needs more than any before. Recordings with the old addresses
    /// do not match any more.
    fn make_room(&mut self, device: &Device, wanted: usize, saved: usize, results: usize) -> Result<()> {
        if saved > self.saved.bytes() {
            device.synchronize(Stream::Compute)?;
            self.saved = device.alloc("logits that were changed", saved)?;
        }
        // The results of this turn's last draw were collected, so its memory is free.
        let turn = &mut self.turns[self.next];
        if wanted > turn.wanted.bytes() {
            turn.wanted = device.pinned("draws", wanted)?;
            turn.wanted_there = device.alloc("draws", wanted)?;
        }
        if results > turn.results.bytes() {
            turn.results = device.pinned("drawn tokens", results)?;
            turn.results_there = device.alloc_zeroed("drawn tokens", results)?;
        }
        Ok(())
    }

    /// A failure is reported by the [`Sampler::drawn`] of this draw.
    pub fn draw(&mut self, device: &Device, logits: &Tensor, draws: &Draws, records: bool) {
        assert!(self.pending.len() < 2, "a third draw before the first was told");
        let turn = self.begin(device, logits, draws, records);
        self.pending.push_back(turn);
    }

    fn begin(&mut self, device: &Device, logits: &Tensor, draws: &Draws, records: bool) -> Result<usize> {
        let vocab = logits.cols();
        assert!(vocab <= MOST_TOKENS, "a vocabulary of {vocab} tokens; the kernels take {MOST_TOKENS}");
        assert_eq!(logits.float(), Float::F32, "logits are f32");
        let mut request = Request::new(draws, vocab);
        logits.check("logits to draw from", request.rows.len(), vocab);
        if records {
            request.pad(ladder(request.rows.len()).min(self.rows).min(logits.rows()));
        }
        let num_rows = request.rows.len();
        assert!(num_rows <= self.rows, "draws from {num_rows} rows, limit {}", self.rows);
        self.rows_drawn.clear();
        self.rows_drawn.extend(draws.draws.iter().map(|draw| draw.row));
        let row_bytes = num_rows * size_of::<SampleRow>();
        let wanted = row_bytes + 4 * request.lists.len();
        let tops = num_rows * size_of::<SampleResult>();
        let results = tops + 8 * num_rows * request.max_top;
        self.make_room(device, wanted, 4 * request.saved, results)?;
        let turn = &mut self.turns[self.next];
        turn.wanted.as_mut_slice(0..row_bytes).copy_from_slice(&request.rows);
        turn.wanted.as_mut_slice(row_bytes..wanted).copy_from_slice(&request.lists);
        device.upload_async(Stream::Copy, &turn.wanted_there, 0, &turn.wanted, 0..wanted);
        device.record(&turn.copied, Stream::Copy);
        device.wait(Stream::Compute, &turn.copied);
        // Greedy results are written once, and no kernel reads them.
        let is_direct = !request.steps.draws && !request.steps.logprobs;
        let given = if is_direct { turn.results.ptr() } else { turn.results_there.ptr() };
        let asked = turn.wanted_there.ptr();
        let call = SampleArgs {
            logits: logits.ptr(),
            rows: asked,
            lists: asked + row_bytes as u64,
            saved: self.saved.ptr(),
            states: self.states.ptr(),
            results: given,
            tokens: self.tokens.ptr(),
            top_tokens: given + tops as u64,
            top_logprobs: given + (tops + 4 * num_rows * request.max_top) as u64,
            vocab: vocab as i32,
            max_top: request.max_top as i32,
            num_rows: num_rows as i32,
            padding: 0,
        };
        if !records || self.recordings.begin(device, (call, request.steps)) {
            run(device, request.steps, call);
            self.recordings.end(device)?;
        }
        device.step_ends();
        if is_direct {
            device.record(&turn.done, Stream::Compute);
        } else {
            device.record(&turn.drawn, Stream::Compute);
            device.wait(Stream::Back, &turn.drawn);
            device.download_async(Stream::Back, &turn.results_there, 0, &mut turn.results, 0..results);
            device.record(&turn.done, Stream::Back);
        }
        turn.draws.clear();
        let asked = |draw: &Draw| Asked { row: draw.row, target: draw.target, logprobs: draw.logprobs.is_some() };
        turn.draws.extend(draws.draws.iter().map(asked));
        (turn.max_top, turn.num_rows) = (request.max_top, num_rows);
        let used = self.next;
        self.next = 1 - used;
        Ok(used)
    }

    /// Whether [`Sampler::drawn`] would return without waiting.
    pub fn is_drawn(&self) -> bool {
        match self.pending.front() {
            Some(Ok(turn)) => self.turns[*turn].done.is_done(),
            _ => true,
        }
    }

    pub fn drawn(&mut self, out: &mut Vec<Drawn>) -> Result<()> {
        out.clear();
        let nothing = || Error::Device { device: "cuda".into(), message: "nothing was asked to be drawn".into() };
        let turn = &self.turns[self.pending.pop_front().ok_or_else(nothing)??];
        turn.done.synchronize()?;
        let tops = turn.num_rows * size_of::<SampleResult>();
        let some = 4 * turn.num_rows * turn.max_top;
        let results: &[SampleResult] = turn.results.as_slice(0..tops);
        let top_tokens: &[u32] = turn.results.as_slice(tops..tops + some);
        let top_logprobs: &[f32] = turn.results.as_slice(tops + some..tops + 2 * some);
        out.extend(turn.draws.iter().map(|asked| {
            let result = &results[asked.row as usize];
            let failure = match result.status {
                0 => None,
                1 => Some(DrawFailure::NotFinite { token: result.token, value: result.value }),
                _ => Some(DrawFailure::NothingLeft),
            };
            let logprobs = (asked.logprobs && failure.is_none()).then(|| {
                let first = asked.row as usize * turn.max_top;
                let best = first..first + result.num_top as usize;
                let top = top_tokens[best.clone()].iter().copied().zip(top_logprobs[best].iter().copied());
                DrawnLogprobs { logprob: result.logprob, rank: result.rank, top: top.collect() }
            });
            Drawn { token: asked.target.unwrap_or(result.token), failure, logprobs }
        }));
        Ok(())
    }

    /// Whether all results have been collected.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// Number of kinds of draws that are replayed.
    pub fn recorded(&self) -> usize {
        self.recordings.recorded()
    }

    /// Tokens of rows, on the device, and the row of each of the latest draws.
    pub fn latest(&self) -> (u64, &[u32]) {
        (self.tokens.ptr(), &self.rows_drawn)
    }
}

fn run(device: &Device, steps: Steps, call: SampleArgs) {
    let rows = call.num_rows as u32;
    // For few rows, the number of blocks that run at once: two per multiprocessor of the largest
    // devices, or four.
    let most = (call.vocab as u32).div_ceil(CHUNK as u32);
    let parts = |blocks: u32| (blocks / rows.max(1)).clamp(1, most);
    let kernel = |wanted: bool, name, grid, threads| {
        if wanted {
            launch(device, name, grid, threads, args![call]);
        }
    };
    kernel(steps.edits, "sample_edit", [rows, 1, 1], 256);
    kernel(true, "sample_best", [parts(264), rows, 1], 512);
    kernel(steps.draws, "draw_weigh", [parts(528), rows, 1], 512);
    kernel(steps.filters, "draw_gather", [parts(528), rows, 1], 512);
    kernel(steps.draws, "draw_token", [rows, 1, 1], 1024);
    kernel(steps.logprobs, "sample_logprobs", [rows, 1, 1], 1024);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SeenToken;

    #[test]
    fn structures_are_as_large_as_the_kernels_have_them() {
        assert_eq!((size_of::<SampleRow>(), align_of::<SampleRow>()), (80, 8));
        assert_eq!((size_of::<SampleResult>(), size_of::<SampleArgs>()), (24, 88));
    }

    #[test]
    fn lists_of_all_draws_lie_one_after_the_other() {
        let draws = Draws {
            tokens: vec![5, 40, 2, 70],
            biases: vec![(1, 0.5)],
            seen: vec![SeenToken { token: 9, outputs: 0 }, SeenToken { token: 3, outputs: 2 }],
            draws: vec![
                Draw { row: 2, temperature: 0.5, top_k: 3, banned: 0..1, logprobs: Some(4), ..Draw::greedy(2) },
                Draw { allowed: Some(1..4), biases: 0..1, seen: 0..2, ..Draw::greedy(0) },
            ],
        };
        let request = Request::new(&draws, 64);
        assert_eq!(request.rows.len(), 3);
        assert_eq!(request.steps, Steps { edits: true, draws: true, filters: true, logprobs: true });
        let [first, nobody, last] = [&request.rows[0], &request.rows[1], &request.rows[2]];
        assert_eq!((last.masks, last.num_masks, last.saved, last.logprobs), (0, 1, 0, 4));
        assert_eq!((first.num_biases, first.num_penalties, first.saved), (1, 2, 1));
        assert_eq!(request.lists[first.biases as usize..][..2], [1, 0.5f32.to_bits()]);
        assert_eq!(request.lists[first.penalties as usize..][..4], [9, 0, 3, 2]);
        assert_eq!(request.lists[first.allowed as usize..][..2], [1 << 2, 1 << 8]);
        assert_eq!((nobody.temperature, nobody.allowed, nobody.logprobs), (0.0, NONE, NONE));
        assert_eq!((request.saved, request.max_top), (4, 4));
    }
}
