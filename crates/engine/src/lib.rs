//! The loop between clients and a model: tokens in, tokens out.
//!
//! An [`Engine`] is a handle that any thread may hold; exactly one thread owns the scheduler and the executor and talks
//! to the others by channel. This crate speaks tokens only: text, JSON and HTTP are others' business.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod arrive;
mod background;
mod command;
mod config;
mod core;
mod deliver;
mod error;
mod executor;
mod failure;
mod fit;
mod inputs;
mod kept;
mod mail;
mod moves;
mod pace;
mod patience;
mod pooling;
mod progress;
mod report;
mod request;
mod runner;
mod sample;
mod sampling;
pub mod speculate;
mod stats;
mod stream;
pub mod tiers;
mod trial;

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
use command::{Line, Message, step_done};
pub use config::{EngineConfig, Rebuild};
use core::Core;
pub use error::{Error, InvalidRequest, Result, SubmitError};
pub use executor::{Admission, Executor, Logprobs, RowOutput, Sampled, StepOutput, Wake};
use folio_scheduler::Scheduler;
pub use folio_scheduler::{
    Assignment, BlockId, GroupConfig, GroupStats, HostSlot, KvEvent, Medium, Miss, PromptTargets, RequestId,
    SchedulerStats, StepPlan, Transfer,
};
pub use patience::TimeLimit;
pub use pooling::Pooling;
use progress::Progress;
pub use request::{EngineRequest, RequestOptions};
pub use runner::Runner;
pub use sampling::{InvalidParam, SamplingDefaults, SamplingParams, SamplingState};
pub use stats::{EngineStats, ITERATION_BOUNDS, IterationTokens, Occupancy, SpeculationStats};
pub use stream::{Event, FinishReason, RequestStream, Timing, Usage};
use tiers::{DiskIo, DiskStore};
pub use tiers::{HostTier, TierConfig, TierError};

/// A handle on a running engine. When the last handle and the last stream are gone, so is the engine.
#[derive(Clone, Debug)]
pub struct Engine {
    commands: Line,
    shared: Arc<Shared>,
}

/// What handles and the engine's thread both see.
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
    /// The one that is in use, where there is one.
    disk: Option<DiskStore>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    fn stats(&self) -> MutexGuard<'_, EngineStats> {
        // Numbers that are set one by one are sound wherever their writer stopped.
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
        let core = Core::new(scheduler, executor, disk, (sender.clone(), receiver), Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("folio-engine".into()).spawn(move || core.run())?;
        *shared.thread() = Some(thread);
        Ok(Engine { commands: Line::new(sender), shared })
    }

    /// Checks a request; nothing but this and [`Engine::embedding`] makes one.
    pub fn request(&self, prompt: Vec<u32>, params: SamplingParams) -> Result<EngineRequest, InvalidRequest> {
        EngineRequest::new(prompt, params, &self.shared.config, self.shared.pool_tokens)
    }

    /// Checks a request for a vector: it is answered by [`Event::Embedding`] and ends with [`FinishReason::Length`].
    /// The prompt may fill the whole context.
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
        if !self.commands.send(Message::Submit { first_id, request, samplers, submitted, events: sender }) {
            progress.ended(num_samples);
            return Err(SubmitError::Stopped);
        }
        Ok(RequestStream::new(events, self.commands.clone(), first_id, num_samples))
    }

    pub fn stats(&self) -> EngineStats {
        let disk = self.shared.disk.as_ref().map(DiskStore::stats);
        EngineStats { disk, ..self.shared.stats().clone() }
    }

    /// The longest sequence, prompt and answer together.
    pub fn max_model_len(&self) -> usize {
        self.shared.config.max_model_len
    }

    /// Samples that have been taken and have not ended.
    pub fn num_live(&self) -> usize {
        self.shared.progress.num_live()
    }

    /// How long ago the engine last got anywhere: a step ended well or, where the executor tells, got on, or the first work came.
    /// What a step does in between counts from when it is first asked for, so ask often. None while there is no
    /// work: no sample, and no step under way. Never waits, so it tells of an engine too whose thread hangs or has died
    /// with work left.
    pub fn stalled_for(&self) -> Option<Duration> {
        self.shared.progress.stalled_for()
    }

    /// Rows of the steps that were handed to the executor and have not ended; never waits.
    pub fn rows_in_flight(&self) -> usize {
        self.shared.progress.rows_in_flight()
    }

    /// False once the engine is told to shut down, or its thread has ended by a fault.
    pub fn is_running(&self) -> bool {
        self.shared.thread().as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// While an executor that died is built anew: nothing runs, requests are taken and wait. Never waits itself.
    pub fn is_restarting(&self) -> bool {
        self.shared.restarting.load(Ordering::Acquire)
    }

    /// From now on no handle takes a request; what was taken goes on to its end. The engine itself goes on too, until
    /// it is shut down.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Aborts what runs and waits for the engine's thread to end. Other handles find the engine stopped.
    pub fn shutdown(self) {
        self.commands.send(Message::Shutdown);
        let thread = self.shared.thread().take();
        if let Some(thread) = thread {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

/// Opens the disk tier, where there is one, and tells the scheduler what is on it.
fn start_disk(tiers: TierConfig, scheduler: &mut Scheduler, done: mpsc::Sender<Message>) -> Result<Option<DiskIo>> {
    let TierConfig { host: Some(host), disk: Some(store), .. } = tiers else { return Ok(None) };
    store.scan().into_iter().for_each(|key| scheduler.disk_found(key));
    // An engine that has ended waits for no task.
    let done = move |ended| drop(done.send(Message::DiskDone(ended)));
    Ok(Some(DiskIo::start(store, host, done)?))
}
