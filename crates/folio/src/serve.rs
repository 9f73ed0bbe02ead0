//! `folio serve`: the model behind the OpenAI API.

use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use folio_server::Service;

use crate::args::{KvEventsArgs, ServeArgs};
use crate::assets::Assets;
use crate::kv_events::{KvEventPublisher, KvEventsConfig};
use crate::plan::{self, Plan};
use crate::session::{KvEventSender, Session};

/// Batches of events that may wait for the publisher; further ones are dropped and counted.
const KV_EVENT_BATCHES: usize = 4096;

pub fn main(args: ServeArgs) -> Result<()> {
    if !args.host.is_loopback() {
        bail!("--host {}: serving beyond this machine needs API keys, which this version does not have yet", args.host);
    }
    let assets = Assets::open(args.model.model.as_deref(), args.model.engine.max_model_len)?;
    let Some(tokenizer) = assets.tokenizer.clone() else {
        bail!("{} has no tokenizer; `folio serve` needs one: put tokenizer.json beside the weights", assets.name);
    };
    let address = SocketAddr::new(args.host, args.port);
    // Bound before the model is loaded: a port that is taken is said at once.
    let listener = std::net::TcpListener::bind(address).with_context(|| format!("could not listen on {address}"))?;
    listener.set_nonblocking(true)?;
    let (assets, plan) = Session::plan(assets, &args.model.engine)?;
    eprint!("{}", plan::print(&plan, &assets.name));
    // Lives until the server has ended.
    let (_publisher, kv_events) = publisher(&args.kv_events, &plan)?;
    let session = Session::load(assets, plan, &args.model.engine, kv_events)?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let service = Service {
        engine: session.engine.clone(),
        tokenizer,
        template: session.assets.template.clone(),
        model_name: session.assets.name.as_str().into(),
        started,
        defaults: session.assets.defaults,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let address = listener.local_addr()?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        // Before anybody is told that the server is ready, and so may stop it.
        let stopped = stopped()?;
        greet(&session, address);
        folio_server::serve(listener, service, stopped).await.context("the server failed")
    })
}

/// Ctrl-C or SIGTERM, from this call on.
#[cfg(unix)]
fn stopped() -> Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn stopped() -> Result<impl Future<Output = ()>> {
    Ok(async { drop(tokio::signal::ctrl_c().await) })
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

fn greet(session: &Session, address: SocketAddr) {
    eprintln!(
        "{} is ready at http://{address}\n  try: curl http://{address}/v1/chat/completions -H 'content-type: \
         application/json' -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"What does `Rc::clone` do?\"}}]}}'",
        session.assets.name,
    );
}
