//! Bytes behind a request that is being answered: they neither hide that its client has left nor
//! cost it its answer.

use folio_server::net::{Listener, NetConfig, Shutdown, serve};
use folio_testing::Folder;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use crate::support::{Client, HEALTH, Server, config, eventually, millis, router};

const HANG: &str = "POST /hang HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody";
const HELD: &str = "POST /held HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody";

/// Bytes that come with the request, and bytes that come while its handler runs and the connection
/// is not read.
const BEHIND: [(&str, &str); 5] = [("\r\n", ""), (HEALTH, ""), ("", "\r\n"), ("\r\n", HEALTH), (HANG, HANG)];

/// Longer than it takes the server to look at its clients more than once.
async fn a_while() {
    tokio::time::sleep(millis(700)).await;
}

async fn hang<S: AsyncRead + AsyncWrite + Unpin>(server: &Server, client: &mut Client<S>, with: &str, later: &str) {
    let before = server.seen.begun();
    client.send(format!("{HANG}{with}")).await;
    eventually("it is under way", || server.seen.begun() == before + 1).await;
    client.send(later).await;
}

#[tokio::test]
async fn a_client_that_closes_is_gone() {
    let server = Server::start(config()).await;
    for (round, (with, later)) in (1..).zip(BEHIND) {
        let mut client = server.connect().await;
        hang(&server, &mut client, with, later).await;
        drop(client);
        eventually("its handler is dropped", || server.seen.dropped() == round).await;
        eventually("its place is free", || server.open() == 0).await;
        assert_eq!(server.seen.begun(), round, "nothing is begun for who has left");
    }
}

#[tokio::test]
async fn a_client_that_closes_only_its_sending_side_is_gone() {
    let server = Server::start(config()).await;
    for (round, (with, later)) in (1..).zip(BEHIND) {
        let mut client = server.connect().await;
        hang(&server, &mut client, with, later).await;
        client.0.shutdown().await.unwrap();
        eventually("its handler is dropped", || server.seen.dropped() == round).await;
        assert_eq!(client.rest().await, "");
    }
}

#[tokio::test]
async fn a_client_that_closes_under_tls_is_gone() {
    let server = Server::start(NetConfig { tls: Some(crate::tls::identity()), ..config() }).await;
    for (round, (with, later)) in (1..).zip(BEHIND) {
        let mut client = crate::tls::connect(&server, &[]).await;
        hang(&server, &mut client, with, later).await;
        // Without a word of TLS: the socket alone says it.
        drop(client);
        eventually("its handler is dropped", || server.seen.dropped() == round).await;
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_client_that_closes_a_unix_socket_is_gone() {
    let folder = Folder::new("net-bytes-behind");
    let path = folder.join("s");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    let seen = std::sync::Arc::default();
    let (_handle, shutdown) = Shutdown::new();
    tokio::spawn(serve(Listener::Unix(listener), router(&seen), config(), shutdown));
    let mut client = Client(stream);
    client.send(format!("{HANG}\r\n")).await;
    eventually("it is under way", || seen.begun() == 1).await;
    drop(client);
    eventually("its handler is dropped", || seen.dropped() == 1).await;
}

/// The body is still on its way as far as hyper can tell: its route has not asked for it.
#[tokio::test]
async fn a_client_that_closes_behind_a_body_nobody_reads_is_gone() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("POST /ignore-body HTTP/1.1\r\nhost: x\r\ncontent-length: 40000\r\n\r\n").await;
    client.send(vec![b'a'; 40_000]).await;
    eventually("it is under way", || server.seen.begun() == 1).await;
    drop(client);
    eventually("its handler is dropped", || server.seen.dropped() == 1).await;
}

#[tokio::test]
async fn a_client_that_stays_has_its_answer() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send(format!("{HELD}\r\n")).await;
    eventually("it is under way", || server.seen.begun() == 1).await;
    client.send("\r\n").await;
    a_while().await;
    assert_eq!(server.seen.dropped(), 0);
    server.seen.release.notify_one();
    assert!(client.answer().await.ends_with("\r\n\r\nbody"));
    client.send(HEALTH).await;
    assert!(client.answer().await.ends_with("ok"));
}

#[tokio::test]
async fn a_client_that_asks_ahead_and_stays_has_all_answers() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send(format!("{HELD}{HEALTH}")).await;
    eventually("the first is under way", || server.seen.begun() == 1).await;
    client.send(HELD).await;
    a_while().await;
    assert_eq!((server.seen.begun(), server.seen.dropped()), (1, 0));
    server.seen.release.notify_one();
    assert!(client.answer().await.ends_with("\r\n\r\nbody"));
    assert!(client.answer().await.ends_with("\r\n\r\nok"));
    eventually("the third is under way", || server.seen.begun() == 2).await;
    a_while().await;
    server.seen.release.notify_one();
    assert!(client.answer().await.ends_with("\r\n\r\nbody"));
}
