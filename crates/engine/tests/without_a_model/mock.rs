//! A runner with the simulator's model: its next token is a hash of all that it reads through the
//! block tables. Tests can plant faults, and hold steps back.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use folio_device::Pulse;
use folio_engine::{
    Admission, Assignment, Background, Engine, EngineConfig, Error, Event, Executor, FinishReason, GroupConfig,
    Logprobs, Pooling, Rebuild, RequestId, RequestOptions, RequestStream, Result, RowOutput, Sampled, SamplingParams,
    StepOutput, StepPlan, StepRunner, Usage, Wake,
};
use folio_scheduler::SchedulerConfig;
use folio_simulator::{Sampling, hash, model::Model};

pub const VOCAB: u32 = 50_000;
/// Whether steps overlap: clients see the same.
pub const BOTH: [bool; 2] = [true, false];

/// Every sample of a prompt gets the same answer.
const SAMPLING: Sampling = Sampling { seed: 0, vocab: VOCAB, salt: 0 };

pub fn tokens(seed: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| (hash::mix(seed, i) % u64::from(VOCAB)) as u32).collect()
}

/// The answer to a request that has the model for itself.
pub fn reference(prompt: &[u32], num_tokens: usize) -> Vec<u32> {
    folio_simulator::reference(&[None], prompt, num_tokens, SAMPLING)
}

/// Planted faults.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Steps that return an error, counted from 1.
    pub failing_steps: BTreeSet<u64>,
    pub panicking_steps: BTreeSet<u64>,
    /// Steps that end the executor's thread.
    pub fatal_steps: BTreeSet<u64>,
    /// A step panics whenever it computes this many tokens of a request, and ends the thread or
    /// not.
    pub poison: Vec<(RequestId, usize)>,
    pub is_deadly: bool,
    /// Two requests: every step with both of them panics.
    pub quarrel: Option<[RequestId; 2]>,
    /// A request with a row that is not a number once its sequence has this many tokens.
    pub broken_row: Option<(RequestId, usize)>,
    /// Every row gives a token, requested or not.
    pub is_eager: bool,
    /// Length of its vectors.
    pub embedding_width: usize,
    /// The request that the runner panics on admitting, and the one on releasing.
    pub panicking_admit: Option<RequestId>,
    pub panicking_release: Option<RequestId>,
}

pub struct Mock {
    model: Model,
    faults: Faults,
    /// A step begins only with a permit.
    gate: Option<flume::Receiver<()>>,
    /// A test makes it beat, as if a held step made progress.
    pulse: Pulse,
    steps: Arc<AtomicU64>,
    /// Requests whose rows ran, in order.
    rows: Arc<Mutex<Vec<RequestId>>>,
    /// Requests admitted and not released.
    known: Arc<Mutex<BTreeSet<RequestId>>>,
    /// Requests for embeddings, and the rows of their prompts that were pooled.
    pooling: BTreeMap<RequestId, (Pooling, usize)>,
}

/// Ends the executor's thread: its panic payload panics again when it is dropped, outside every
/// guard.
pub struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("planted panic");
    }
}

impl Mock {
    pub fn new(blocks: usize, faults: Faults, gate: Option<flume::Receiver<()>>) -> Self {
        let model = Model::new(&SchedulerConfig::new(vec![blocks]));
        Self {
            model,
            faults,
            gate,
            pulse: Pulse::default(),
            steps: Arc::default(),
            rows: Arc::default(),
            known: Arc::default(),
            pooling: BTreeMap::new(),
        }
    }

    /// Checks for faults that repeat with every attempt.
    fn check(&self, step: u64, plan: &StepPlan) {
        let Faults { fatal_steps, poison, is_deadly, quarrel, .. } = &self.faults;
        let reaches = |a: &Assignment| poison.iter().any(|&(id, len)| id == a.id && a.first + a.num_rows() >= len);
        let is_poisoned = plan.assignments.iter().any(reaches);
        if fatal_steps.contains(&step) || (is_poisoned && *is_deadly) {
            std::panic::panic_any(Bomb);
        }
        assert!(!is_poisoned, "planted panic");
        let is_in = |id: &RequestId| plan.assignments.iter().any(|a| a.id == *id);
        assert!(!quarrel.is_some_and(|both| both.iter().all(is_in)), "planted panic");
    }

