//! A model made ready to answer: assets opened, memory planned, decoder loaded, engine started.

use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use folio_device::Backend;
use folio_device::cpu::{Cpu, PackedWriter};
use folio_device::cuda::Cuda;
use folio_device::cuda::driver::Device;
use folio_engine::tiers::{Allocate, DiskConfig, DiskStore, HostGroup, HostTier, TierConfig, copy_cost};
use folio_engine::{Background, Engine, EngineConfig, KvEvent, Rebuild, Runner, TimeLimit};
use folio_model::{Decoder, DecoderLimits, LoadProgress};

use crate::assets::Assets;
use crate::drafting::{Beside, Drafting};
use crate::opened::Opened;
use crate::options::{InterTokenTarget, Options, Warn};
use crate::packed::PackedWeights;
use crate::phases::{self, Phases};
use crate::plan::{self, Plan};
use crate::target::{self, OpenedDevice, Target};

/// A loaded model and the engine that runs it.
pub struct Session {
    pub assets: Arc<Assets>,
    /// The drafting method, if there is one.
    pub drafting: Option<Arc<Drafting>>,
    pub engine: Engine,
    pub plan: Plan,
    pub target: Target,
    /// The disk tier, if there is one.
    pub disk: Option<DiskStore>,
    /// How it came to be.
    pub phases: Phases,
    /// The GPU that it was loaded on, while it is in use.
    pub device: Weak<Device>,
    /// Its packed weights, if they are cached.
    packed: Option<Arc<PackedWeights>>,
}

/// Requests that may wait for each that runs.
const WAITING_PER_SEQ: usize = 4;

/// Receives batches of events of the prefix cache.
pub type KvEventSender = flume::Sender<Vec<KvEvent>>;

/// Functions that a session calls, and what else only its owner knows. The library prints nothing:
/// without these it is silent.
#[derive(Default)]
pub struct Hooks {
    /// Receives a warning about the plan, before the model is loaded.
    pub plan_warning: Option<Warn>,
    /// Receives the progress of loading, again and again.
    pub progress: Option<Box<dyn FnMut(LoadProgress) + Send>>,
    /// Receives warnings about the model's files.
    pub load_warning: Option<Warn>,
    /// Receives faults that the engine recovered from.
    pub warn: Option<Warn>,
    pub kv_events: Option<KvEventSender>,
    /// Ends requests that wait this long in the queue.
    pub queue_timeout: Option<TimeLimit>,
    /// Time without progress after which the engine is given up.
    pub stall_timeout: Option<Duration>,
}

impl std::fmt::Debug for Hooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hooks").finish_non_exhaustive()
    }
}

impl Session {
    /// Opens the model of that name, or the built-in one, and starts it.
    pub fn open(model: Option<&str>, options: &Options) -> Result<Self> {
        Self::start(Assets::open(model, options)?, options, Hooks::default())
    }

    /// Plans and loads an opened model on the device that the options name.
    pub fn start(assets: Assets, options: &Options, hooks: Hooks) -> Result<Self> {
        let (target, _) = Target::choose(options)?;
        let opened = Opened::new(assets, options, target)?;
        if let (Some(warn), Some(warning)) = (hooks.plan_warning, &opened.warning) {
            warn(format_args!("{warning}"));
        }
        Self::load(opened, options, hooks)
    }

    /// Loads a model that was opened with the same options, and starts its engine.
    pub fn load(opened: Opened, options: &Options, hooks: Hooks) -> Result<Self> {
        let Opened { assets, drafting, packed, plan, target, warning: _ } = opened;
        match target.clone() {
            Target::Cpu(_) if options.device.load_format.is_dummy() => {
                bail!("--load-format dummy makes random weights on a GPU, and none is used here")
            }
            Target::Cpu(cpu) => {
                let packed = packed.and_then(|cache| cache.weights(&plan.parts)).map(Arc::new);
                let (from, warn) = (packed.clone(), hooks.load_warning);
                let open = move || {
                    let supply = from.as_ref().and_then(|packed| packed.supply(warn));
                    Ok(supply.iter().fold(Cpu::new(cpu)?, Cpu::with_packed))
                };
                let opened = |_: &Cpu| OpenedDevice::default();
                let beside = |cpu: &Cpu| Ok(cpu.beside());
                let session = Self::on(target, (open, opened, beside), (assets, drafting), plan, options, hooks)?;
                Ok(Self { packed, ..session })
            }
            Target::Cuda(gpu) => {
                let open = move || gpu.open();
                let device = (open, target::opened, Cuda::beside as Beside<Cuda>);
                Self::on(target, device, (assets, drafting), plan, options, hooks)
            }
        }
    }

