//! Requests that are answered before their bodies have come: the connection goes on, or its end is
//! announced.

use folio_server::net::NetConfig;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::support::{Client, HEALTH, SOON, Server, config, eventually, millis};

/// Answers for which no body is read: by a route, for want of one, and for want of a method.
const REFUSALS: [(&str, &str); 3] = [("/unread", "401"), ("/nowhere", "404"), ("/health", "405")];

const LENGTH: &str = "content-length: 5\r\n";
const CHUNKED: &str = "transfer-encoding: chunked\r\n";

async fn post(client: &mut Client<TcpStream>, path: &str, fields: &str) {
    client.send(format!("POST {path} HTTP/1.1\r\nhost: x\r\n{fields}\r\n")).await;
}

/// The same; returns when the server has read the head.
async fn post_and_wait(server: &Server, client: &mut Client<TcpStream>, path: &str, fields: &str) {
    let before = server.seen.heads();
    post(client, path, fields).await;
    eventually("its head is read", || server.seen.heads() == before + 1).await;
}

#[tokio::test]
async fn a_body_that_comes_later_than_its_head_keeps_its_connection() {
    let server = Server::start(config()).await;
    for (path, status) in REFUSALS {
        for (fields, pieces) in [(LENGTH, ["abc", "de"]), (CHUNKED, ["5\r\nabc", "de\r\n0\r\n\r\n"])] {
            let mut client = server.connect().await;
            for _ in 0..2 {
                post_and_wait(&server, &mut client, path, fields).await;
                client.send(pieces[0]).await;
                // They are read one by one: nothing says when the first has been.
                tokio::time::sleep(millis(50)).await;
                client.send(pieces[1]).await;
                let answer = client.answer().await;
                assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{path}: {answer}");
                assert!(!answer.contains("connection: close"), "{path}: {answer}");
            }
        }
    }
}

#[tokio::test]
async fn a_head_that_is_refused_ends_the_connection_and_the_answer_says_so() {
    let server = Server::start(NetConfig { header_fields: 3, ..config() }).await;
    let mut client = server.connect().await;
    post(&mut client, "/echo", &format!("{LENGTH}c: c\r\nd: d\r\n")).await;
    let answer = client.answer().await;
    assert!(answer.starts_with("HTTP/1.1 431") && answer.contains("connection: close"), "{answer}");
}

#[tokio::test]
async fn what_follows_a_refused_body_is_not_lost() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    post_and_wait(&server, &mut client, "/unread", LENGTH).await;
    client.send(format!("abcde{HEALTH}")).await;
    assert!(client.answer().await.starts_with("HTTP/1.1 401"));
    assert!(client.answer().await.ends_with("ok"));
}

#[tokio::test]
async fn a_body_that_does_not_come_ends_the_connection_and_the_answer_says_so() {
    let server = Server::start(NetConfig { unread_timeout: millis(150), ..config() }).await;
    let begun = Instant::now();
    let mut clients = Vec::new();
    for (fields, part) in [(LENGTH, ""), (LENGTH, "abcd"), (CHUNKED, ""), (CHUNKED, "5\r\nabcde\r\n")] {
        let mut client = server.connect().await;
        post(&mut client, "/unread", fields).await;
        client.send(part).await;
        clients.push(client);
    }
    for client in &mut clients {
        let answer = client.answer().await;
        assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("connection: close"), "{answer}");
        assert_eq!(client.rest().await, "");
    }
    assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
    eventually("no place is taken", || server.open() == 0).await;
}

#[tokio::test]
async fn a_body_that_is_not_worth_reading_is_not_waited_for() {
    let server = Server::start(config()).await;
    // Nothing of it comes: the answer does not wait for it.
    let mut client = server.connect().await;
    post(&mut client, "/unread", "content-length: 65537\r\n").await;
    let answer = client.answer().await;
    assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("connection: close"), "{answer}");
    for (bytes, closes) in [(64 << 10, false), ((64 << 10) + 1, true)] {
        let mut client = server.connect().await;
        post(&mut client, "/unread", CHUNKED).await;
        client.send(format!("{bytes:x}\r\n{}\r\n0\r\n\r\n", "a".repeat(bytes))).await;
        let answer = client.answer().await;
        assert_eq!(answer.contains("connection: close"), closes, "{bytes}: {answer}");
        if !closes {
            client.send(HEALTH).await;
            assert!(client.answer().await.ends_with("ok"));
        }
    }
}

/// It has not sent its body, and it may or may not do so now: the next bytes could be either.
#[tokio::test]
async fn who_asks_before_sending_is_not_asked_to_send_for_nothing() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    post(&mut client, "/unread", &format!("expect: 100-continue\r\n{LENGTH}")).await;
    let answer = client.answer().await;
    assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("connection: close"), "{answer}");
}

#[tokio::test]
async fn a_body_that_breaks_off_ends_the_connection_and_the_answer_says_so() {
    let server = Server::start(config()).await;
    for path in ["/unread", "/echo"] {
        let mut client = server.connect().await;
        post_and_wait(&server, &mut client, path, CHUNKED).await;
        client.send("nonsense\r\n").await;
        let answer = client.answer().await;
        assert!(answer.starts_with("HTTP/1.1 4") && answer.contains("connection: close"), "{path}: {answer}");
        assert_eq!(client.rest().await, "");
    }
}

#[tokio::test]
async fn a_refused_body_that_does_not_come_gives_way() {
    let server = Server::start(NetConfig { connections: 1, ..config() }).await;
    let mut client = server.connect().await;
    post_and_wait(&server, &mut client, "/unread", LENGTH).await;
    assert_eq!(server.open(), 1);
    server.is_healthy().await;
    assert_eq!(server.config.stats.counts().evicted, 1);
    assert_eq!(client.rest().await, "");
}
