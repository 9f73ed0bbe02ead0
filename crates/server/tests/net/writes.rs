//! Readers that are slow, and readers that are gone.

use folio_server::net::NetConfig;
use folio_testing::Folder;
use tokio::io::AsyncReadExt;
use tokio::time::Instant;

use crate::support::{Server, config, eventually, millis};

const ENDLESS: &str = "GET /endless HTTP/1.1\r\nhost: x\r\n\r\n";

#[tokio::test]
async fn a_reader_that_takes_nothing_is_given_up() {
    let server = Server::start(NetConfig { write_stall: millis(200), ..config() }).await;
    let mut client = server.connect().await;
    client.send(ENDLESS).await;
    eventually("its body is dropped", || server.seen.dropped() == 1).await;
    eventually("its place is free", || server.open() == 0).await;
    assert_eq!(server.config.stats.counts().write_stalls, 1);
    server.is_healthy().await;
}

/// Reads less between two looks of the server than the kernel asks for before it says "writable"
/// again.
#[tokio::test]
async fn a_reader_that_is_slow_but_steady_is_kept() {
    let server = Server::start(NetConfig { write_stall: millis(500), ..config() }).await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut client = crate::support::Client(socket.connect(server.address).await.unwrap());
    client.send(ENDLESS).await;
    let until = Instant::now() + millis(2000);
    let mut bytes = [0; 1024];
    while Instant::now() < until {
        client.0.read_exact(&mut bytes).await.expect("the server goes on");
        tokio::time::sleep(millis(20)).await;
    }
    assert_eq!(server.seen.dropped(), 0);
    assert_eq!(server.config.stats.counts().write_stalls, 0);
}

#[cfg(unix)]
#[tokio::test]
async fn unix_sockets_are_served_and_given_up_alike() {
    use folio_server::net::{Listener, Shutdown, serve};
    use std::sync::Arc;

    let folder = Folder::new("net");
    let path = folder.join("s");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let seen = Arc::<crate::support::Seen>::default();
    let (handle, shutdown) = Shutdown::new();
    let config = NetConfig { write_stall: millis(200), ..config() };
    let task = tokio::spawn(serve(Listener::Unix(listener), crate::support::router(&seen), config, shutdown));
    let mut client = crate::support::Client(tokio::net::UnixStream::connect(&path).await.unwrap());
    client.send("GET /peer HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(client.answer().await.ends_with("false false"));
    client.send(ENDLESS).await;
    eventually("its body is dropped", || seen.dropped() == 1).await;
    handle.close();
    tokio::time::timeout(crate::support::SOON, task).await.unwrap().unwrap().unwrap();
}