    /// Runs on the backend that `open` returns, now and whenever it has to be opened anew; `opened`
    /// describes it, and `beside` opens another one beside it.
    fn on<B: Backend>(
        target: Target,
        (open, opened, beside): (
            impl Fn() -> folio_device::Result<B> + Send + Sync + 'static,
            impl FnOnce(&B) -> OpenedDevice,
            Beside<B>,
        ),
        (assets, drafting): (Assets, Option<Drafting>),
        plan: Plan,
        options: &Options,
        hooks: Hooks,
    ) -> Result<Self> {
        let (assets, drafting) = (Arc::new(assets), drafting.map(Arc::new));
        let backend = open()?;
        let OpenedDevice { mut phases, host_memory, device } = opened(&backend);
        let mut progress = hooks.progress.unwrap_or_else(|| Box::new(|_| {}));
        let mut load = |backend| Ok(Decoder::load(backend, &assets.model, plan.limits(), &mut progress)?);
        let mut decoder = phases.time("weights", || load(backend))?;
        // Both compute with the weights before there is an engine that would load them again.
        let computes_first = options.memory.disk_tier.is_some() || drafting.is_some();
        if computes_first && decoder.backend_mut().check().is_err() {
            drop(decoder);
            decoder = phases.time("weights once more", || load(open()?))?;
        }
        drop(progress);
        if target.device().computes_at_start() {
            phases.time("first step", || phases::first_step(&mut decoder))?;
        }
        let memory = decoder.memory();
        debug_assert_eq!(
            (memory.weights, memory.activations, memory.kv),
            (plan.bytes.weights, plan.bytes.activations, plan.bytes.kv),
            "what was planned and what was taken"
        );
        let tiers = tiers(&mut decoder, &assets, &plan, options, host_memory)?;
        let (host, disk) = (tiers.host.clone(), tiers.disk.clone());
        let (inter_token_target, inter_token_steps) = inter_token(options.queue.inter_token_target, &target);
        let config = EngineConfig {
            max_seqs: plan.max_seqs,
            max_waiting: options.queue.max_waiting.unwrap_or(WAITING_PER_SEQ * plan.max_seqs),
            budget_tokens: plan.budget_tokens,
            max_model_len: plan.max_model_len,
            groups: plan.group_configs(),
            prefix_caching: options.prefix_caching,
            inter_token_target,
            inter_token_steps,
            longest_step: target.device().longest_step(),
            aging: options.queue.priority_aging,
            prompt_logit_rows: plan::PROMPT_LOGIT_ROWS,
            logits_width: assets.model.spec.vocab_size,
            embedding_width: assets.model.spec.hidden,
            eos: assets.eos.clone(),
            tiers,
            expects_drafts: drafting.as_ref().is_some_and(|drafting| drafting.fixed),
            overlap: options.queue.overlap,
            kv_events: hooks.kv_events,
            queue_timeout: hooks.queue_timeout,
            stall_timeout: hooks.stall_timeout,
            warn: hooks.warn,
            debug: options.queue.debug,
            rebuild: Some(rebuild((open, beside), &assets, &drafting, plan.limits(), host.clone(), hooks.warn)),
            ..EngineConfig::default()
        };
        let runner = runner(decoder, drafting.as_deref(), beside, host, hooks.warn)?;
        let executor = Background::start(runner)?;
        let engine = Engine::start(Box::new(executor), config)?;
        Ok(Self { assets, drafting, engine, plan, target, disk, phases, device, packed: None })
    }