    fn output(&mut self, a: &Assignment, token: Option<u32>) -> RowOutput {
        let len = a.first + a.num_rows();
        if self.faults.broken_row.is_some_and(|(id, broken_at)| id == a.id && len >= broken_at) {
            return RowOutput::failed(a.id, "not a number");
        }
        let pooling = self.pooling.get_mut(&a.id);
        let is_pooling = pooling.is_some();
        if let Some((pooling, rows)) = pooling {
            *rows += a.prompt_targets.tokens.len() + usize::from(a.samples);
            let expected = if *pooling == Pooling::Mean { len } else { 1 };
            if a.samples && *rows != expected {
                return RowOutput::failed(a.id, format_args!("{rows} rows were pooled in place of {expected}"));
            }
        }
        let token = token.or_else(|| self.faults.is_eager.then_some(0));
        let logprobs = |&token: &u32| Logprobs { token, logprob: -1.0, rank: 1, top: Vec::new() };
        let sampled = |token: u32| Sampled { token, logprobs: Some(logprobs(&token)) };
        RowOutput {
            sampled: token.filter(|_| !is_pooling).map(sampled).into_iter().collect(),
            // The token it would have sampled stands for all that was read.
            pooled: token.filter(|_| is_pooling).map(|token| vec![token as f32; self.faults.embedding_width]),
            prompt_logprobs: a.prompt_targets.tokens.iter().map(logprobs).collect(),
            ..RowOutput::new(a.id)
        }
    }
}

impl StepRunner for Mock {
    fn admit(&mut self, id: RequestId, admission: Admission) {
        if let Some(pooling) = admission.state.pooling() {
            self.pooling.insert(id, (pooling, 0));
        }
        assert_ne!(self.faults.panicking_admit, Some(id), "planted panic");
        self.known.lock().expect("nothing panics with it").insert(id);
        self.model.admit(id, SAMPLING);
    }

    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>> {
        if let Some(gate) = &self.gate {
            // A test that has ended releases all steps.
            let _ = gate.recv();
        }
        let step = self.steps.fetch_add(1, Ordering::SeqCst) + 1;
        let (fails, panics) = (&self.faults.failing_steps, &self.faults.panicking_steps);
        if fails.contains(&step) || panics.contains(&step) {
            // A failed step may have written anything anywhere.
            self.model.scribble(step, |_, _| false);
            assert!(!panics.contains(&step), "planted panic");
            return Err(Error::Step("planted failure".into()));
        }
        self.check(step, plan);
        self.rows.lock().expect("nothing panics with it").extend(plan.assignments.iter().map(|a| a.id));
        assert_eq!(self.model.run_transfers(&plan.transfers), None);
        let output = self.model.run_rows(plan);
        assert_eq!(output.fault, None);
        let tokens = output.results.into_iter().map(|result| result.token);
        Ok(plan.assignments.iter().zip(tokens).map(|(a, token)| self.output(a, token)).collect())
    }

    fn pulse(&self) -> Option<Pulse> {
        Some(self.pulse.clone())
    }

    fn release(&mut self, id: RequestId) {
        self.known.lock().expect("nothing panics with it").remove(&id);
        self.model.release(id);
        assert_ne!(self.faults.panicking_release, Some(id), "planted panic");
    }
}

/// Counts the submitted steps, before any of them begins.
pub struct Counted {
    inner: Background,
    submitted: Arc<AtomicU64>,
}

impl Executor for Counted {
    fn on_done(&mut self, wake: Wake) {
        self.inner.on_done(wake);
    }

    fn admit(&mut self, id: RequestId, admission: Admission) {
        self.inner.admit(id, admission);
    }

