//! The end of a server: running answers finish, or the client learns that they do not.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;

use folio_testing::http::{Connection, request as request_bytes};

use crate::http::request;
use crate::server::Server;

/// A running stream: its first event has arrived.
fn stream(port: u16, max_tokens: usize) -> BufReader<TcpStream> {
    let body = serde_json::json!({
        "prompt": "fn main() {", "max_tokens": max_tokens, "stream": true, "ignore_eos": true, "temperature": 0,
    });
    let mut connection = Connection::open(port).expect("it listens");
    connection.send(&request_bytes("POST", "/v1/completions", "", body.to_string().as_bytes())).expect("it reads");
    let mut reader = BufReader::new(connection.stream);
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(reader.read_line(&mut line).expect("it answers") > 0, "the stream begins");
    }
    reader
}

fn rest(mut stream: BufReader<TcpStream>) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("UTF-8, to its end");
    text
}

#[test]
fn told_to_end_it_finishes_what_is_under_way() {
    let mut server = Server::start(&["--max-num-seqs", "4", "--drain-timeout", "600"]);
    let under_way = stream(server.port, 100);
    server.signal("-TERM");
    // Visible in the answer of a probe until the last stream has ended.
    let health = loop {
        let health = request(server.port, "GET", "/health", "");
        if health.status != 200 {
            break health;
        }
    };
    assert!(health.status == 503 && health.body.contains("draining"), "{}", health.body);
    let refused = request(server.port, "POST", "/v1/completions", "{\"prompt\": \"x\"}");
    assert_eq!(refused.status, 503, "{}", refused.body);
    let text = rest(under_way);
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("data: [DONE]"), "{text}");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn out_of_time_a_stream_ends_with_an_error() {
    let mut server = Server::start(&["--max-num-seqs", "4", "--drain-timeout", "0.05"]);
    let under_way = stream(server.port, 4000);
    server.signal("-TERM");
    let text = rest(under_way);
    assert!(text.contains("\"error\"") && !text.contains("\"finish_reason\":\"length\""), "{text}");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn told_twice_it_ends_at_once() {
    let mut server = Server::start(&["--max-num-seqs", "4", "--drain-timeout", "600"]);
    let _under_way = stream(server.port, 4000);
    server.signal("-TERM");
    while request(server.port, "GET", "/health", "").status == 200 {}
    server.signal("-INT");
    assert_eq!(server.wait().code(), Some(130));
}
