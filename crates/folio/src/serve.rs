//! `folio serve`: the model behind the OpenAI API.
//!
//! Flags are checked before anything is loaded. While another thread loads the model, the server
//! already answers that it is loading. Then it answers requests until a signal ends it.

mod access;
mod ending;
mod greeting;
mod listen;

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, bail};
use folio_engine::TimeLimit;
use folio_server::guard::{self, Guard, GuardConfig, Hosts, Lifecycle};
use folio_server::kv_events::{KvEventPublisher, KvEventsConfig};
use folio_server::net::{self, Listener, NetConfig, Shutdown};
use folio_server::observe::{Level, Log, Observer, ObserverConfig, Traces};
use folio_server::{App, Model, ModelNames, Surroundings};
use folio_session::{Assets, BodyMemory, Hooks, HubName, KvEventSender, Opened, Options, Plan, Session, Target};
use folio_terminal::{Signal, Signals};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::args::{KvEventsArgs, ModelArgs, NamingArgs, ServeArgs, TextList};
use crate::hooks;
use access::Access;
use ending::Ending;
use greeting::Greeting;
use listen::Bound;

/// Batches of events that may wait for the publisher; further ones are dropped and counted.
const KV_EVENT_BATCHES: usize = 4096;

/// Maximum number of connections to the metrics address.
const METRICS_CONNECTIONS: usize = 64;

pub fn main(args: ServeArgs) -> Result<ExitCode> {
    let started = Instant::now();
    let access = Access::of(&args.access)?;
    access.check_all(&args)?;
    let endpoint =
        args.log.otlp_traces_endpoint.as_deref().map(str::parse).transpose().context("--otlp-traces-endpoint")?;
    let mut limits = args.limits.limits();
    let timeouts = args.timeouts.timeouts();
    // The address is bound before the model is opened, so that a port in use is reported at once.
    let bound = Bound::new(&args.listen)?;
    let mut options = args.model.engine.options()?;
    let body_memory = args.model.engine.memory.max_body_memory;
    options.memory.bodies = Some(bodies(args.limits.max_body_bytes, body_memory.map(|size| size.0)));
    let assets = open(&args.model, &options, &args.naming)?;
    let names = names(&args.naming, &assets);
    let (target, note) = Target::choose(&options)?;
    let opened = Opened::new(assets, &options, target)?;
    if let Some(warning) = &opened.warning {
        hooks::plan_warning(format_args!("{warning}"));
    }
    let plan = &opened.plan;
    limits.body_memory = usize::try_from(plan.bytes.bodies).unwrap_or(usize::MAX);

    // The compute threads take all cores; HTTP needs little of one.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let entered = runtime.enter();
    let log = Log::start(args.log.log_format, args.log.log_level).context("could not start the log")?;
    let observer = Observer::new(ObserverConfig {
        model_name: names.listed[0].as_str().into(),
        max_model_len: plan.max_model_len,
        started: SystemTime::now(),
        log: request_log(&args, &log)?,
        traces: endpoint.map(|endpoint| Traces::start(endpoint, "folio")),
    });
    let lifecycle = Lifecycle::new();
    let app = App::new(limits.clone(), timeouts.clone(), lifecycle.clone(), observer.clone());
    let guard = Guard::new(guard_config(&app, &access, &bound, &args)?);
    let net = NetConfig { tls: bound.tls.clone(), ..NetConfig::from((&limits, &timeouts)) };
    app.set_surroundings(Surroundings {
        in_flight: guard.in_flight_counts(),
        connections: Arc::clone(&net.stats),
        needs_key: !access.keys.is_empty(),
    });
    let router = guard::protect(folio_server::router(app.clone()), Arc::clone(&guard));

    let greeting = Greeting { args: &args, access: &access, bound: &bound, log: &log, name: &names.listed[0], started };
    greeting.begin(&opened, &note);
    // The publisher lives until the server has ended.
    let (_publisher, kv_events) = publisher(&args.kv_events, plan)?;
    drop(entered);
    let (shutdown, ordered) = Shutdown::new();
    let served = runtime.block_on(async {
        // Signals are handled before the server announces itself to those who may stop it.
        let mut signals = Signals::of(&[Signal::Interrupt, Signal::Terminate])?;
        let mut serving = Vec::new();
        if let Some(listener) = bound.metrics_listener()? {
            let hosts = TextList::all(&args.access.allowed_hosts);
            serving.push(serve_metrics(&app, listener, &hosts, net.clone(), ordered.clone())?);
        }
        serving.push(tokio::spawn(net::serve(bound.listener()?, router, net, ordered)));
        let ending = Ending { log: log.clone(), lifecycle, guard, observer, shutdown, timeouts, serving };
        let loaded = load(opened, options, &args, kv_events)?;
        let mut session = tokio::select! {
            session = loaded => session.context("the loading thread has ended")??,
            signal = signals.next() => return Ok(ending.while_loading(signal).await),
        };
        app.set_model(model(&session, names.clone()));
        greeting.ready(&session.phases);
        // The writer ends with the server, finished or not.
        let _writer = session.keep_packed(Some(greeting::warner(args.log.log_format)));
        Ok(ending.run(&session.engine, signals).await)
    });
    // The runtime does not wait for tasks that hang.
    runtime.shutdown_background();
    served
}

