//! The loop between clients and a model: tokens in, tokens out.
//!
//! An [`Engine`] is a handle that any thread may hold; exactly one thread owns the scheduler and the executor and talks
//! to the others by channel. This crate speaks tokens only: text, JSON and HTTP are others' business.

mod config;
mod core;
mod error;
mod executor;
mod inputs;
mod request;
mod runner;
mod sampling;
mod stats;
mod stream;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
};

pub use config::EngineConfig;
use core::{Command, Core};
pub use error::{Error, InvalidRequest, Result, SubmitError};
pub use executor::{Executor, Logprobs, RowOutput, Sampled};
pub use folio_scheduler::{Assignment, BlockId, PromptTargets, RequestId, SchedulerStats, StepPlan};
pub use request::EngineRequest;
pub use runner::Runner;
pub use sampling::{InvalidParam, SamplingParams, SamplingState};
pub use stats::{EngineStats, Occupancy};
pub use stream::{Event, FinishReason, RequestStream, Usage};

/// A handle on a running engine. When the last handle and the last stream are gone, so is the engine.
#[derive(Clone, Debug)]
pub struct Engine {
    /// A channel of std's, because it drops what is queued when its receiver goes: a request that was handed in while
    /// the engine ended must not wait for ever.
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

/// What handles and the engine's thread both see.
#[derive(Debug)]
struct Shared {
    config: EngineConfig,
    next_id: AtomicU64,
    /// Samples accepted and not ended.
    live: AtomicUsize,
    stats: Mutex<EngineStats>,
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
    pub fn start(executor: Box<dyn Executor>, config: EngineConfig) -> Result<Engine> {
        let (commands, receiver) = mpsc::channel();
        let shared = Arc::new(Shared {
            config: config.clone(),
            next_id: AtomicU64::new(0),
            live: AtomicUsize::new(0),
            stats: Mutex::default(),
            thread: Mutex::default(),
        });
        let core = Core::new(executor, config, receiver, Arc::clone(&shared))?;
        let thread = std::thread::Builder::new().name("folio-engine".into()).spawn(move || core.run())?;
        *shared.thread() = Some(thread);
        Ok(Engine { commands, shared })
    }

    /// Checks a request; nothing else makes one.
    pub fn request(&self, prompt: Vec<u32>, params: SamplingParams) -> Result<EngineRequest, InvalidRequest> {
        EngineRequest::new(prompt, params, &self.shared.config)
    }

    /// Queues a request and returns its events; never waits.
    pub fn submit(&self, request: EngineRequest) -> Result<RequestStream, SubmitError> {
        let num_samples = request.params.n;
        let config = &self.shared.config;
        let most = config.max_seqs.saturating_add(config.max_waiting);
        let room = |live: usize| live.checked_add(num_samples).filter(|&sum| sum <= most);
        let live = &self.shared.live;
        live.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).map_err(|_| SubmitError::QueueFull)?;
        let first_id = RequestId(self.shared.next_id.fetch_add(num_samples as u64, Ordering::Relaxed));
        let (sender, events) = flume::unbounded();
        let command = Command::Submit { first_id, request, events: sender };
        if self.commands.send(command).is_err() {
            live.fetch_sub(num_samples, Ordering::AcqRel);
            return Err(SubmitError::Stopped);
        }
        Ok(RequestStream::new(events, self.commands.clone(), first_id, num_samples))
    }

    pub fn stats(&self) -> EngineStats {
        self.shared.stats().clone()
    }

    /// The longest sequence, prompt and answer together.
    pub fn max_model_len(&self) -> usize {
        self.shared.config.max_model_len
    }

    /// False once the engine is told to shut down, or its thread has ended by a fault.
    pub fn is_running(&self) -> bool {
        self.shared.thread().as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Aborts what runs and waits for the engine's thread to end. Other handles find the engine stopped.
    pub fn shutdown(self) {
        // An engine that is gone already has nothing to shut down.
        let _ = self.commands.send(Command::Shutdown);
        let thread = self.shared.thread().take();
        if let Some(thread) = thread {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}
