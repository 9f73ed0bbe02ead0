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
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::args::{EngineArgs, InterTokenTarget};
use crate::assets::Assets;
use crate::drafting::Beside;
use crate::packed::{PackedCache, PackedWeights};
use crate::phases::{self, Phases};
use crate::plan::{self, Plan};
use crate::target::{self, Opened, Target};

/// A loaded model and the engine that runs it.
pub struct Session {
    pub assets: Arc<Assets>,
    pub engine: Engine,
    pub plan: Plan,
    pub target: Target,
    /// Where blocks outlive the process.
    pub disk: Option<DiskStore>,
    /// How it came to be.
    pub phases: Phases,
    /// The GPU that it was loaded on, while it is in use.
    pub device: Weak<Device>,
    /// Where its weights came from, or may be kept.
    packed: Option<Arc<PackedWeights>>,
}

/// Requests that may wait for each that runs.
const WAITING_PER_SEQ: usize = 4;

/// Who hears what happens in the prefix cache.
pub type KvEventSender = flume::Sender<Vec<KvEvent>>;

/// What only a server asks of its engine.
#[derive(Default)]
pub struct Serving {
    pub kv_events: Option<KvEventSender>,
    /// What has waited so long for its turn ends.
    pub queue_timeout: Option<TimeLimit>,
    /// When an engine that makes no progress is given up.
    pub stall_timeout: Option<Duration>,
    /// Who hears of faults that the engine got over.
    pub warn: Option<Warn>,
}