    /// Starts to write packed weights to the cache, if that is enabled and they were not there;
    /// `warn` receives a failure. Dropping the result stops the writer.
    pub fn keep_packed(&mut self, warn: Option<Warn>) -> Option<PackedWriter> {
        self.packed.take().and_then(|packed| packed.keep(warn))
    }

    /// Waits for the engine's thread to end.
    pub fn end(self) {
        self.engine.shutdown();
    }
}

/// Loads the same weights again, for an executor whose thread has ended; the files have stayed
/// mapped.
fn rebuild<B: Backend>(
    (open, beside): (impl Fn() -> folio_device::Result<B> + Send + Sync + 'static, Beside<B>),
    assets: &Arc<Assets>,
    drafting: &Option<Arc<Drafting>>,
    limits: DecoderLimits,
    host: Option<Arc<HostTier>>,
    warn: Option<Warn>,
) -> Rebuild {
    let (assets, drafting) = (Arc::clone(assets), drafting.clone());
    Rebuild::new(move || {
        let failed = |error: anyhow::Error| folio_engine::Error::Step(format!("{error:#}"));
        let backend = open().map_err(|error| failed(error.into()))?;
        let decoder = Decoder::load(backend, &assets.model, limits.clone(), &mut |_| {})?;
        let runner = runner(decoder, drafting.as_deref(), beside, host.clone(), warn).map_err(failed)?;
        Ok(Box::new(Background::start(runner)?))
    })
}

/// The executor of steps, with the drafting method.
fn runner<B: Backend>(
    mut decoder: Decoder<B>,
    drafting: Option<&Drafting>,
    beside: Beside<B>,
    host: Option<Arc<HostTier>>,
    warn: Option<Warn>,
) -> Result<Runner<B>> {
    let Some(drafting) = drafting else { return Ok(Runner::new(decoder, host)) };
    let speculation = drafting.speculation(&mut decoder, beside)?.with_warn(warn);
    Ok(Runner::new(decoder, host).with_speculation(speculation))
}

/// The lower cache tiers. They come before the first step, since a fingerprint computes one block.
fn tiers<B: Backend>(
    decoder: &mut Decoder<B>,
    assets: &Assets,
    plan: &Plan,
    options: &Options,
    memory: Option<Allocate>,
) -> Result<TierConfig> {
    let groups = plan.groups.iter().enumerate();
    let groups = groups.map(|(g, group)| HostGroup { slots: group.host_slots, block_bytes: decoder.block_bytes(g) });
    let groups: Vec<HostGroup> = groups.collect();
    let host = match groups.iter().any(|group| group.slots > 0) {
        true => {
            let tier = match memory {
                Some(allocate) => HostTier::with_memory(&groups, allocate),
                None => HostTier::new(&groups),
            };
            Some(Arc::new(tier.context("--kv-host-mib")?))
        }
        false => None,
    };
    let disk = match &options.memory.disk_tier {
        None => None,
        Some(_) if !options.prefix_caching => {
            bail!("--kv-disk keeps prefixes, but --no-enable-prefix-caching turns them off")
        }
        Some(folder) => {
            let max_bytes = options.memory.disk_tier_bytes;
            let fingerprint = decoder.fingerprint(&assets.model, &assets.weights_stamp())?;
            let config = DiskConfig::new(folder, fingerprint, max_bytes);
            Some(DiskStore::open(config).with_context(|| format!("--kv-disk {}", folder.display()))?)
        }
    };
    let block_bytes = groups.iter().map(|group| group.block_bytes as u64).sum();
    Ok(TierConfig { host, disk, copy_cost: copy_cost(block_bytes) })
}

/// Target for the time between tokens: that of the options, or the device's default.
fn inter_token(asked: InterTokenTarget, target: &Target) -> (Option<Duration>, u32) {
    match asked {
        InterTokenTarget::Off => (None, 0),
        InterTokenTarget::Within(asked) => (Some(asked), 0),
        InterTokenTarget::Auto => {
            let (target, steps) = target.device().inter_token_target();
            (Some(target), steps)
        }
    }
}
