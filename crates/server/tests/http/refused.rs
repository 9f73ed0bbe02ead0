//! Every refusal that a request may meet before its body is read: the connection is fit for the
//! next request.

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use folio_server::Limits;
use folio_testing::http::{Connection, Pace, Reply};
use serde_json::json;

use crate::harness::{Server, Setup, start_with};

const KEYS: &str =
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa name=alice\nbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb name=bob max-in-flight=1\n";
const ALICE: &str = "authorization: Bearer aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n";
const BOB: &str = "authorization: Bearer bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\r\n";
const JSON: &str = "content-type: application/json\r\n";
const COMPLETIONS: &str = "/v1/completions";

/// The same refusal twice on one connection, each body later than its head; then something that is
/// answered.
fn refused(server: &Server, path: &str, fields: &str, expected: u16) {
    let socket = TcpStream::connect(server.address).expect("it listens");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    let mut connection = Connection::over(socket, Pace::FULL);
    let body = "{\"prompt\": \"a, and more than is allowed\"}";
    for _ in 0..2 {
        let (begun, length) = (Instant::now(), body.len());
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\n{fields}content-length: {length}\r\n\r\n");
        connection.send(head.as_bytes()).expect("it reads");
        std::thread::sleep(Duration::from_millis(50));
        connection.send(body.as_bytes()).expect("it reads");
        let Reply { status, head, .. } = connection.reply().expect("an answer");
        assert_eq!(status, expected, "{path}: {head}");
        if head.contains("connection: close") {
            // Only a very busy machine delays the body past the wait for it.
            assert!(begun.elapsed() > Duration::from_millis(900), "{path}: {head}");
            return;
        }
    }
    connection.send(format!("GET /v1/models HTTP/1.1\r\nhost: x\r\n{ALICE}\r\n").as_bytes()).expect("it reads");
    assert_eq!(connection.reply().expect("an answer").status, 200, "after {expected}");
}

#[test]
fn a_refused_request_leaves_its_connection_usable() {
    let limits = Limits { body_bytes: 32, ..Limits::default() };
    let server =
        start_with(Setup { pace: Duration::from_millis(2), limits, keys: KEYS, all_bytes: true, ..Setup::default() });
    refused(&server, COMPLETIONS, JSON, 401);
    refused(&server, COMPLETIONS, &format!("{ALICE}{JSON}origin: http://elsewhere.example\r\n"), 403);
    refused(&server, "/v1/nothing", &format!("{ALICE}{JSON}"), 404);
    refused(&server, "/v1/models", &format!("{ALICE}{JSON}"), 405);
    refused(&server, COMPLETIONS, &format!("{ALICE}{JSON}"), 413);
}

#[test]
fn so_does_one_for_which_there_is_no_room() {
    let server = start_with(Setup { pace: Duration::from_millis(2), keys: KEYS, all_bytes: true, ..Setup::default() });
    let body = json!({"prompt": "a", "max_tokens": 4000, "stream": true}).to_string();
    let mut busy = server.open_with(BOB, "POST", COMPLETIONS, body.as_bytes());
    busy.read_exact(&mut [0; 15]).expect("an answer");
    refused(&server, COMPLETIONS, &format!("{BOB}{JSON}"), 429);
    refused(&server, COMPLETIONS, &format!("{ALICE}content-type: text/plain\r\n"), 415);
    server.app.lifecycle().set_draining();
    refused(&server, COMPLETIONS, &format!("{ALICE}{JSON}"), 503);
}
