//! The loop that accepts connections.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::task::JoinSet;

use super::NetConfig;
use super::connection::{self, Host};
use super::listener::{Accept, Listener};
use super::places::Places;
use super::shutdown::{Shutdown, Stage};
use super::stats::count;

/// Between attempts while the system has no more files or memory to give.
const BACK_OFF_LEAST: Duration = Duration::from_millis(5);
const BACK_OFF_MOST: Duration = Duration::from_secs(1);

/// Serves `router` until `shutdown` says otherwise: after `close`, until every connection has
/// finished what it was answering; after `abort`, at once. Nothing that a client or the network
/// does ends it.
pub async fn serve(listener: Listener, router: Router, config: NetConfig, shutdown: Shutdown) -> io::Result<()> {
    run(listener, router, config, shutdown).await;
    Ok(())
}

async fn run(mut listener: impl Accept, router: Router, config: NetConfig, mut shutdown: Shutdown) {
    let places = Places::new(config.connections, config.stats.clone());
    let host = Arc::new(Host::new(router, config));
    // Dropped with this future: no connection outlives it.
    let mut connections = JoinSet::new();
    let stage = tokio::select! {
        stage = shutdown.ordered() => stage,
        never = accept_all(&mut listener, &host, &places, &mut connections) => match never {},
    };
    drop(listener);
    if stage == Stage::Aborted {
        return connections.shutdown().await;
    }
    places.drain();
    let finished = async { while connections.join_next().await.is_some() {} };
    tokio::select! {
        () = finished => {}
        () = shutdown.out_of_time() => connections.shutdown().await,
    }
}

async fn accept_all(
    listener: &mut impl Accept,
    host: &Arc<Host>,
    places: &Arc<Places>,
    connections: &mut JoinSet<()>,
) -> std::convert::Infallible {
    let mut back_off = BACK_OFF_LEAST;
    loop {
        // A connection that panicked has ended, and no other.
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, address)) => {
                back_off = BACK_OFF_LEAST;
                places.wait_for_room().await;
                let place = places.take(host.patience());
                connections.spawn(connection::run(host.clone(), stream, address, place));
            }
            Err(error) => {
                count(&host.config().stats.accept_errors);
                if is_of_one_connection(&error) {
                    continue;
                }
                // Most likely there are no more files to be had: one that is not needed is given
                // back.
                places.evict_one();
                tokio::time::sleep(back_off).await;
                back_off = (back_off * 2).min(BACK_OFF_MOST);
            }
        }
    }
}

/// A client that left before it was accepted; the next may be there already.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::atomic::Ordering;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::net::socket::Stream;

    /// Fails in every way `accept` can before it gives the one connection it has.
    struct Failing(Vec<io::Error>, Option<TcpStream>);

    impl Accept for Failing {
        async fn accept(&mut self) -> io::Result<(Stream, Option<SocketAddr>)> {
            match (self.0.pop(), self.1.take()) {
                (Some(error), stream) => {
                    self.1 = stream;
                    Err(error)
                }
                (None, Some(stream)) => Ok((Stream::Tcp(stream), None)),
                (None, None) => std::future::pending().await,
            }
        }
    }

    #[tokio::test]
    async fn no_error_of_accept_ends_the_server() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let too_many_files = 24;
        let errors = vec![
            io::Error::from_raw_os_error(too_many_files),
            io::ErrorKind::ConnectionAborted.into(),
            io::ErrorKind::OutOfMemory.into(),
            io::Error::other("something new"),
        ];
        let config = NetConfig::default();
        let (handle, shutdown) = Shutdown::new();
        let router = Router::new().route("/", axum::routing::get(async || "ok"));
        let server = tokio::spawn(run(Failing(errors, Some(accepted)), router, config.clone(), shutdown));
        client.write_all(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(config.stats.accept_errors.load(Ordering::Relaxed), 4);
        handle.close();
        server.await.unwrap();
    }
}
