//! Limits on how much is under way: requests, those that wait, connections, and what is written
//! ahead of a reader.

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use folio_server::{Limits, Timeouts};
use folio_testing::wait::until;
use serde_json::json;

use crate::harness::{Server, Setup, read_answer, start_with};

const COMPLETIONS: &str = "/v1/completions";
const ALICE: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const BOB: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

fn slow(limits: Limits, keys: &'static str) -> Server {
    start_with(Setup { pace: Duration::from_millis(2), limits, keys, all_bytes: true, ..Setup::default() })
}

fn key(key: &str) -> String {
    format!("authorization: Bearer {key}\r\n")
}

/// An answer that goes on for as long as it is wanted.
fn begin(server: &Server, fields: &str) -> TcpStream {
    let body = json!({"prompt": "a", "max_tokens": 4000, "stream": true}).to_string();
    let mut socket = server.open_with(fields, "POST", COMPLETIONS, body.as_bytes());
    socket.read_exact(&mut [0; 15]).expect("an answer");
    socket
}

/// The answer to one more request.
fn one_more(server: &Server, fields: &str) -> (u16, String, String) {
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    read_answer(&mut server.open_with(fields, "POST", COMPLETIONS, body.as_bytes()))
}

fn is_told_to_wait((status, head, body): &(u16, String, String), text: &str) {
    assert!(*status == 429 && body.contains(text) && body.contains("rate_limit"), "{status} {body}");
    let after = head.lines().find_map(|line| line.strip_prefix("retry-after: ")).expect("retry-after");
    assert!(after.parse::<u64>().is_ok_and(|seconds| seconds >= 1), "{after}");
}

#[test]
fn requests_under_way() {
    let server = slow(Limits { in_flight: 2, ..Limits::default() }, "");
    let first = begin(&server, "");
    assert_eq!(one_more(&server, "").0, 200, "the second");
    let second = begin(&server, "");
    is_told_to_wait(&one_more(&server, ""), "2 requests are in flight");
    // Before anything of it is read.
    is_told_to_wait(&read_answer(&mut server.open("POST", "/v1/messages", b"nonsense")), "2 requests are in flight");
    assert_eq!(server.raw("GET", "/health", b"").0, 200, "who only looks needs no place");
    drop(first);
    until("there is room", || server.app.num_in_flight() < 2);
    assert_eq!(one_more(&server, "").0, 200);
    drop(second);
}

#[test]
fn requests_under_way_of_one_key() {
    let keys =
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa name=alice\nbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb name=bob max-in-flight=1\n";
    let server = slow(Limits { in_flight_per_key: 2, ..Limits::default() }, keys);
    let _alice = [begin(&server, &key(ALICE)), begin(&server, &key(ALICE))];
    is_told_to_wait(&one_more(&server, &key(ALICE)), "2 requests are in flight");
    assert_eq!(one_more(&server, &key(BOB)).0, 200, "another's place is not taken");
    let _bob = begin(&server, &key(BOB));
    is_told_to_wait(&one_more(&server, &key(BOB)), "1 requests are in flight");
    assert_eq!(one_more(&server, "").0, 401);
}

#[test]
fn requests_that_wait() {
    // Four run, four wait.
    let server = slow(Limits::default(), "");
    let body = json!({"prompt": "a", "max_tokens": 4000}).to_string();
    let mut sockets: Vec<_> = (0..8).map(|_| server.open("POST", COMPLETIONS, body.as_bytes())).collect();
    until("the queue is full", || server.engine.num_live() == 8);
    is_told_to_wait(&one_more(&server, ""), "too many requests are waiting; try again in");
    sockets.pop();
    until("there is room", || server.engine.num_live() == 7);
    let _ninth = server.open("POST", COMPLETIONS, body.as_bytes());
    until("it waits", || server.engine.num_live() == 8);
}

#[test]
fn open_connections() {
    let server = slow(Limits { connections: 2, ..Limits::default() }, "");
    let (busy, other) = (begin(&server, ""), begin(&server, ""));
    let mut third = server.open("GET", "/health", b"");
    assert_eq!(server.connections.counts().open, 2, "the third waits to be accepted");
    drop(other);
    assert_eq!(read_answer(&mut third).0, 200, "there is a place");
    // One that is idle gives way.
    let idle = TcpStream::connect(server.address).expect("it listens");
    until("it is open", || server.connections.counts().open == 2);
    assert_eq!(server.raw("GET", "/health", b"").0, 200);
    assert_eq!(server.connections.counts().evicted, 1);
    drop((busy, idle));
}

/// A stream of some 8 kB a token; the kernel holds a few MB of it.
fn long_stream(server: &Server, max_tokens: usize) -> TcpStream {
    let body = json!({"prompt": "a", "max_tokens": max_tokens, "n": 4, "logprobs": 20, "stream": true}).to_string();
    server.open("POST", COMPLETIONS, body.as_bytes())
}

#[test]
fn what_is_written_ahead_of_a_reader() {
    let server = start_with(Setup {
        pace: Duration::from_millis(1),
        all_bytes: true,
        limits: Limits { stream_bytes: 4 << 10, ..Limits::default() },
        timeouts: Timeouts { write_stall: Duration::from_millis(300), ..Timeouts::default() },
        ..Setup::default()
    });
    let mut stalled = long_stream(&server, 4000);
    until("it was given up", || server.engine.stats().samples_ended == 4);
    let sampled = server.engine.stats().tokens_sampled;
    assert!(sampled < 16_000, "{sampled} tokens: the engine went on for nobody");
    let mut rest = Vec::new();
    let _ = stalled.read_to_end(&mut rest);
    assert!(!rest.ends_with(b"[DONE]\n\n\r\n0\r\n\r\n"), "nobody takes it for whole");
    // A client that reads gets all of it, through the same small buffer.
    let (status, _, body) = read_answer(&mut long_stream(&server, 300));
    assert!(status == 200 && body.contains("[DONE]"), "{status}");
    until("nothing is left", || server.engine.num_live() == 0 && server.app.num_in_flight() == 0);
}
