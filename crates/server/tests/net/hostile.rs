//! Bytes that are no requests, and requests that lie: the connection ends, the server does not.

use crate::support::{HEALTH, Server, config, eventually};

/// Sends `bytes`; the answer begins with `expected`, after which the connection ends.
async fn check(bytes: impl AsRef<[u8]>, expected: &str) {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send(&bytes).await;
    let answer = client.rest().await;
    assert!(answer.starts_with(expected), "{:?}: {answer:?}", String::from_utf8_lossy(bytes.as_ref()));
    drop(client);
    eventually("its place is free", || server.open() == 0).await;
    server.is_healthy().await;
}

#[tokio::test]
async fn bytes_that_are_no_request() {
    let bad = "HTTP/1.1 400";
    check("\0\u{1}\u{2}garbage\r\n\r\n", bad).await;
    check([0xff; 4096], bad).await;
    check("GET\r\n\r\n", bad).await;
    check("GET /health HTTP/9.9\r\n\r\n", bad).await;
    check("GET /health HTTP/1.1\r\nbad field: x\r\n\r\n", bad).await;
    check("GET /health HTTP/1.1\r\nhost: a\0b\r\n\r\n", bad).await;
    check("GET /health HTTP/1.1\r\n folded: x\r\n\r\n", bad).await;
    // A TLS client's first bytes.
    check(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", bad).await;
}

#[tokio::test]
async fn lengths_that_contradict_each_other() {
    let bad = "HTTP/1.1 400";
    let post = |fields: &str| format!("POST /echo HTTP/1.1\r\nhost: x\r\n{fields}\r\n\r\n0\r\n\r\n");
    check(post("content-length: 5\r\ncontent-length: 6"), bad).await;
    check(post("content-length: -1"), bad).await;
    check(post("content-length: 99999999999999999999999"), bad).await;
    check(post("transfer-encoding: gzip"), bad).await;
    check(post("transfer-encoding: chunked, gzip"), bad).await;
}

/// Both lengths: the chunks count, and the connection must not be used for what would be another
/// request to others.
#[tokio::test]
async fn two_kinds_of_length_end_the_connection_or_agree_on_chunks() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client
        .send("POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
        .await;
    let answer = client.answer().await;
    assert!(answer.starts_with("HTTP/1.1 400") || answer.ends_with("hi"), "{answer}");
}

#[tokio::test]
async fn chunks_that_are_none() {
    let server = Server::start(config()).await;
    for chunks in ["zz\r\n", "fffffffffffffffff\r\n", "5\r\nabcdefgh\r\n", "-1\r\n"] {
        let mut client = server.connect().await;
        client.send(format!("POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{chunks}")).await;
        let answer = client.rest().await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{chunks:?}: {answer:?}");
    }
    server.is_healthy().await;
}

#[tokio::test]
async fn a_length_too_short_leaves_garbage_that_is_refused() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client
        .send("POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi, and more that is no request\r\n\r\n")
        .await;
    assert!(client.answer().await.ends_with("hi"));
    assert!(client.rest().await.starts_with("HTTP/1.1 400"));
    server.is_healthy().await;
}

#[tokio::test]
async fn a_million_chunks_of_one_byte_come_in_few_pieces() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("POST /pieces HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").await;
    let many = "1\r\nx\r\n".repeat(10_000);
    for _ in 0..100 {
        client.send(&many).await;
    }
    client.send("0\r\n\r\n").await;
    let answer = client.answer().await;
    // 4 KiB a piece, and the rest.
    assert!(answer.ends_with("1000000 bytes in 245 pieces"), "{answer}");
    client.send(HEALTH).await;
    assert!(client.answer().await.ends_with("ok"), "the connection goes on");
}

#[tokio::test]
async fn bodies_arrive_whole_however_they_are_cut() {
    let server = Server::start(config()).await;
    let text: String = (0..60_000).map(|i| char::from(b'a' + (i % 23) as u8)).collect();
    for size in [1, 100, 4095, 4096, 5000, 60_000] {
        let mut request = String::from("POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
        for piece in text.as_bytes().chunks(size) {
            request.push_str(&format!("{:x}\r\n{}\r\n", piece.len(), std::str::from_utf8(piece).unwrap()));
        }
        let mut client = server.connect().await;
        client.send(request + "0\r\ntrailer: x\r\n\r\n").await;
        assert!(client.answer().await.ends_with(&text), "in pieces of {size}");
    }
}

#[tokio::test]
async fn continue_is_said_when_the_body_is_wanted_and_not_otherwise() {
    let server = Server::start(config()).await;
    let expect = |path| format!("POST {path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n");
    let mut wanted = server.connect().await;
    wanted.send(expect("/echo")).await;
    wanted.until("HTTP/1.1 100 Continue\r\n\r\n").await;
    wanted.send("body").await;
    assert!(wanted.answer().await.ends_with("body"));
    let mut refused = server.connect().await;
    refused.send(expect("/unread")).await;
    assert!(refused.answer().await.starts_with("HTTP/1.1 401"));
}

#[tokio::test]
async fn half_a_preface_of_http2_is_no_http2() {
    check("PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", "").await;
    check("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nno frames at all, but something else", "").await;
}
