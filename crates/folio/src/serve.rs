//! `folio serve`: the model behind the OpenAI API.

use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use folio_server::Service;

use crate::args::ServeArgs;
use crate::assets::Assets;
use crate::session::Session;
use crate::table;

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
    let session = Session::start(assets, &args.model.engine)?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let service = Service {
        engine: session.engine.clone(),
        tokenizer,
        template: session.assets.template.clone(),
        model_name: session.assets.name.as_str().into(),
        started,
        defaults: session.assets.defaults,
    };
    greet(&session, listener.local_addr()?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        folio_server::serve(listener, service, stopped()).await.context("the server failed")
    })
}

/// Ctrl-C, or SIGTERM where there is such a thing.
async fn stopped() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

fn greet(session: &Session, address: SocketAddr) {
    let plan = &session.plan;
    let memory = session.memory;
    eprintln!(
        "{} is ready at http://{address}\n  weights {}, keys and values {} for {} tokens, activations {}; {} threads, \
         {} requests at once, context {}\n  try: curl http://{address}/v1/chat/completions -H 'content-type: \
         application/json' -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"What does `Rc::clone` do?\"}}]}}'",
        session.assets.name,
        table::bytes(memory.weights),
        table::bytes(plan.kv_bytes),
        plan.kv_tokens,
        table::bytes(memory.activations),
        plan.threads,
        plan.max_seqs,
        plan.max_model_len,
    );
}