/// Opens the model with the tokenizer, chat template and sampling defaults that the flags ask for.
pub fn open(model: &ModelArgs, options: &Options, naming: &NamingArgs) -> Result<Assets> {
    let mut assets = Assets::open(model.model.as_deref(), options)?;
    if assets.tokenizer.is_none() {
        bail!("{} has no tokenizer; a server needs one: put tokenizer.json beside the weights", assets.name);
    }
    if let Some(path) = &naming.chat_template {
        let source = std::fs::read_to_string(path).with_context(|| format!("--chat-template {}", path.display()))?;
        assets.set_template(&source).with_context(|| format!("--chat-template {}", path.display()))?;
    }
    assets.set_generation(&naming.generation.options())?;
    Ok(assets)
}

/// Memory for bodies of at most `body_bytes` bytes, `total` in all.
pub fn bodies(body_bytes: usize, total: Option<u64>) -> BodyMemory {
    let least = folio_server::least_body_memory(body_bytes) as u64;
    BodyMemory { body_bytes: body_bytes as u64, least, total }
}

/// Names that clients may call the model by: those of the flags, or else its own. In that case it
/// also answers to its name on the command line, as in vLLM, and to that of its repository. Paths
/// are never reported.
pub fn names(naming: &NamingArgs, assets: &Assets) -> ModelNames {
    if !naming.served_model_name.is_empty() {
        return ModelNames { listed: naming.served_model_name.clone(), unlisted: Vec::new() };
    }
    let given = assets.source().unwrap_or_default();
    let repo = HubName::of_argument(given).map(|hub| hub.repo);
    let mut unlisted: Vec<String> =
        [given, given.trim_end_matches('/')].map(str::to_string).into_iter().chain(repo).collect();
    unlisted.retain(|name| !name.is_empty() && *name != assets.name);
    unlisted.dedup();
    ModelNames { listed: vec![assets.name.clone()], unlisted }
}

/// The log of requests: of all, or with `--disable-log-requests` of failed ones only.
fn request_log(args: &ServeArgs, log: &Log) -> Result<Log> {
    match args.log.disable_log_requests {
        true => Log::start(args.log.log_format, args.log.log_level.max(Level::Warn)).context("could not start the log"),
        false => Ok(log.clone()),
    }
}

