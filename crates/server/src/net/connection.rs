//! One connection, from its handshake to its end.

use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncWrite;

use super::activity::{Activity, End, Patience};
use super::channel::{Channel, Protocol, Transport};
use super::patrol::{Order, Patrol};
use super::places::Place;
use super::requests::{Peer, Requests};
use super::socket::{Line, Socket, Stream};
use super::stats::count;
use super::streams::Streams;
use super::{NetConfig, Tls};

/// hyper's smallest read buffer, which is also what it holds of an answer before it waits for the
/// client.
const BUFFER_BYTES: usize = 32 << 10;

/// Requests one HTTP/2 connection may have under way.
const STREAMS: u32 = 128;
/// Streams a client may reset before they are looked at, and by its own errors, before the
/// connection is closed.
const RESETS_UNSEEN: usize = 20;
const RESETS_BY_ERROR: usize = 128;
/// Bytes that a client may send before they are read: on one stream, and on all of a connection.
const STREAM_WINDOW: u32 = 128 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;
/// Bytes that may wait in one stream for its client.
const STREAM_SEND_BYTES: usize = 64 << 10;
/// A silent HTTP/2 client is asked whether it is still there.
const PING_AFTER: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Said in plain HTTP to a client that spoke plain HTTP where TLS is expected.
const USE_HTTPS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 28\r\n\
    connection: close\r\n\r\nthis address expects https:\n";

/// State that all connections of a listener share.
pub(super) struct Host {
    router: Router,
    config: NetConfig,
    http1: http1::Builder,
}

impl Host {
    pub fn new(router: Router, config: NetConfig) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            // hyper's clock runs from the end of the last answer and would end idle connections
            // with it: `patrol.rs` tells the two apart.
            .header_read_timeout(None)
            .max_headers(config.header_fields)
            .max_header_size(config.header_bytes)
            .max_buf_size(config.header_bytes.max(BUFFER_BYTES));
        Self { router, config, http1 }
    }

    pub fn config(&self) -> &NetConfig {
        &self.config
    }

    pub fn patience(&self) -> Patience {
        let NetConfig { header_timeout, idle_timeout, write_stall, .. } = self.config;
        Patience { header: header_timeout, idle: idle_timeout, write_stall }
    }

    fn http2(&self, streams: Streams) -> http2::Builder<Streams> {
        let mut http2 = http2::Builder::new(streams);
        http2
            .timer(TokioTimer::new())
            .max_concurrent_streams(STREAMS)
            .max_pending_accept_reset_streams(RESETS_UNSEEN)
            .max_local_error_reset_streams(RESETS_BY_ERROR)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_send_buf_size(STREAM_SEND_BYTES)
            .max_header_list_size(u32::try_from(self.config.header_bytes).unwrap_or(u32::MAX))
            .keep_alive_interval(PING_AFTER)
            .keep_alive_timeout(PING_TIMEOUT);
        http2
    }
}

/// Serves one connection until it ends by itself, runs out of time, or has to give way.
pub(super) async fn run(host: Arc<Host>, stream: Stream, address: Option<SocketAddr>, place: Place) {
    let activity = &place.activity;
    let line = Line::new(stream);
    let mut patrol = Patrol::new(activity.clone(), line.clone());
    let opened = tokio::select! {
        biased;
        opened = open(&host, line, activity) => opened,
        order = patrol.next() => {
            if let Order::End(end) = order {
                host.count(end);
            }
            return;
        }
    };
    let Ok(Some((channel, protocol))) = opened else { return };
    let peer = Peer { address, tls: host.config.tls.is_some() };
    let requests = |streams| Requests {
        router: host.router.clone(),
        peer,
        header_fields: host.config.header_fields,
        unread_timeout: host.config.unread_timeout,
        activity: activity.clone(),
        streams,
    };
    let io = TokioIo::new(channel);
    // An error here is the client's: it left, or spoke nonsense and was answered.
    match protocol {
        Protocol::Http1 => {
            let connection = host.http1.serve_connection(io, requests(None));
            host.attend(connection, http1::Connection::graceful_shutdown, &mut patrol).await;
        }
        Protocol::Http2 => {
            activity.speaks_http2();
            let streams = Streams::new(host.config.write_stall, host.config.stats.clone());
            let _ended = AbortOnDrop(streams.clone());
            let connection = host.http2(streams.clone()).serve_connection(io, requests(Some(streams)));
            host.attend(connection, http2::Connection::graceful_shutdown, &mut patrol).await;
        }
    }
}

impl Host {
    /// Drives `connection` and does as the patrol says.
    async fn attend<C: Future>(&self, connection: C, graceful_shutdown: fn(Pin<&mut C>), patrol: &mut Patrol) {
        let mut connection = pin!(connection);
        loop {
            let order = tokio::select! {
                biased;
                _ = &mut connection => return,
                order = patrol.next() => order,
            };
            match order {
                Order::Drain => graceful_shutdown(connection.as_mut()),
                Order::Retire => {
                    self.count(End::IdleTimeout);
                    graceful_shutdown(connection.as_mut());
                }
                Order::End(end) => return self.count(end),
            }
        }
    }

    fn count(&self, end: End) {
        let stats = &self.config.stats;
        match end {
            End::HeaderTimeout => count(&stats.header_timeouts),
            End::IdleTimeout => count(&stats.idle_timeouts),
            End::WriteStall => count(&stats.write_stalls),
            End::Evicted => count(&stats.evicted),
            End::ClientLeft | End::Overdue => {}
        }
    }
}

/// Completes the handshake and finds the protocol. `None`: the client has been refused.
async fn open(host: &Host, line: Line, activity: &Arc<Activity>) -> io::Result<Option<(Channel, Protocol)>> {
    let socket = Socket::new(line, activity.clone());
    let transport = match &host.config.tls {
        None => Transport::Plain(socket),
        Some(tls) => {
            // TLS begins with a byte of value 22, HTTP with a capital letter.
            if socket.first_byte().await?.is_some_and(|byte| byte.is_ascii_uppercase()) {
                count(&host.config.stats.tls_failures);
                activity.input_is_unread();
                return say(Channel::new(Transport::Plain(socket), activity.clone()), USE_HTTPS).await.map(|()| None);
            }
            Transport::Tls(Box::new(shake_hands(tls, socket, host).await?))
        }
    };
    activity.opened();
    let mut channel = Channel::new(transport, activity.clone());
    let protocol = channel.protocol().await?;
    Ok(Some((channel, protocol)))
}

async fn shake_hands(tls: &Tls, socket: Socket, host: &Host) -> io::Result<tokio_rustls::server::TlsStream<Socket>> {
    tls.acceptor().accept(socket).await.inspect_err(|_| count(&host.config.stats.tls_failures))
}

async fn say(mut channel: Channel, mut message: &[u8]) -> io::Result<()> {
    while !message.is_empty() {
        let written = std::future::poll_fn(|cx| Pin::new(&mut channel).poll_write(cx, message)).await?;
        message = &message[written..];
    }
    std::future::poll_fn(|cx| Pin::new(&mut channel).poll_shutdown(cx)).await
}

/// However a connection's task ends, its streams end with it.
struct AbortOnDrop(Streams);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort_all();
    }
}
