//! The server as `folio serve` puts it together with default flags, on a loopback port and over an
//! engine that others use too. Its log is written, but to nowhere.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use folio_measure::bench::http::{SERVER_THREAD, Server};
use folio_server::guard::{self, Guard, GuardConfig, Hosts, Lifecycle};
use folio_server::net::{self, Listener, NetConfig, Shutdown, ShutdownHandle};
use folio_server::observe::{Level, Log, LogFormat, Observer, ObserverConfig};
use folio_server::{App, Limits, Surroundings, Timeouts};
use folio_session::Session;
use tokio::runtime::Runtime;

use crate::serve;

/// A thread that has ended takes its CPU time with it, and connections wait while the engine is
/// asked directly: neither ends within this.
const KEEP_ALIVE: Duration = Duration::from_secs(24 * 3600);

pub struct Loopback {
    address: SocketAddr,
    runtime: Runtime,
    shutdown: ShutdownHandle,
}

impl Loopback {
    /// All its threads have one name: the one that serves, and those that prepare prompts.
    pub fn start(session: &Session, concurrency: usize) -> Result<Self> {
        ensure!(
            session.assets.tokenizer.is_some(),
            "{} has no tokenizer, which a server needs: put tokenizer.json beside the weights",
            session.assets.name
        );
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(SERVER_THREAD)
            .thread_keep_alive(KEEP_ALIVE)
            .enable_all()
            .build()?;
        let entered = runtime.enter();
        let (limits, timeouts) = (limits(concurrency), timeouts());
        let name = session.assets.name.clone();
        let observer = Observer::new(ObserverConfig {
            model_name: name.as_str().into(),
            max_model_len: session.plan.max_model_len,
            started: SystemTime::now(),
            log: Log::to(LogFormat::Text, Level::Info, std::io::sink()).context("could not start the log")?,
            traces: None,
        });
        let app = App::new(limits.clone(), timeouts.clone(), Lifecycle::new(), observer);
        let guard = Guard::new(GuardConfig {
            hosts: Hosts::new(Ipv4Addr::LOCALHOST.into(), &[])?,
            limits: limits.clone(),
            ..GuardConfig::new(app.lifecycle().clone())
        });
        let net = NetConfig::from((&limits, &timeouts));
        app.set_surroundings(Surroundings {
            in_flight: guard.in_flight_counts(),
            connections: Arc::clone(&net.stats),
            needs_key: false,
        });
        let router = guard::protect(folio_server::router(app.clone()), guard);
        app.set_model(serve::model(session, vec![name].into()));
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("could not listen")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let listener = Listener::Tcp(tokio::net::TcpListener::from_std(listener)?);
        let (shutdown, ordered) = Shutdown::new();
        runtime.spawn(net::serve(listener, router, net, ordered));
        drop(entered);
        Ok(Self { address, runtime, shutdown })
    }
}

impl Server for Loopback {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn end(self) {
        self.shutdown.close();
        self.runtime.shutdown_background();
    }
}

/// The default ones, with room for all streams.
fn limits(concurrency: usize) -> Limits {
    let limits = Limits::default();
    Limits {
        // One more, for the requests that come one at a time.
        connections: limits.connections.max(concurrency + 1),
        in_flight: limits.in_flight.max(concurrency),
        in_flight_per_key: limits.in_flight_per_key.max(concurrency),
        ..limits
    }
}

/// The default ones, save for connections that wait for their next request, or for their first.
fn timeouts() -> Timeouts {
    Timeouts { header: KEEP_ALIVE, idle: KEEP_ALIVE, ..Timeouts::default() }
}