fn guard_config(app: &App, access: &Access, bound: &Bound, args: &ServeArgs) -> Result<GuardConfig> {
    let (waiting, panicked, refused) = (app.clone(), app.observer().clone(), app.observer().clone());
    Ok(GuardConfig {
        keys: access.keys.clone(),
        hosts: bound.hosts(&TextList::all(&args.access.allowed_hosts))?,
        origins: guard::Origins::new(&TextList::all(&args.access.allowed_origins)).context("--allowed-origins")?,
        limits: app.limits().clone(),
        retry_after: Arc::new(move || waiting.expected_wait()),
        on_panic: Arc::new(move |id| panicked.panicked(&format!("request {}", id.id))),
        on_refusal: Arc::new(move |refusal| access::note_refusal(&refused, &refusal)),
        ..GuardConfig::new(app.lifecycle().clone())
    })
}

/// Serves the metrics at an address of their own, without keys. Host and Origin are checked as elsewhere.
fn serve_metrics(
    app: &App,
    listener: Listener,
    allowed_hosts: &[String],
    net: NetConfig,
    ordered: Shutdown,
) -> Result<JoinHandle<io::Result<()>>> {
    let address = listener.address().context("--metrics-listen")?;
    let guard = Guard::new(GuardConfig {
        hosts: Hosts::new(address.ip(), allowed_hosts).context("--allowed-hosts")?,
        limits: app.limits().clone(),
        ..GuardConfig::new(app.lifecycle().clone())
    });
    let net = NetConfig { connections: METRICS_CONNECTIONS, tls: None, stats: Arc::default(), ..net };
    let router = guard::protect(folio_server::metrics_router(app.clone()), guard);
    Ok(tokio::spawn(net::serve(listener, router, net, ordered)))
}

/// Loads the model on a thread of its own, which sends the result.
fn load(
    opened: Opened,
    options: Options,
    args: &ServeArgs,
    kv_events: Option<KvEventSender>,
) -> Result<oneshot::Receiver<Result<Session>>> {
    let (sender, receiver) = oneshot::channel();
    let timeouts = args.timeouts.timeouts();
    let warner = greeting::warner(args.log.log_format);
    let hooks = Hooks {
        plan_warning: None,
        progress: Some(Box::new(hooks::loading_bar())),
        load_warning: Some(warner),
        warn: Some(warner),
        kv_events,
        queue_timeout: Some(timeouts.queue),
        stall_timeout: match timeouts.request {
            TimeLimit::InAll(_) => None,
            TimeLimit::WithoutProgress(limit) => Some(limit),
        },
    };
    std::thread::Builder::new().name("folio-load".into()).spawn(move || {
        // The receiver is gone if a signal ended the server meanwhile.
        let _ = sender.send(Session::load(opened, &options, hooks));
    })?;
    Ok(receiver)
}

/// The loaded model in the form that the routes take.
pub fn model(session: &Session, names: ModelNames) -> Model {
    let assets = &session.assets;
    Model {
        engine: session.engine.clone(),
        tokenizer: assets.tokenizer.clone().unwrap_or_else(|| unreachable!("checked when it was opened")),
        template: assets.template.clone(),
        names,
        defaults: assets.defaults,
        vocab_size: assets.model.spec.vocab_size,
        max_seqs: session.plan.max_seqs,
        embeds: true,
        info: greeting::info(session),
    }
}

/// Starts the publisher of KV events for routers, if an endpoint is given.
fn publisher(args: &KvEventsArgs, plan: &Plan) -> Result<(Option<KvEventPublisher>, Option<KvEventSender>)> {
    let Some(endpoint) = &args.kv_events_endpoint else { return Ok((None, None)) };
    let config = KvEventsConfig {
        endpoint: endpoint.clone(),
        topic: args.kv_events_topic.clone(),
        replay_endpoint: args.kv_events_replay_endpoint.clone(),
        buffer_steps: args.kv_events_buffer_steps.max(1),
        windows: plan.groups.iter().map(|group| group.window).collect(),
    };
    let (sender, receiver) = flume::bounded(KV_EVENT_BATCHES);
    Ok((Some(KvEventPublisher::start(config, receiver)?), Some(sender)))
}
