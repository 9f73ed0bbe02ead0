//! The sources of connections: TCP and Unix sockets.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpListener;
#[cfg(unix)]
use tokio::net::UnixListener;

use super::socket::Stream;

/// Bytes that the kernel may hold for a client that does not read; Linux doubles it for its own
/// bookkeeping. By default it would grow to megabytes a connection, and a stalled reader would be
/// noticed only after those.
const SEND_BUFFER_BYTES: usize = 128 << 10;

/// A client whose machine has vanished is noticed after about two minutes even when nothing is
/// being sent to it.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(15);
#[cfg(any(target_os = "linux", target_os = "macos"))]
const KEEPALIVE_PROBES: u32 = 4;

/// A bound socket.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    #[cfg(unix)]
    Unix(UnixListener),
}

impl Listener {
    /// The address it is bound to; `None` on a Unix socket.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            #[cfg(unix)]
            Self::Unix(_) => None,
        }
    }
}

/// A source of connections, so that tests can have one that fails.
pub(super) trait Accept {
    fn accept(&mut self) -> impl Future<Output = io::Result<(Stream, Option<SocketAddr>)>> + Send;
}

impl Accept for Listener {
    async fn accept(&mut self) -> io::Result<(Stream, Option<SocketAddr>)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Options are improvements: a socket that refuses one (its client has gone already)
                // is served without.
                let _ = stream.set_nodelay(true);
                let socket = SockRef::from(&stream);
                let _ = socket.set_send_buffer_size(SEND_BUFFER_BYTES);
                let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_AFTER).with_interval(KEEPALIVE_EVERY);
                #[cfg(any(target_os = "linux", target_os = "macos"))]
                let keepalive = keepalive.with_retries(KEEPALIVE_PROBES);
                let _ = socket.set_tcp_keepalive(&keepalive);
                Ok((Stream::Tcp(stream), Some(address)))
            }
            #[cfg(unix)]
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                Ok((Stream::Unix(stream), None))
            }
        }
    }
}
