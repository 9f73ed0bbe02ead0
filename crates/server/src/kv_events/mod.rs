//! Publishes the contents of the prefix cache to routers, in the messages that vLLM sends: a ZeroMQ
//! PUB socket with a sequence number on every batch of events, and a ROUTER socket that repeats the
//! batches a subscriber missed.
//!
//! The publisher's thread receives batches from the engine, encodes them and keeps the latest in a
//! [`Log`]. Every peer reads the log at its own pace: a peer that is slow or gone misses batches,
//! sees the gap in their numbers, and costs neither memory nor the engine's time. The necessary
//! part of ZMTP is written here (`zmtp.rs`), because a server must not trust the lengths that
//! strangers send. docs/kv-events.md describes the format.

mod encode;
mod error;
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

use folio_engine::KvEvent;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};

pub use error::Error;
use log::Log;
use peers::Feed;

/// Subscribers that are served at once; further ones wait to be accepted.
const MAX_SUBSCRIBERS: usize = 256;
/// A replay holds the batches that it still has to send, so fewer of them run at once.
const MAX_REPLAYS: usize = 16;

#[derive(Clone, Debug)]
pub struct KvEventsConfig {
    /// The address of the PUB socket: `tcp://host:port`, where the host `*` is every IPv4 address
    /// of the machine.
    pub endpoint: String,
    /// The first frame of every message, by which subscribers filter.
    pub topic: String,
    /// The address of the ROUTER socket, which a subscriber asks for batches that it missed.
    pub replay_endpoint: Option<String>,
    /// Batches that are kept for replay and for subscribers that lag behind; at least 1.
    pub buffer_steps: usize,
    /// The sliding window of each layer group; `None`, or no entry, if it attends to every token.
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

/// The publisher's thread; it runs until this value or the sender of its events is dropped.
#[derive(Debug)]
pub struct KvEventPublisher {
    /// The thread ends when this sender is dropped.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    #[cfg(test)]
    probe: tests::Probe,
}

impl KvEventPublisher {
    /// Every vector from `events` becomes one message; empty vectors are skipped. The publisher
    /// receives them as fast as they arrive, whatever its subscribers do.
    pub fn start(config: KvEventsConfig, events: flume::Receiver<Vec<KvEvent>>) -> Result<Self, Error> {
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
                // Two endless loops; one of them ends only if the runtime refused its listener.
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
            // A thread that panicked has ended as well.
            let _ = thread.join();
        }
    }
}

fn bind(endpoint: &str) -> Result<TcpListener, Error> {
    let Some((host, port)) = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':')) else {
        return Err(Error::NotTcp(endpoint.into()));
    };
    let port = port.parse().map_err(|_| Error::Port(endpoint.into()))?;
    let host = if host == "*" { "0.0.0.0" } else { host.trim_start_matches('[').trim_end_matches(']') };
    listen(host, port).map_err(|source| Error::Listen { endpoint: endpoint.into(), source })
}

fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let addresses: Vec<_> = (host, port).to_socket_addrs()?.collect();
    let listener = TcpListener::bind(addresses.as_slice())?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves every peer that connects in a task of its own.
async fn accept<F>(listener: TcpListener, most: usize, serve: impl Fn(TcpStream) -> F) -> io::Result<()>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let permits = Arc::new(Semaphore::new(most));
    loop {
        let permit = Arc::clone(&permits).acquire_owned().await.map_err(io::Error::other)?;
        match listener.accept().await {
            Ok((stream, _)) => {
                let served = serve(stream);
                tokio::spawn(async move {
                    // A peer that breaks the protocol or its connection sees the connection close.
                    let _ = served.await;
                    drop(permit);
                });
            }
            // A peer that left before it was accepted, or no file descriptor left: the next attempt
            // may succeed.
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
        // A full channel would never let this task wait: peers run after each batch.
        tokio::task::yield_now().await;
    }
}
