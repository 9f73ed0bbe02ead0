//! `folio serve`: the model behind the OpenAI API.
//!
//! What can be wrong with the flags is found before anything is loaded. Then HTTP is served, and says that the model is
//! being loaded, while another thread loads it; then requests are answered, until a signal comes.

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
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::args::{KvEventsArgs, ModelArgs, NamingArgs, ServeArgs, TextList};
use crate::assets::Assets;
use crate::model_ref::HubName;
use crate::plan::Plan;
use crate::session::{KvEventSender, Serving, Session};
use crate::signals::{Signal, Signals};
use crate::target::Target;
use access::Access;
use ending::Ending;
use greeting::Greeting;
use listen::Bound;

/// Batches of events that may wait for the publisher; further ones are dropped and counted.
const KV_EVENT_BATCHES: usize = 4096;

/// Scrapers are few.
const METRICS_CONNECTIONS: usize = 64;

pub fn main(mut args: ServeArgs) -> Result<ExitCode> {
    let started = Instant::now();
    args.model.engine.memory.body_bytes = Some(args.limits.max_body_bytes);
    let access = Access::of(&args.access)?;
    access.check_all(&args)?;
    let endpoint =
        args.log.otlp_traces_endpoint.as_deref().map(str::parse).transpose().context("--otlp-traces-endpoint")?;
    let mut limits = args.limits.limits();
    let timeouts = args.timeouts.timeouts();
    // Bound before the model is opened: a port that is taken is said at once.
    let bound = Bound::new(&args.listen)?;
    let assets = open(&args.model, &args.naming)?;
    let names = names(&args.naming, &assets);
    let (target, note) = Target::choose(&args.model.engine)?;
    let (assets, plan) = Session::plan(assets, &args.model.engine, &target)?;
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
        guard: Arc::downgrade(&guard),
        connections: Arc::clone(&net.stats),
        needs_key: !access.keys.is_empty(),
    });
    let router = guard::protect(folio_server::router(app.clone()), Arc::clone(&guard));

    let greeting = Greeting { args: &args, access: &access, bound: &bound, log: &log, name: &names.listed[0], started };
    greeting.begin(&assets, &plan, &note);
    // Lives until the server has ended.
    let (_publisher, kv_events) = publisher(&args.kv_events, &plan)?;
    drop(entered);
    let (shutdown, ordered) = Shutdown::new();
    let served = runtime.block_on(async {
        // Before anybody is told that the server is there, and so may stop it.
        let mut signals = Signals::of(&[Signal::Interrupt, Signal::Terminate])?;
        let mut serving = Vec::new();
        if let Some(listener) = bound.metrics_listener()? {
            let hosts = TextList::all(&args.access.allowed_hosts);
            serving.push(serve_metrics(&app, listener, &hosts, net.clone(), ordered.clone())?);
        }
        serving.push(tokio::spawn(net::serve(bound.listener()?, router, net, ordered)));
        let ending = Ending { log: log.clone(), lifecycle, guard, observer, shutdown, timeouts, serving };
        let loaded = load(assets, plan, target, &args, kv_events)?;
        let mut session = tokio::select! {
            session = loaded => session.context("the thread that loads the model has ended")??,
            signal = signals.next() => return Ok(ending.while_loading(signal).await),
        };
        app.set_model(model(&session, names.clone()));
        greeting.ready(&session.phases);
        // Ends with the server, however far it is.
        let _writer = session.keep_packed(Some(greeting::warner(args.log.log_format)));
        Ok(ending.run(&session.engine, signals).await)
    });
    // A task that hangs is not waited for.
    runtime.shutdown_background();
    served
}

/// What is served, as the flags want it.
pub fn open(model: &ModelArgs, naming: &NamingArgs) -> Result<Assets> {
    let mut assets = Assets::open_as(model.model.as_deref(), &model.engine)?;
    if assets.tokenizer.is_none() {
        bail!("{} has no tokenizer; a server needs one: put tokenizer.json beside the weights", assets.name);
    }
    if let Some(path) = &naming.chat_template {
        let source = std::fs::read_to_string(path).with_context(|| format!("--chat-template {}", path.display()))?;
        assets.set_template(&source).with_context(|| format!("--chat-template {}", path.display()))?;
    }
    assets.set_generation(&naming.generation)?;
    Ok(assets)
}

/// What clients may call the model: the names that are given, or its own. Then it also answers to what the command line
/// calls it, as vLLM does, and to the name of its repository; a path is told to nobody.
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

/// The log of requests: where nobody wants a line for each, only of those that went wrong.
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

/// The metrics at an address of their own, for whoever reaches it; strange names and pages are turned away here too.
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

/// Loads on a thread of its own; what comes of it is sent.
fn load(
    assets: Assets,
    plan: Plan,
    target: Target,
    args: &ServeArgs,
    kv_events: Option<KvEventSender>,
) -> Result<oneshot::Receiver<Result<Session>>> {
    let (sender, receiver) = oneshot::channel();
    let (engine_args, timeouts) = (args.model.engine.clone(), args.timeouts.timeouts());
    let serving = Serving {
        kv_events,
        queue_timeout: Some(timeouts.queue),
        stall_timeout: match timeouts.request {
            TimeLimit::InAll(_) => None,
            TimeLimit::WithoutProgress(limit) => Some(limit),
        },
        warn: Some(greeting::warner(args.log.log_format)),
    };
    std::thread::Builder::new().name("folio-load".into()).spawn(move || {
        // Whoever waits for it may have been told to end.
        let _ = sender.send(Session::load(assets, plan, &engine_args, target, serving));
    })?;
    Ok(receiver)
}

/// The loaded model as the routes take it.
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

/// Tells routers what the prefix cache holds, where that is asked for.
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
