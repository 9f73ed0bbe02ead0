//! Limits on how long things take, each set so short that it is reached.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use folio_engine::TimeLimit;
use folio_server::{Limits, Timeouts};
use folio_testing::wait::until;
use serde_json::{Value, json};

use crate::harness::{Server, Setup, read_answer, start_with};

const COMPLETIONS: &str = "/v1/completions";
const SHORT: Duration = Duration::from_millis(150);

fn server(timeouts: Timeouts) -> Server {
    start_with(Setup { pace: Duration::from_millis(2), timeouts, all_bytes: true, ..Setup::default() })
}

fn connect(server: &Server) -> TcpStream {
    let socket = TcpStream::connect(server.address).expect("it listens");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    socket
}

/// All that comes before the connection ends.
fn rest(mut socket: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = socket.read_to_end(&mut bytes);
    bytes
}

#[test]
fn a_header_that_does_not_come() {
    let server = server(Timeouts { header: SHORT, ..Timeouts::default() });
    let (silent, mut half) = (connect(&server), connect(&server));
    half.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n").expect("it reads");
    assert!(rest(silent).is_empty() && rest(half).is_empty(), "closed without a word");
    assert_eq!(server.connections.counts().header_timeouts, 2);
}

#[test]
fn a_body_that_does_not_come() {
    let server = server(Timeouts { body: SHORT, ..Timeouts::default() });
    for path in ["/v1/chat/completions", COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"] {
        let mut socket = connect(&server);
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n");
        write!(socket, "{head}content-length: 100\r\n\r\n{{\"prompt\":").expect("it reads");
        let (status, head, body) = read_answer(&mut socket);
        assert!(status == 408 && body.contains("did not arrive within"), "{path}: {status} {body}");
        assert!(head.contains("connection: close"), "{head}");
    }
    until("no place is taken", || server.app.num_in_flight() == 0);
}

#[test]
fn a_connection_without_a_request() {
    let server = server(Timeouts { idle: SHORT, ..Timeouts::default() });
    let mut socket = connect(&server);
    socket.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").expect("it reads");
    assert!(rest(socket).starts_with(b"HTTP/1.1 200"), "one answer, and then the end");
    assert_eq!(server.connections.counts().idle_timeouts, 1);
}

#[test]
fn a_request_that_takes_too_long() {
    let server = server(Timeouts { request: TimeLimit::InAll(SHORT), ..Timeouts::default() });
    let (status, answer) = server.post(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 4000}));
    assert_eq!((status, &answer["error"]["code"]), (504, &json!("request_timeout")), "{answer}");
    let events = server.events(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 4000, "stream": true}));
    let last: Value = events.last().and_then(|event| serde_json::from_str(event).ok()).expect("an event");
    assert_eq!(last["error"]["code"], "request_timeout");
    assert!(events.len() > 1, "it had begun");
    let message = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000});
    let (status, answer) = server.post("/v1/messages", &message);
    assert_eq!((status, &answer["error"]["type"]), (504, &json!("timeout_error")), "{answer}");
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 2})).0, 200, "a short one is in time");
    until("nothing goes on", || server.engine.num_live() == 0);
}

/// Without a limit on the whole request, a client that gets tokens is not cut off, however long it
/// takes.
#[test]
fn a_long_answer_of_a_slow_machine() {
    let server = server(Timeouts { request: TimeLimit::WithoutProgress(SHORT), ..Timeouts::default() });
    let begin = std::time::Instant::now();
    let (status, answer) = server.post(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 200}));
    assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(200)), "{answer}");
    assert!(begin.elapsed() > SHORT, "200 steps of 2 ms take longer");
    let events = server.events(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 200, "stream": true}));
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
}

#[test]
fn a_server_that_is_told_to_end() {
    let server = server(Timeouts::default());
    let body = json!({"prompt": "a", "max_tokens": 200, "stream": true}).to_string();
    let mut under_way = server.open("POST", COMPLETIONS, body.as_bytes());
    until("it runs", || server.engine.stats().tokens_sampled > 2);
    server.app.lifecycle().set_draining();
    let (status, answer) = server.post(COMPLETIONS, &json!({"prompt": "a"}));
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("server_draining")));
    for (path, expected) in [("/health", 503), ("/ready", 503), ("/v1/models", 200)] {
        assert_eq!(server.raw("GET", path, b"").0, expected, "{path}");
    }
    server.shutdown.close_within(Duration::from_secs(60));
    let (_, _, events) = read_answer(&mut under_way);
    assert!(events.contains("[DONE]"), "what was under way is finished");
    until("no new connection", || TcpStream::connect(server.address).is_err());
}

#[test]
fn a_server_that_has_waited_long_enough() {
    let server = server(Timeouts::default());
    let body = json!({"prompt": "a", "max_tokens": 4000, "stream": true}).to_string();
    let mut under_way = server.open("POST", COMPLETIONS, body.as_bytes());
    until("it runs", || server.engine.stats().tokens_sampled > 2);
    server.shutdown.close_within(SHORT);
    let mut bytes = Vec::new();
    let _ = under_way.read_to_end(&mut bytes);
    assert!(!bytes.ends_with(b"0\r\n\r\n"), "cut off, and seen to be");
    until("its request has gone with it", || server.engine.num_live() == 0);
}

#[test]
fn a_small_buffer_and_a_short_stall_are_the_configuration_s() {
    let limits = Limits { stream_bytes: 1, ..Limits::default() };
    let server = start_with(Setup { limits, all_bytes: true, ..Setup::default() });
    let events = server.events(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 50, "stream": true}));
    assert_eq!(
        events.last().map(String::as_str),
        Some("[DONE]"),
        "events larger than the buffer go through one by one"
    );
}
