//! An executor without a model: the K/V entry of a token is a hash of (token, position), written through the block
//! table; the next token is a hash of all entries read back through it. Faults can be planted, and steps held back.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use folio_engine::{
    Assignment, BlockId, Engine, EngineConfig, Error, Event, Executor, FinishReason, Logprobs, RequestId,
    RequestStream, Result, RowOutput, Sampled, SamplingParams, SamplingState, StepPlan, Usage,
};

pub const BLOCK_TOKENS: usize = 16;
pub const VOCAB: u32 = 50_000;

fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

fn entry(token: u32, position: usize) -> u64 {
    mix(u64::from(token) + 1, position as u64 + 1)
}

fn next_token(entries: impl Iterator<Item = u64>) -> u32 {
    (entries.fold(7, mix) % u64::from(VOCAB)) as u32
}

pub fn tokens(seed: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| (mix(seed, i) % u64::from(VOCAB)) as u32).collect()
}

/// The answer of a request that has the model for itself.
pub fn reference(prompt: &[u32], num_tokens: usize) -> Vec<u32> {
    let mut state = prompt.iter().enumerate().map(|(i, &t)| entry(t, i)).fold(7, mix);
    let mut answer = Vec::new();
    for i in 0..num_tokens {
        let token = (state % u64::from(VOCAB)) as u32;
        answer.push(token);
        state = mix(state, entry(token, prompt.len() + i));
    }
    answer
}

/// What goes wrong, and when.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Steps that return an error, counted from 1.
    pub failing_steps: BTreeSet<u64>,
    pub panicking_steps: BTreeSet<u64>,
    /// The request whose row is not a number once its answer has so many tokens.
    pub broken_row: Option<(RequestId, usize)>,
}

#[derive(Default)]
pub struct Mock {
    slots: Vec<u64>,
    plan: StepPlan,
    faults: Faults,
    /// A step begins only when a permit comes.
    gate: Option<flume::Receiver<()>>,
    steps: Arc<AtomicU64>,
}

impl Mock {
    pub fn new(blocks: usize, faults: Faults, gate: Option<flume::Receiver<()>>) -> Self {
        Self { slots: vec![0; blocks * BLOCK_TOKENS], faults, gate, ..Self::default() }
    }

    pub fn steps(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.steps)
    }

    fn output(&self, a: &Assignment) -> RowOutput {
        let context = a.first + a.tokens.len();
        let read = || next_token((0..context).map(|p| self.slots[slot(&a.tables[0], p)]));
        let logprobs = |&token: &u32| Logprobs { token, logprob: -1.0, rank: 1, top: Vec::new() };
        let is_broken = self.faults.broken_row.is_some_and(|(id, len)| id == a.id && context >= len);
        RowOutput {
            id: a.id,
            sampled: (a.samples && !is_broken).then(|| Sampled { token: read(), logprobs: None }),
            prompt_logprobs: a.prompt_targets.tokens.iter().map(logprobs).collect(),
            failure: is_broken.then(|| "not a number".to_owned()),
        }
    }
}

fn slot(table: &[BlockId], position: usize) -> usize {
    table[position / BLOCK_TOKENS].0 as usize * BLOCK_TOKENS + position % BLOCK_TOKENS
}

impl Executor for Mock {
    fn admit(&mut self, _: RequestId, _: SamplingState) {}

    fn submit(&mut self, plan: &StepPlan) -> Result<()> {
        if let Some(gate) = &self.gate {
            // A test that has ended lets go of everything.
            let _ = gate.recv();
        }
        let step = self.steps.fetch_add(1, Ordering::SeqCst) + 1;
        if self.faults.failing_steps.contains(&step) {
            return Err(Error::Step("planted failure".into()));
        }
        assert!(!self.faults.panicking_steps.contains(&step), "planted panic");
        for a in &plan.assignments {
            for (i, &token) in a.tokens.iter().enumerate() {
                self.slots[slot(&a.tables[0], a.first + i)] = entry(token, a.first + i);
            }
        }
        self.plan = plan.clone();
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<RowOutput>> {
        Ok(self.plan.assignments.iter().map(|a| self.output(a)).collect())
    }

    fn release(&mut self, _: RequestId) {}
}

pub fn config(blocks: usize) -> EngineConfig {
    EngineConfig {
        max_seqs: 8,
        budget_tokens: 64,
        max_model_len: 2048,
        blocks: vec![blocks],
        logits_width: VOCAB as usize,
        ..EngineConfig::default()
    }
}

pub fn start(config: EngineConfig) -> Engine {
    start_with(config, Faults::default())
}

pub fn start_with(config: EngineConfig, faults: Faults) -> Engine {
    Engine::start(Box::new(Mock::new(config.blocks[0], faults, None)), config).expect("a sound configuration")
}

/// An engine whose steps wait for permits.
pub fn start_gated(config: EngineConfig) -> (Engine, flume::Sender<()>, Arc<AtomicU64>) {
    let (permits, gate) = flume::unbounded();
    let mock = Mock::new(config.blocks[0], Faults::default(), Some(gate));
    let steps = mock.steps();
    (Engine::start(Box::new(mock), config).expect("a sound configuration"), permits, steps)
}

pub fn params(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens, ..SamplingParams::default() }
}

pub fn submit(engine: &Engine, prompt: Vec<u32>, params: SamplingParams) -> RequestStream {
    engine.submit(engine.request(prompt, params).expect("valid")).expect("room")
}

/// How one sample ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub reason: FinishReason,
    pub usage: Usage,
}

/// Reads to the end: every sample has exactly one end, and nothing after it.
pub fn answers(mut stream: RequestStream, num_samples: usize) -> Vec<Answer> {
    let mut tokens = vec![Vec::new(); num_samples];
    let mut ends = vec![None; num_samples];
    while let Some(event) = stream.recv() {
        match event {
            Event::Token { sample, token, .. } => {
                assert!(ends[sample].is_none(), "a token after the end");
                tokens[sample].push(token);
            }
            Event::Finished { sample, reason, usage } => {
                assert!(ends[sample].replace((reason, usage)).is_none(), "two ends");
            }
            Event::PromptLogprobs(_) => {}
        }
    }
    let whole = |(tokens, end): (Vec<u32>, Option<(FinishReason, Usage)>)| {
        let (reason, usage) = end.expect("every sample ends");
        Answer { tokens, reason, usage }
    };
    tokens.into_iter().zip(ends).map(whole).collect()
}

pub fn answer(stream: RequestStream) -> Answer {
    answers(stream, 1).remove(0)
}

/// Waits for the engine's thread to come round to something.
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::yield_now();
    }
}
