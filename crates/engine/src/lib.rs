//! The loop between clients and a model: tokens in, tokens out.
//!
//! An [`Engine`] is a handle that any thread may hold; exactly one thread owns the scheduler and
//! the executor and talks to the others by channel. This crate speaks tokens only: text, JSON and
//! HTTP belong to other crates.
//!
//! Requests wait in a queue, run together in steps, and share blocks of equal prefixes. The
//! executor computes a step. With a real model it is a [`Runner`], which has a decoder;
//! `folio-session` sets one up. Any [`StepRunner`] will do:
//!
//! ```
//! use folio_engine::{
//!     Admission, Assignment, Background, Engine, EngineConfig, Event, GroupConfig, RequestId, Result,
//!     RowOutput, Sampled, SamplingParams, StepPlan, StepRunner,
//! };
//!
//! /// A model with one answer.
//! struct Sevens;
//!
//! impl StepRunner for Sevens {
//!     fn admit(&mut self, _: RequestId, _: Admission) {}
//!
//!     fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>> {
//!         let row = |assignment: &Assignment| {
//!             let mut row = RowOutput::new(assignment.id);
//!             if assignment.samples {
//!                 row.sampled.push(Sampled { token: 7, logprobs: None });
//!             }
//!             row
//!         };
//!         Ok(plan.assignments.iter().map(row).collect())
//!     }
//!
//!     fn release(&mut self, _: RequestId) {}
//! }
//!
//! # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
//! let mut config = EngineConfig { max_model_len: 64, logits_width: 10, ..EngineConfig::default() };
//! config.groups = vec![GroupConfig::new(8)];
//! let engine = Engine::start(Box::new(Background::start(Sevens)?), config)?;
//! let params = SamplingParams { max_tokens: 2, ..SamplingParams::default() };
//! let mut stream = engine.submit(engine.request(vec![1, 2, 3], params)?)?;
//! let mut tokens = Vec::new();
//! while let Some(event) = stream.recv() {
//!     if let Event::Token { token, .. } = event {
//!         tokens.push(token);
//!     }
//! }
//! assert_eq!(tokens, [7, 7]);
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod background;
mod config;
mod error;
mod event_loop;
mod executor;
mod inputs;
mod messages;
mod pooling;
mod prefetch;
mod progress;
mod request;
mod runner;
mod sampling;
pub mod speculate;
mod stats;
mod stream;
pub mod tiers;
mod time_limit;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

pub use background::{Background, StepRunner};
pub use config::{EngineConfig, Rebuild};
pub use error::{Error, InvalidRequest, Result, SubmitError};
use event_loop::EventLoop;
pub use executor::{Admission, Executor, Logprobs, RowOutput, Sampled, StepOutput, Wake};
use folio_scheduler::Scheduler;
pub use folio_scheduler::{
    Assignment, BlockId, GroupConfig, GroupStats, HostSlot, KvEvent, Medium, Miss, PromptTargets, RequestId,
    SchedulerStats, StepPlan, Transfer,
};
use messages::{Message, MessageSender, step_done};
pub use pooling::Pooling;
use progress::Progress;
pub use request::{EngineRequest, RequestOptions};
pub use runner::Runner;
pub use sampling::{InvalidParam, SamplingDefaults, SamplingParams, SamplingState};
pub use stats::{EngineStats, ITERATION_BOUNDS, IterationTokens, Occupancy, SpeculationStats};
pub use stream::{Event, FinishReason, RequestStream, Timing, Usage};
use tiers::{DiskIo, DiskStore};
pub use tiers::{HostTier, TierConfig, TierError};
pub use time_limit::TimeLimit;

/// A handle on a running engine. The engine ends with the last handle and the last stream.
#[derive(Clone, Debug)]
pub struct Engine {
    messages: MessageSender,
    shared: Arc<Shared>,
}

