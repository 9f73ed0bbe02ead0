//! The drain: no new request is accepted, and no answer cut off.

use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::support::{Client, HEALTH, Server, config, eventually, millis};

async fn streaming(server: &Server) -> (Client<TcpStream>, mpsc::Sender<&'static str>) {
    let (feed, fed) = mpsc::channel(1);
    *server.seen.feed.lock().unwrap() = Some(fed);
    let mut client = server.connect().await;
    client.send("GET /fed HTTP/1.1\r\nhost: x\r\n\r\n").await;
    feed.send("one").await.unwrap();
    client.until("one\r\n").await;
    (client, feed)
}

#[tokio::test]
async fn idle_connections_close_at_once_and_streams_finish() {
    let server = Server::start(config()).await;
    let mut idle = server.connect().await;
    idle.send(HEALTH).await;
    idle.answer().await;
    let mut fresh = server.connect().await;
    let (mut client, feed) = streaming(&server).await;
    server.shutdown.close();
    assert_eq!(idle.rest().await, "");
    assert_eq!(fresh.rest().await, "");
    eventually("nobody new is let in", || std::net::TcpStream::connect(server.address).is_err()).await;
    feed.send("two").await.unwrap();
    client.until("two\r\n").await;
    drop(feed);
    assert!(client.rest().await.ends_with("0\r\n\r\n"));
    server.ends().await;
}

#[tokio::test]
async fn an_answer_that_begins_after_the_order_says_that_it_is_the_last() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("POST /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n").await;
    client.until("HTTP/1.1 100 Continue\r\n\r\n").await;
    server.shutdown.close();
    eventually("the order is heard", || std::net::TcpStream::connect(server.address).is_err()).await;
    client.send("body").await;
    let answer = client.rest().await;
    assert!(answer.contains("connection: close") && answer.ends_with("body"), "{answer}");
    server.ends().await;
}

#[tokio::test]
async fn a_deadline_ends_what_has_not_finished() {
    let server = Server::start(config()).await;
    let (mut client, _feed) = streaming(&server).await;
    server.shutdown.close_within(millis(100));
    assert!(!client.rest().await.ends_with("0\r\n\r\n"));
    server.ends().await;
}

#[tokio::test]
async fn abort_ends_everything() {
    let server = Server::start(config()).await;
    let (mut client, _feed) = streaming(&server).await;
    let seen = server.seen.clone();
    server.shutdown.close();
    server.shutdown.abort();
    client.rest().await;
    server.ends().await;
    assert_eq!(seen.dropped(), 1);
}

#[tokio::test]
async fn http2_streams_finish_too() {
    let server = Server::start(config()).await;
    let (feed, fed) = mpsc::channel(1);
    *server.seen.feed.lock().unwrap() = Some(fed);
    let (mut client, connection) = crate::http2::connect(&server).await;
    let answer = crate::http2::get(&mut client, "/fed").await.unwrap();
    feed.send("one").await.unwrap();
    server.shutdown.close();
    eventually("the order is heard", || std::net::TcpStream::connect(server.address).is_err()).await;
    feed.send("two").await.unwrap();
    drop(feed);
    assert_eq!(crate::http2::read(answer.into_body()).await.unwrap(), "onetwo");
    drop(client);
    server.ends().await;
    connection.await.unwrap();
}

#[tokio::test]
async fn an_idle_http2_connection_does_not_hold_the_server() {
    let server = Server::start(config()).await;
    let (mut client, _connection) = crate::http2::connect(&server).await;
    crate::http2::get(&mut client, "/health").await.unwrap();
    server.shutdown.close();
    server.ends().await;
}

/// A client that never says a word and never closes.
#[tokio::test]
async fn half_a_request_does_not_hold_the_server() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("GET /health HTTP/1.1\r\n").await;
    let mut preface = server.connect().await;
    preface.send("PRI * HTTP/2.0\r\n").await;
    eventually("both are in", || server.open() == 2).await;
    server.shutdown.close();
    server.ends().await;
}
