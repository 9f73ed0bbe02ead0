//! Tells routers what the prefix cache holds, in the messages that vLLM sends: a ZeroMQ PUB socket with a sequence
//! number on every batch of events, and a ROUTER socket that repeats the batches a subscriber missed.
//!
//! The publisher's thread takes batches from the engine, encodes them and keeps the last of them in a [`Log`]. Every
//! peer reads the log at its own pace: one that is slow or gone misses batches, sees it by their numbers, and costs
//! neither memory nor the engine's time. The part of ZMTP that this takes is written here (`zmtp.rs`), because a server
//! must not trust the lengths that strangers send it. docs/kv-events.md describes the format.

mod encode;
mod log;
mod peers;
#[cfg(test)]
mod tests;
mod zmtp;

use std::future::Future;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use folio_engine::KvEvent;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};

use log::Log;
use peers::Feed;

/// Peers served at once; further ones wait to be accepted.
const MAX_SUBSCRIBERS: usize = 256;
/// A replay keeps what it still has to send, so there are fewer of them.
const MAX_REPLAYS: usize = 16;

#[derive(Clone, Debug)]
pub struct KvEventsConfig {
    /// Where subscribers connect to: `tcp://host:port`, where the host `*` is every IPv4 address of the machine.
    pub endpoint: String,
    /// The first frame of every message, which subscribers filter by.
    pub topic: String,
    /// Where a subscriber asks for batches it missed.
    pub replay_endpoint: Option<String>,
    /// Batches kept for replay and for subscribers that lag behind; at least 1.
    pub buffer_steps: usize,
    /// The sliding window of each layer group; none, or no entry, where every token is seen.
    pub windows: Vec<Option<usize>>,
}

impl Default for KvEventsConfig {
    fn default() -> Self {
        Self {
            endpoint: "tcp://*:5557".into(),
            topic: String::new(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            windows: Vec::new(),
        }
    }
}

/// Publishes until it is dropped, or the sender of its events is.
#[derive(Debug)]
pub struct KvEventPublisher {
    /// The thread ends when this goes.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    #[cfg(test)]
    probe: tests::Probe,
}

impl KvEventPublisher {
    /// Every vector that `events` gives becomes one message; empty ones are passed over. The publisher takes them up as
    /// fast as they come, whatever its subscribers do.
    pub fn start(config: KvEventsConfig, events: flume::Receiver<Vec<KvEvent>>) -> Result<Self> {
        let live = bind(&config.endpoint)?;
        let replay = config.replay_endpoint.as_deref().map(bind).transpose()?;
        let feed = Arc::new(Feed::new(Log::new(config.buffer_steps), config.topic));
        #[cfg(test)]
        let probe = tests::Probe::new(&live, replay.as_ref(), &feed)?;

        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let windows = config.windows;
        let serving = async move {
            let live = accept(live, MAX_SUBSCRIBERS, |peer| peers::serve_subscriber(peer, Arc::clone(&feed)));
            let replay = async {
                match replay {
                    Some(replay) => {
                        accept(replay, MAX_REPLAYS, |peer| peers::serve_replay(peer, Arc::clone(&feed))).await
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = publish(&events, &feed, &windows) => {}
                _ = stopped => {}
                // An endless loop each; what ends one of them is a listener that the runtime did not take.
                _ = live => {}
                _ = replay => {}
            }
        };
        let thread = thread::Builder::new().name("kv-events".into()).spawn(move || runtime.block_on(serving))?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
            #[cfg(test)]
            probe,
        })
    }
}

impl Drop for KvEventPublisher {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

fn bind(endpoint: &str) -> Result<TcpListener> {
    let Some((host, port)) = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':')) else {
        bail!("a kv event endpoint is tcp://host:port, not {endpoint:?}");
    };
    let Ok(port) = port.parse::<u16>() else {
        bail!("a kv event endpoint ends in a port number, unlike {endpoint:?}");
    };
    let host = if host == "*" { "0.0.0.0" } else { host.trim_start_matches('[').trim_end_matches(']') };
    let listen = || -> io::Result<TcpListener> {
        let addresses: Vec<_> = (host, port).to_socket_addrs()?.collect();
        let listener = TcpListener::bind(addresses.as_slice())?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().with_context(|| format!("could not publish kv events at {endpoint}"))
}

/// Gives every peer that connects a task of its own.
async fn accept<F>(listener: TcpListener, most: usize, serve: impl Fn(TcpStream) -> F) -> io::Result<()>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(most));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
        match listener.accept().await {
            Ok((stream, _)) => {
                let served = serve(stream);
                tokio::spawn(async move {
                    // A peer that breaks the protocol or its connection is done with; it sees its end close.
                    let _ = served.await;
                    drop(place);
                });
            }
            // A peer that left before it was accepted, or no file descriptor left: the next try may fare better.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn publish(events: &flume::Receiver<Vec<KvEvent>>, feed: &Feed, windows: &[Option<usize>]) {
    while let Ok(batch) = events.recv_async().await {
        if batch.is_empty() {
            continue;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        feed.log.push(encode::batch(now.as_secs_f64(), &batch, windows));
        // A full channel would keep this task going for ever: peers have their turn after each batch.
        tokio::task::yield_now().await;
    }
}
