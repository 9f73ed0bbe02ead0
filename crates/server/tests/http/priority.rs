//! The priorities in a key's line hold for its requests.

use std::{net::TcpStream, time::Duration};

use folio_testing::wait::until;
use serde_json::json;

use crate::harness::{Server, Setup, read_answer, start_with};

const KEY: &str = "a-key-of-24-letters-long";

fn ask(server: &Server, priority: i32, max_tokens: usize) -> TcpStream {
    let body = json!({"prompt": "a", "priority": priority, "max_tokens": max_tokens}).to_string();
    let field = format!("authorization: Bearer {KEY}\r\n");
    server.open_with(&field, "POST", "/v1/completions", body.as_bytes())
}

/// Whether a request that asks to run before another, which came sooner, does so.
fn overtakes(keys: &'static str) -> bool {
    let server = start_with(Setup { keys, max_seqs: 2, pace: Duration::from_millis(1), ..Setup::default() });
    let scheduler = || server.engine.stats().scheduler;
    let [_stays, leaves] = [ask(&server, 0, 4000), ask(&server, 0, 4000)];
    until("both seats are taken", || scheduler().running == 2);
    let mut first = ask(&server, 0, 2);
    until("one waits", || scheduler().waiting == 1);
    let _second = ask(&server, -1_000_000, 1500);
    until("two wait", || scheduler().waiting == 2);
    drop(leaves);
    let (status, _, answer) = read_answer(&mut first);
    assert_eq!(status, 200, "{answer}");
    // The one that left its seat, and the first; the second too, if it had that seat before.
    server.engine.stats().samples_ended > 2
}

#[test]
fn a_priority_beyond_the_key_s_range_counts_as_the_nearest_bound() {
    assert!(overtakes("a-key-of-24-letters-long"), "without a range");
    assert!(overtakes("a-key-of-24-letters-long priority=-1..5"));
    assert!(!overtakes("a-key-of-24-letters-long priority=0..5"));
    assert!(!overtakes("a-key-of-24-letters-long priority=7"));
}
