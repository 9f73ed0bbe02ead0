//! The accept loop.

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

/// Serves `router` until `shutdown` says otherwise: after `close`, until every connection has finished what it was
/// answering; after `abort`, at once. Nothing that a client or the network does ends it.
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
                // Most likely there are no more files to be had: one that is not needed is given back.
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
