//! Connections that are silent, or say one byte at a time.

use std::time::Duration;

use folio_server::net::{ConnectionCounts, NetConfig};
use tokio::time::Instant;

use crate::support::{Client, HEALTH, SOON, Server, config, eventually, millis};

/// Sends a byte of an unfinished header every now and then until the server has had enough.
async fn trickle(client: &mut Client<tokio::net::TcpStream>) {
    use tokio::io::AsyncWriteExt;
    let deadline = Instant::now() + SOON;
    while client.0.write_all(b"a").await.is_ok() {
        assert!(Instant::now() < deadline, "the server lets a header trickle");
        tokio::time::sleep(millis(20)).await;
    }
}

fn counts(server: &Server) -> ConnectionCounts {
    server.config.stats.counts()
}

#[tokio::test]
async fn a_connection_that_says_nothing_is_closed() {
    let server = Server::start(NetConfig { header_timeout: millis(150), ..config() }).await;
    let mut client = server.connect().await;
    assert_eq!(client.rest().await, "");
    assert_eq!(counts(&server).header_timeouts, 1);
}

#[tokio::test]
async fn a_header_that_trickles_is_closed() {
    let server = Server::start(NetConfig { header_timeout: millis(150), ..config() }).await;
    let mut client = server.connect().await;
    client.send("GET /health HTTP/1.1\r\nlong: ").await;
    trickle(&mut client).await;
    assert_eq!(counts(&server).header_timeouts, 1);
    server.is_healthy().await;
}

#[tokio::test]
async fn a_second_header_has_its_own_time_from_its_first_byte() {
    let server = Server::start(NetConfig { header_timeout: millis(400), ..config() }).await;
    let mut client = server.connect().await;
    client.send(HEALTH).await;
    client.answer().await;
    // Idle for longer than a header may take: nothing has begun, so nothing is late.
    tokio::time::sleep(millis(800)).await;
    client.send(HEALTH).await;
    assert!(client.answer().await.ends_with("ok"));
    client.send("GET /health HTTP/1.1\r\nlong: ").await;
    trickle(&mut client).await;
    assert_eq!((counts(&server).header_timeouts, counts(&server).idle_timeouts), (1, 0));
}

#[tokio::test]
async fn an_idle_connection_is_closed() {
    let server = Server::start(NetConfig { idle_timeout: millis(150), ..config() }).await;
    let mut client = server.connect().await;
    client.send(HEALTH).await;
    client.answer().await;
    assert_eq!(client.rest().await, "");
    assert_eq!(counts(&server).idle_timeouts, 1);
    eventually("its place is free", || server.open() == 0).await;
}

#[tokio::test]
async fn no_clock_runs_while_a_request_is_under_way() {
    let short = millis(100);
    let server = Server::start(NetConfig { header_timeout: short, idle_timeout: short, ..config() }).await;
    let (feed, fed) = tokio::sync::mpsc::channel(1);
    *server.seen.feed.lock().unwrap() = Some(fed);
    let mut client = server.connect().await;
    client.send("GET /fed HTTP/1.1\r\nhost: x\r\n\r\n").await;
    client.until("\r\n\r\n").await;
    // An answer that says nothing for several times both limits.
    tokio::time::sleep(short * 5).await;
    feed.send("late").await.unwrap();
    client.until("late\r\n").await;
    drop(feed);
    client.until("0\r\n\r\n").await;
    assert_eq!(counts(&server).idle_timeouts + counts(&server).header_timeouts, 0);
}

#[tokio::test]
async fn a_body_that_trickles_ends_with_its_route_s_answer_and_the_connection() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("POST /impatient HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\na").await;
    let answer = client.answer().await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(answer.contains("connection: close"), "{answer}");
    assert_eq!(client.rest().await, "");
    drop(client);
    eventually("its place is free", || server.open() == 0).await;
}

#[tokio::test]
async fn a_refused_body_costs_its_sender_not_the_answer() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    let bytes = 8 << 20;
    client.send(format!("POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: {bytes}\r\n\r\n")).await;
    client.send(vec![b'a'; bytes]).await;
    let answer = client.answer().await;
    assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("connection: close"), "{answer}");
}

#[tokio::test]
async fn a_small_refused_body_keeps_its_connection() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nabcde").await;
    assert!(client.answer().await.starts_with("HTTP/1.1 401"));
    client.send(HEALTH).await;
    assert!(client.answer().await.ends_with("ok"));
}

#[tokio::test]
async fn a_handshake_that_does_not_come_is_closed() {
    let tls = Some(crate::tls::identity());
    let server = Server::start(NetConfig { header_timeout: millis(150), tls, ..config() }).await;
    for first in [&b""[..], b"\x16\x03\x01\x02"] {
        let mut client = server.connect().await;
        client.send(first).await;
        assert_eq!(client.rest().await, "");
    }
    assert_eq!(counts(&server).header_timeouts, 2);
}

/// The defaults are those of the limits and timeouts.
#[test]
fn defaults() {
    let config = NetConfig::default();
    assert_eq!((config.connections, config.header_bytes, config.header_fields), (1024, 32 << 10, 64));
    let seconds = Duration::from_secs;
    assert_eq!(
        (config.header_timeout, config.idle_timeout, config.write_stall, config.unread_timeout),
        (seconds(10), seconds(75), seconds(30), seconds(1))
    );
}