    fn submit(&mut self, plan: StepPlan) -> Result<()> {
        self.inner.submit(plan)?;
        self.submitted.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput> {
        self.inner.collect()
    }

    fn release(&mut self, id: RequestId) {
        self.inner.release(id);
    }

    fn pulse(&self) -> Option<Pulse> {
        self.inner.pulse()
    }
}

pub fn config(blocks: usize) -> EngineConfig {
    EngineConfig {
        max_seqs: 8,
        budget_tokens: 64,
        max_model_len: 2048,
        groups: vec![GroupConfig::new(blocks)],
        logits_width: VOCAB as usize,
        // A mock's measured speed means nothing, and plans should not depend on it.
        inter_token_target: None,
        ..EngineConfig::default()
    }
}

pub fn start(config: EngineConfig) -> Engine {
    start_with(config, Faults::default())
}

pub fn start_with(config: EngineConfig, faults: Faults) -> Engine {
    let mock = Mock::new(config.groups[0].blocks, faults, None);
    Engine::start(Box::new(Background::start(mock).expect("a thread")), config).expect("a sound configuration")
}

/// An engine that rebuilds its executor when it dies, and the requests of the current executor.
pub fn start_rebuilding(config: EngineConfig, faults: Faults) -> (Engine, Arc<Mutex<BTreeSet<RequestId>>>) {
    start_rebuilding_gated(config, faults, None)
}

/// The same; its steps may wait for permits.
pub fn start_rebuilding_gated(
    config: EngineConfig,
    faults: Faults,
    gate: Option<flume::Receiver<()>>,
) -> (Engine, Arc<Mutex<BTreeSet<RequestId>>>) {
    let blocks = config.groups[0].blocks;
    let (steps, known) = (Arc::<AtomicU64>::default(), Arc::<Mutex<BTreeSet<RequestId>>>::default());
    let everybody = Arc::clone(&known);
    let build = move || -> Result<Box<dyn Executor>> {
        everybody.lock().expect("nothing panics with it").clear();
        let (steps, known) = (Arc::clone(&steps), Arc::clone(&everybody));
        let mock = Mock { steps, known, ..Mock::new(blocks, faults.clone(), gate.clone()) };
        Ok(Box::new(Background::start(mock)?))
    };
    let first = build().expect("a thread");
    let engine = Engine::start(first, EngineConfig { rebuild: Some(Rebuild::new(build)), ..config });
    (engine.expect("a sound configuration"), known)
}

/// An engine whose steps wait for permits.
pub struct Gated {
    pub engine: Engine,
    pub permits: flume::Sender<()>,
    /// The pulse of the step that waits.
    pub pulse: Pulse,
    /// Number of steps that have begun.
    pub steps: Arc<AtomicU64>,
    /// Number of steps that were submitted to the executor.
    pub submitted: Arc<AtomicU64>,
    /// Requests whose rows ran, in order.
    pub rows: Arc<Mutex<Vec<RequestId>>>,
}

pub fn start_gated(config: EngineConfig, faults: Faults) -> Gated {
    let (permits, gate) = flume::unbounded();
    let mock = Mock::new(config.groups[0].blocks, faults, Some(gate));
    let pulse = mock.pulse.clone();
    let (steps, rows, submitted) = (Arc::clone(&mock.steps), Arc::clone(&mock.rows), Arc::new(AtomicU64::new(0)));
    let executor = Counted { inner: Background::start(mock).expect("a thread"), submitted: Arc::clone(&submitted) };
    let engine = Engine::start(Box::new(executor), config).expect("a sound configuration");
    Gated { engine, permits, pulse, steps, submitted, rows }
}

impl Gated {
    pub fn permit(&self, steps: u64) {
        (0..steps).for_each(|_| self.permits.send(()).expect("the engine runs"));
    }

    pub fn wait_for_submitted(&self, steps: u64) {
        wait_until("the step is handed over", || self.submitted.load(Ordering::SeqCst) >= steps);
    }

    /// Lets `steps` steps run, each only when the next has been submitted.
    pub fn run_overlapped(&self, steps: u64) {
        for _ in 0..steps {
            let begun = self.steps.load(Ordering::SeqCst);
            self.wait_for_submitted(begun + 2);
            self.permit(1);
            wait_until("it has begun", || self.steps.load(Ordering::SeqCst) > begun);
        }
    }
}

pub fn params(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens, ..SamplingParams::default() }
}

pub fn submit(engine: &Engine, prompt: Vec<u32>, params: SamplingParams) -> RequestStream {
    submit_with(engine, prompt, params, RequestOptions::default())
}

pub fn submit_with(
    engine: &Engine,
    prompt: Vec<u32>,
    params: SamplingParams,
    options: RequestOptions,
) -> RequestStream {
    let request = engine.request(prompt, params).and_then(|request| request.with_options(options));
    engine.submit(request.expect("valid")).expect("room")
}

/// The end of one sample.
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
            Event::StopToken { sample, .. } => assert!(ends[sample].is_none(), "a token after the end"),
            Event::PromptLogprobs(_) => {}
            Event::Embedding(_) => panic!("nobody asked"),
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

/// Waits for another thread to fulfil a condition.
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::yield_now();
    }
}

/// Waits until no request runs or waits, and every block is free.
pub fn wait_until_idle(engine: &Engine) {
    wait_until("the engine is idle", || {
        let stats = engine.stats().scheduler;
        stats.running + stats.waiting == 0 && stats.groups.iter().all(|group| group.blocks_used == 0)
    });
}