/// Takes a line.
pub type Warn = fn(std::fmt::Arguments<'_>);

impl Session {
    pub fn start(assets: Assets, args: &EngineArgs) -> Result<Self> {
        let (target, _) = Target::choose(args)?;
        let (assets, plan) = Self::plan(assets, args, &target)?;
        Self::load(assets, plan, args, target, Serving::default())
    }

    /// What starting would take. Where the context had to be shortened, the model is opened anew for it.
    pub fn plan(mut assets: Assets, args: &EngineArgs, target: &Target) -> Result<(Assets, Plan)> {
        assets.quantize(args.quantize)?;
        assets.speculate(args)?;
        assets.packed = PackedCache::find(&assets, args, target);
        let plan = Plan::new(&assets, args, target)?;
        plan.check(args.memory.memory_unchecked)?;
        let assets = match plan.shrunk_from {
            Some(_) => assets.reopen(plan.max_model_len)?,
            None => assets,
        };
        Ok((assets, plan))
    }

    pub fn load(mut assets: Assets, plan: Plan, args: &EngineArgs, target: Target, serving: Serving) -> Result<Self> {
        match target.clone() {
            Target::Cpu(_) if args.device.load_format.is_dummy() => {
                bail!("--load-format dummy makes random weights on a GPU, and none is used here")
            }
            Target::Cpu(cpu) => {
                let packed = assets.packed.take().and_then(|cache| cache.weights(&plan.parts)).map(Arc::new);
                let (from, warn) = (packed.clone(), serving.warn.unwrap_or(warn_on_stderr));
                let open = move || {
                    let supply = from.as_ref().and_then(|packed| packed.supply(warn));
                    Ok(supply.iter().fold(Cpu::new(cpu)?, Cpu::with_packed))
                };
                let opened = |_: &Cpu| Opened::default();
                let beside = |cpu: &Cpu| Ok(cpu.beside());
                let session = Self::on(target, (open, opened, beside), assets, plan, args, serving)?;
                Ok(Self { packed, ..session })
            }
            Target::Cuda(gpu) => {
                let open = move || gpu.open();
                Self::on(target, (open, target::opened, Cuda::beside), assets, plan, args, serving)
            }
        }
    }

    /// On the backend that `open` gives, now and whenever it has to be opened anew; what it says of that; and one beside it.
    fn on<B: Backend>(
        target: Target,
        (open, opened, beside): (
            impl Fn() -> folio_device::Result<B> + Send + Sync + 'static,
            impl FnOnce(&B) -> Opened,
            Beside<B>,
        ),
        assets: Assets,
        plan: Plan,
        args: &EngineArgs,
        serving: Serving,
    ) -> Result<Self> {
        let aging = Duration::try_from_secs_f64(args.queue.priority_aging);
        let aging = aging.context("--priority-aging is not a number of seconds")?;
        let assets = Arc::new(assets);
        let bar = loading_bar();
        let backend = open()?;
        let Opened { mut phases, host_memory, device } = opened(&backend);
        let mut note = |progress: LoadProgress| {
            bar.set_length(progress.bytes_total);
            bar.set_position(progress.bytes_done);
        };
        let mut load = |backend| Ok(Decoder::load(backend, &assets.model, plan.limits(), &mut note)?);
        let mut decoder = phases.time("weights", || load(backend))?;
        // Both compute with the weights before there is an engine that would load them again.
        let computes_first = args.memory.kv_disk.is_some() || assets.drafting.is_some();
        if computes_first && decoder.backend_mut().check().is_err() {
            drop(decoder);
            decoder = phases.time("weights once more", || load(open()?))?;
        }
        bar.finish_and_clear();
        if let Target::Cuda(_) = target {
            phases.time("first step", || phases::first_step(&mut decoder))?;
        }
        let memory = decoder.memory();
        debug_assert_eq!(
            (memory.weights, memory.activations, memory.kv),
            (plan.bytes.weights, plan.bytes.activations, plan.bytes.kv),
            "what was planned and what was taken"
        );
        let tiers = tiers(&mut decoder, &assets, &plan, args, host_memory)?;
        let (host, disk) = (tiers.host.clone(), tiers.disk.clone());
        let (inter_token_target, inter_token_steps) = inter_token(args.queue.inter_token_target, &target);
        let config = EngineConfig {
            max_seqs: plan.max_seqs,
            max_waiting: args.queue.max_waiting.unwrap_or(WAITING_PER_SEQ * plan.max_seqs),
            budget_tokens: plan.budget_tokens,
            max_model_len: plan.max_model_len,
            groups: plan.group_configs(),
            prefix_caching: !args.no_enable_prefix_caching,
            inter_token_target,
            inter_token_steps,
            longest_step: longest_step(&target),
            aging,
            prompt_logit_rows: plan::PROMPT_LOGIT_ROWS,
            logits_width: assets.model.spec.vocab_size,
            embedding_width: assets.model.spec.hidden,
            eos: assets.eos.clone(),
            tiers,
            expects_drafts: assets.drafting.as_ref().is_some_and(|drafting| drafting.fixed),
            overlap: !args.queue.no_overlap,
            kv_events: serving.kv_events,
            queue_timeout: serving.queue_timeout,
            stall_timeout: serving.stall_timeout,
            warn: serving.warn,
            debug: args.queue.debug.then_some(debug_line),
            rebuild: Some(rebuild((open, beside), Arc::clone(&assets), plan.limits(), host.clone(), serving.warn)),
            ..EngineConfig::default()
        };
        let runner = runner(decoder, &assets, beside, host, serving.warn)?;
        let executor = Background::start(runner)?;
        let engine = Engine::start(Box::new(executor), config)?;
        Ok(Self { assets, engine, plan, target, disk, phases, device, packed: None })
    }

    /// Begins to keep what was packed, where that is wanted and it was not there; `warn` hears if that fails. It is given up when
    /// what comes back goes.
    pub fn keep_packed(&mut self, warn: Option<Warn>) -> Option<PackedWriter> {
        self.packed.take().and_then(|packed| packed.keep(warn))
    }

    /// Waits for the engine's thread to end.
    pub fn end(self) {
        self.engine.shutdown();
    }
}

/// Loads the same weights again, for an executor whose thread has ended; the files have stayed mapped.
fn rebuild<B: Backend>(
    (open, beside): (impl Fn() -> folio_device::Result<B> + Send + Sync + 'static, Beside<B>),
    assets: Arc<Assets>,
    limits: DecoderLimits,
    host: Option<Arc<HostTier>>,
    warn: Option<Warn>,
) -> Rebuild {
    Rebuild::new(move || {
        let failed = |error: anyhow::Error| folio_engine::Error::Step(format!("{error:#}"));
        let backend = open().map_err(|error| failed(error.into()))?;
        let decoder = Decoder::load(backend, &assets.model, limits.clone(), &mut |_| {})?;
        let runner = runner(decoder, &assets, beside, host.clone(), warn).map_err(failed)?;
        Ok(Box::new(Background::start(runner)?))
    })
}

/// What runs steps, with what guesses ahead.
fn runner<B: Backend>(
    mut decoder: Decoder<B>,
    assets: &Assets,
    beside: Beside<B>,
    host: Option<Arc<HostTier>>,
    warn: Option<Warn>,
) -> Result<Runner<B>> {
    let Some(drafting) = &assets.drafting else { return Ok(Runner::new(decoder, host)) };
    let speculation = drafting.speculation(&mut decoder, beside)?.with_warn(warn);
    Ok(Runner::new(decoder, host).with_speculation(speculation))
}

/// What lies below the device. Comes before the first step, since a fingerprint computes one block.
fn tiers<B: Backend>(
    decoder: &mut Decoder<B>,
    assets: &Assets,
    plan: &Plan,
    args: &EngineArgs,
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
    let disk = match &args.memory.kv_disk {
        None => None,
        Some(_) if args.no_enable_prefix_caching => {
            bail!("--kv-disk keeps prefixes, but --no-enable-prefix-caching turns them off")
        }
        Some(folder) => {
            let max_bytes = plan::mebibytes("--kv-disk-mib", args.memory.kv_disk_mib)?;
            let fingerprint = decoder.fingerprint(&assets.model, &assets.weights_stamp())?;
            let config = DiskConfig::new(folder, fingerprint, max_bytes);
            Some(DiskStore::open(config).with_context(|| format!("--kv-disk {}", folder.display()))?)
        }
    };
    let block_bytes = groups.iter().map(|group| group.block_bytes as u64).sum();
    Ok(TierConfig { host, disk, copy_cost: copy_cost(block_bytes) })
}

/// For how long prompts may hold others up: as asked for, and else what costs nothing to speak of. On a CPU steps of a few dozen
/// rows are as fast by the row as longer ones, so that they are kept short; a GPU wants them long.
fn inter_token(asked: Option<InterTokenTarget>, target: &Target) -> (Option<Duration>, u32) {
    match (asked, target) {
        (Some(InterTokenTarget(asked)), _) => (asked, 0),
        (None, Target::Cpu(_)) => (Some(Duration::from_millis(15)), 3),
        (None, Target::Cuda(_)) => (Some(Duration::from_millis(50)), 0),
    }
}

/// For commands that have no log.
fn warn_on_stderr(line: std::fmt::Arguments<'_>) {
    say!("warning: {line}");
}

/// While a step runs nobody joins, leaves or hears anything. On a CPU a step of prompts alone could take minutes, and is no faster by
/// the row than one of a second; a GPU's budget is done long before.
fn longest_step(target: &Target) -> Option<Duration> {
    match target {
        Target::Cpu(_) => Some(Duration::from_secs(1)),
        Target::Cuda(_) => None,
    }
}

/// Nobody may be there to read it, which must not end the engine.
fn debug_line(line: std::fmt::Arguments<'_>) {
    say!("debug: {line}");
}

/// Drawn only when loading takes long enough to be watched.
fn loading_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("loading {bar:30} {bytes}/{total_bytes} {eta}");
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(4));
    bar.with_style(style.expect("the template is well formed"))
}