/// State that handles and the engine's thread share.
#[derive(Debug)]
struct Shared {
    config: EngineConfig,
    /// The longest sequence that the KV pools hold.
    pool_tokens: usize,
    next_id: AtomicU64,
    progress: Progress,
    draining: AtomicBool,
    restarting: AtomicBool,
    stats: Mutex<EngineStats>,
    /// The disk tier, if it is used.
    disk: Option<DiskStore>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    fn stats(&self) -> MutexGuard<'_, EngineStats> {
        // Each figure is set by itself, so the figures are sound even if their writer panicked.
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// Starts the engine's thread.
    pub fn start(mut executor: Box<dyn Executor>, mut config: EngineConfig) -> Result<Engine> {
        config.validate()?;
        let scheduler_config = config.scheduler();
        let pool_tokens = config::pool_tokens(&scheduler_config);
        let mut scheduler = Scheduler::new(scheduler_config)?;
        let (sender, receiver) = mpsc::channel();
        executor.on_done(step_done(sender.clone(), 0));
        let store = config.tiers.disk.clone();
        let disk = start_disk(std::mem::take(&mut config.tiers), &mut scheduler, sender.clone())?;
        let shared = Arc::new(Shared {
            config,
            pool_tokens,
            next_id: AtomicU64::new(0),
            progress: Progress::default(),
            draining: AtomicBool::new(false),
            restarting: AtomicBool::new(false),
            stats: Mutex::default(),
            disk: store.filter(|_| disk.is_some()),
            thread: Mutex::default(),
        });
        let event_loop = EventLoop::new(scheduler, executor, disk, (sender.clone(), receiver), Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("folio-engine".into()).spawn(move || event_loop.run())?;
        *shared.thread() = Some(thread);
        Ok(Engine { messages: MessageSender::new(sender), shared })
    }

    /// Checks a request. Only this function and [`Engine::embedding`] make one.
    pub fn request(&self, prompt: Vec<u32>, params: SamplingParams) -> Result<EngineRequest, InvalidRequest> {
        EngineRequest::new(prompt, params, &self.shared.config, self.shared.pool_tokens)
    }

    /// Checks a request for an embedding: [`Event::Embedding`] answers it, and it ends with
    /// [`FinishReason::Length`]. The prompt may fill the whole context.
    pub fn embedding(&self, prompt: Vec<u32>, pooling: Pooling) -> Result<EngineRequest, InvalidRequest> {
        EngineRequest::embedding(prompt, pooling, &self.shared.config, self.shared.pool_tokens)
    }

    /// Queues a request and returns its events; never waits.
    pub fn submit(&self, request: EngineRequest) -> Result<RequestStream, SubmitError> {
        let submitted = Instant::now();
        if self.shared.draining.load(Ordering::Acquire) {
            return Err(SubmitError::Draining);
        }
        let num_samples = request.params.n;
        let config = &self.shared.config;
        let most = config.max_seqs.saturating_add(config.max_waiting);
        let progress = &self.shared.progress;
        if !progress.accept(num_samples, most) {
            return Err(SubmitError::QueueFull { retry_after: self.shared.stats().expected_wait });
        }
        let first_id = RequestId(self.shared.next_id.fetch_add(num_samples as u64, Ordering::Relaxed));
        let samplers = match request.pooling {
            Some(pooling) => vec![SamplingState::for_pooling(pooling, request.prompt.len())],
            None => SamplingState::for_samples(&request.params, &request.prompt, &config.eos),
        };
        let (sender, events) = flume::unbounded();
        if !self.messages.send(Message::Submit { first_id, request, samplers, submitted, events: sender }) {
            progress.ended(num_samples);
            return Err(SubmitError::Stopped);
        }
        Ok(RequestStream::new(events, self.messages.clone(), first_id, num_samples))
    }

    pub fn stats(&self) -> EngineStats {
        let disk = self.shared.disk.as_ref().map(DiskStore::stats);
        EngineStats { disk, ..self.shared.stats().clone() }
    }

    /// The longest sequence, prompt and answer together.
    pub fn max_model_len(&self) -> usize {
        self.shared.config.max_model_len
    }

    /// Samples that were submitted and have not ended.
    pub fn num_live(&self) -> usize {
        self.shared.progress.num_live()
    }

    /// Time since the last progress: a step ended without error or, if the executor reports it, a
    /// part of one, or work came to an idle engine. A part of a step counts from the first call
    /// after it, so call this often. None while there is no work: no sample, and no step in flight.
    /// Never waits, so it also reports an engine whose thread hangs or has died with work left.
    pub fn stalled_for(&self) -> Option<Duration> {
        self.shared.progress.stalled_for()
    }

    /// Rows of the steps that were submitted to the executor and have not ended; never waits.
    pub fn rows_in_flight(&self) -> usize {
        self.shared.progress.rows_in_flight()
    }

    /// False after a call of [`Engine::shutdown`], or after a fault of the engine's thread.
    pub fn is_running(&self) -> bool {
        self.shared.thread().as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Whether an executor that was lost is being rebuilt: requests are accepted and wait. Never
    /// waits.
    pub fn is_restarting(&self) -> bool {
        self.shared.restarting.load(Ordering::Acquire)
    }

    /// From now on no handle accepts a request; accepted ones run to their end. The engine itself
    /// runs until it is shut down.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Aborts all requests and waits for the engine's thread to end. Other handles find the engine
    /// stopped.
    pub fn shutdown(self) {
        self.messages.send(Message::Shutdown);
        let thread = self.shared.thread().take();
        if let Some(thread) = thread {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

/// Opens the disk tier, if there is one, and adds its chunks to the scheduler.
fn start_disk(tiers: TierConfig, scheduler: &mut Scheduler, done: mpsc::Sender<Message>) -> Result<Option<DiskIo>> {
    let TierConfig { host: Some(host), disk: Some(store), .. } = tiers else { return Ok(None) };
    store.scan().into_iter().for_each(|key| scheduler.disk_found(key));
    // An engine that has ended waits for no task.
    let done = move |ended| drop(done.send(Message::DiskDone(ended)));
    Ok(Some(DiskIo::start(store, host, done)?))
}
