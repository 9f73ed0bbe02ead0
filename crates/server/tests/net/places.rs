//! The limit on connections, and the choice of the one to evict.

use folio_server::net::NetConfig;
use tokio::io::AsyncReadExt;

use crate::support::{HEALTH, Server, config, eventually};

#[tokio::test]
async fn silent_connections_do_not_lock_anybody_out() {
    let server = Server::start(NetConfig { connections: 8, ..config() }).await;
    // Far more than there are places; none of them ever finishes a header.
    let mut silent = Vec::new();
    for _ in 0..64 {
        let mut client = server.connect().await;
        client.send("GET /health HTTP/1.1\r\n").await;
        silent.push(client);
        assert!(server.open() <= 8);
    }
    server.is_healthy().await;
    eventually("places are bounded", || server.config.stats.counts().evicted >= 64 - 8).await;
    assert!(server.open() <= 8);
}

#[tokio::test]
async fn the_one_that_has_been_idle_for_longest_gives_way() {
    let server = Server::start(NetConfig { connections: 3, ..config() }).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = server.connect().await;
        client.send(HEALTH).await;
        client.answer().await;
        clients.push(client);
    }
    // The first is used once more, so the second has now been idle for longest.
    clients[0].send(HEALTH).await;
    clients[0].answer().await;
    server.is_healthy().await;
    assert_eq!(clients[1].rest().await, "");
    for used in [0, 2] {
        clients[used].send(HEALTH).await;
        assert!(clients[used].answer().await.ends_with("ok"));
    }
}

#[tokio::test]
async fn busy_connections_stay_and_the_next_waits() {
    let server = Server::start(NetConfig { connections: 2, ..config() }).await;
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut client = server.connect().await;
        client.send("GET /hang HTTP/1.1\r\nhost: x\r\n\r\n").await;
        busy.push(client);
    }
    eventually("both are under way", || server.seen.begun() == 2).await;
    let mut waiting = server.connect().await;
    waiting.send(HEALTH).await;
    let answer = tokio::time::timeout(crate::support::millis(200), waiting.0.read_u8()).await;
    assert!(answer.is_err(), "it was served although every place was busy");
    assert_eq!(server.seen.dropped(), 0);
    busy.pop();
    assert!(waiting.answer().await.ends_with("ok"));
    assert_eq!(server.config.stats.counts().evicted, 0);
}

#[tokio::test]
async fn bodies_that_trickle_do_not_lock_anybody_out() {
    let server = Server::start(NetConfig { connections: 4, ..config() }).await;
    let mut answered = server.connect().await;
    answered.send("GET /hang HTTP/1.1\r\nhost: x\r\n\r\n").await;
    eventually("it is under way", || server.seen.begun() == 1).await;
    let mut slow = Vec::new();
    for _ in 0..8 {
        let mut client = server.connect().await;
        client.send("POST /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n").await;
        client.until("HTTP/1.1 100 Continue\r\n\r\n").await;
        client.send("a").await;
        slow.push(client);
    }
    server.is_healthy().await;
    // The oldest have gone; the newest can still finish, and what was being answered has not been
    // touched.
    assert_eq!(slow[0].rest().await, "");
    slow[7].send("a".repeat(99)).await;
    assert!(slow[7].answer().await.starts_with("HTTP/1.1 200"));
    assert_eq!(server.seen.dropped(), 0);
}

#[tokio::test]
async fn readers_that_do_not_read_do_not_lock_anybody_out() {
    let server = Server::start(NetConfig { connections: 2, ..config() }).await;
    let mut stalled = Vec::new();
    for _ in 0..2 {
        let mut client = server.connect().await;
        client.send("GET /endless HTTP/1.1\r\nhost: x\r\n\r\n").await;
        client.until("\r\n\r\n").await;
        stalled.push(client);
    }
    server.is_healthy().await;
    eventually("one has gone", || server.seen.dropped() == 1).await;
}

#[tokio::test]
async fn whoever_waits_gets_the_place_of_a_connection_that_becomes_idle() {
    let server = Server::start(NetConfig { connections: 1, ..config() }).await;
    let (feed, fed) = tokio::sync::mpsc::channel(1);
    *server.seen.feed.lock().unwrap() = Some(fed);
    let mut busy = server.connect().await;
    busy.send("GET /fed HTTP/1.1\r\nhost: x\r\n\r\n").await;
    busy.until("\r\n\r\n").await;
    let mut waiting = server.connect().await;
    waiting.send(HEALTH).await;
    feed.send("last").await.unwrap();
    drop(feed);
    // All of the answer arrives before its connection gives way.
    assert!(busy.rest().await.ends_with("last\r\n0\r\n\r\n"));
    assert!(waiting.answer().await.ends_with("ok"));
}

#[tokio::test]
async fn a_panic_ends_one_connection() {
    let server = Server::start(config()).await;
    let mut neighbour = server.connect().await;
    neighbour.send(HEALTH).await;
    neighbour.answer().await;
    let mut client = server.connect().await;
    client.send("GET /panic HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(client.rest().await, "");
    neighbour.send(HEALTH).await;
    assert!(neighbour.answer().await.ends_with("ok"));
    eventually("its place is free", || server.open() == 1).await;
}
