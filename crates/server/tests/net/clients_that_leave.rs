//! A client that closes its connection ends what was being computed for it.

use std::sync::atomic::Ordering;

use tokio::sync::mpsc;

use crate::support::{Server, config, eventually};

const HANG: &str = "GET /hang HTTP/1.1\r\nhost: x\r\n\r\n";

#[tokio::test]
async fn before_its_answer() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send(HANG).await;
    eventually("it is under way", || server.seen.begun() == 1).await;
    drop(client);
    eventually("its handler is dropped", || server.seen.dropped() == 1).await;
    eventually("its place is free", || server.open() == 0).await;
}

#[tokio::test]
async fn before_its_answer_and_after_a_body() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("POST /hang HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody").await;
    eventually("it is under way", || server.seen.begun() == 1).await;
    drop(client);
    eventually("its handler is dropped", || server.seen.dropped() == 1).await;
}

#[tokio::test]
async fn before_its_answer_under_tls() {
    let server = Server::start(folio_server::net::NetConfig { tls: Some(crate::tls::identity()), ..config() }).await;
    let mut client = crate::tls::connect(&server, &[]).await;
    client.send(HANG).await;
    eventually("it is under way", || server.seen.begun() == 1).await;
    drop(client);
    eventually("its handler is dropped", || server.seen.dropped() == 1).await;
}

#[tokio::test]
async fn between_two_pieces_of_its_answer() {
    let server = Server::start(config()).await;
    let (feed, fed) = mpsc::channel(1);
    *server.seen.feed.lock().unwrap() = Some(fed);
    let mut client = server.connect().await;
    client.send("GET /fed HTTP/1.1\r\nhost: x\r\n\r\n").await;
    feed.send("one").await.unwrap();
    client.until("one\r\n").await;
    drop(client);
    // Nothing more is written: the end of its input alone says that it has gone.
    eventually("its body is dropped", || server.seen.dropped() == 1).await;
}

#[tokio::test]
async fn in_the_middle_of_its_body() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nbody").await;
    drop(client);
    eventually("its place is free", || server.config.stats.counts().accepted == 1 && server.open() == 0).await;
}

#[tokio::test]
async fn over_http2_by_reset_and_by_leaving() {
    let server = Server::start(config()).await;
    let (mut client, connection) = crate::http2::connect(&server).await;
    let reset = crate::http2::get(&mut client, "/hang");
    let _left = crate::http2::get(&mut client, "/hang");
    eventually("both are under way", || server.seen.begun() == 2).await;
    drop(reset);
    eventually("the first handler is dropped", || server.seen.dropped() == 1).await;
    connection.abort();
    eventually("the second handler is dropped", || server.seen.dropped() == 2).await;
    eventually("its place is free", || server.open() == 0).await;
}

#[tokio::test]
async fn many_at_once_leave_nothing_behind() {
    let server = Server::start(config()).await;
    for round in 1..=50 {
        let mut client = server.connect().await;
        client.send(HANG).await;
        if round % 2 == 0 {
            eventually("it is under way", || server.seen.begun.load(Ordering::SeqCst) >= 1).await;
        }
    }
    eventually("all places are free", || server.open() == 0).await;
    assert_eq!(server.seen.begun(), server.seen.dropped());
}
