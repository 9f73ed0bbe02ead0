//! Headers at their limits, and beyond.

use crate::support::{HEALTH, Server, config};

/// A request whose line and header are `bytes` long together.
fn request_of(bytes: usize) -> String {
    let (start, end) = ("GET /health HTTP/1.1\r\nhost: x\r\nlong: ", "\r\n\r\n");
    format!("{start}{}{end}", "a".repeat(bytes - start.len() - end.len()))
}

fn request_with(fields: usize) -> String {
    let mut request = String::from("GET /health HTTP/1.1\r\nhost: x\r\n");
    for field in 1..fields {
        request.push_str(&format!("field-{field}: x\r\n"));
    }
    request + "\r\n"
}

async fn check(request: String, status: &str) {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send(&request).await;
    let answer = client.answer().await;
    assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    if status == "431" {
        assert_eq!(client.rest().await, "", "nothing but the refusal");
    }
    server.is_healthy().await;
}

#[tokio::test]
async fn as_long_as_allowed() {
    check(request_of(32 << 10), "200").await;
}

#[tokio::test]
async fn one_byte_too_long() {
    check(request_of((32 << 10) + 1), "431").await;
}

#[tokio::test]
async fn as_many_fields_as_allowed() {
    check(request_with(64), "200").await;
}

#[tokio::test]
async fn one_field_too_many() {
    check(request_with(65), "431").await;
}

#[tokio::test]
async fn limits_are_the_configuration_s() {
    let server = Server::start(folio_server::net::NetConfig { header_bytes: 200, header_fields: 3, ..config() }).await;
    for (request, status) in
        [(request_of(200), "200"), (request_of(201), "431"), (request_with(3), "200"), (request_with(4), "431")]
    {
        let mut client = server.connect().await;
        client.send(&request).await;
        let answer = client.answer().await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {answer}");
    }
}

#[tokio::test]
async fn a_client_that_sends_megabytes_of_header_gets_its_refusal() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("GET /health HTTP/1.1\r\nhost: x\r\nlong: ").await;
    // All of it goes out before anything is read: the server reads on after its answer, so that it
    // is not lost.
    for _ in 0..64 {
        client.send(vec![b'a'; 1 << 18]).await;
    }
    let answer = client.answer().await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    server.is_healthy().await;
}

#[tokio::test]
async fn requests_sent_together_are_answered_in_order() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    let echo = |text: &str| format!("POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{text}", text.len());
    client.send(echo("first") + HEALTH + &echo("third")).await;
    for body in ["first", "ok", "third"] {
        let answer = client.answer().await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with(body), "{body}: {answer}");
    }
}

#[tokio::test]
async fn absolute_form_finds_its_route() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("GET http://example.org/health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(client.answer().await.ends_with("ok"));
}

#[tokio::test]
async fn the_peer_is_known() {
    let server = Server::start(config()).await;
    let mut client = server.connect().await;
    client.send("GET /peer HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(client.answer().await.ends_with("true false"));
}
