//! Requests that are refused, and a server that goes on.

use std::time::Duration;

use folio_testing::wait::until;
use serde_json::{Value, json};

use crate::harness::{Server, start};

fn still_answers(server: &Server) {
    let (status, answer) = server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}));
    assert_eq!((status, &answer["choices"][0]["text"]), (200, &json!("b")));
}

#[test]
fn bad_fields_are_refused_by_name_on_both_routes() {
    let server = start(Duration::ZERO);
    let bad = [
        ("n", json!(0), "n: "),
        ("n", json!(17), "n: "),
        ("n", json!(u64::MAX), "n: "),
        ("max_tokens", json!(0), "max_tokens"),
        ("min_tokens", json!(5000), "min_tokens"),
        ("temperature", json!(-1), "temperature"),
        ("temperature", json!(1e308), "temperature"),
        ("top_p", json!(0), "top_p"),
        ("top_k", json!(-2), "top_k"),
        ("min_p", json!(1.1), "min_p"),
        ("repetition_penalty", json!(0), "repetition_penalty"),
        ("frequency_penalty", json!(3), "frequency_penalty"),
        ("logit_bias", json!({"27": 1}), "logit_bias"),
        ("logit_bias", json!({"a": 1}), "logit_bias"),
        ("logit_bias", json!({"1": 101}), "logit_bias"),
        ("allowed_token_ids", json!([]), "allowed_token_ids"),
        ("allowed_token_ids", json!([27]), "allowed_token_ids"),
        ("stop", json!(""), "stop"),
        ("stop", json!(["a", "b", "c", "d", "e"]), "stop"),
        ("stop_token_ids", json!([27]), "stop_token_ids"),
        ("stop_token_ids", json!(vec![1; 65]), "stop_token_ids"),
        ("user", json!("u".repeat(513)), "user"),
        ("priority", json!(1u64 << 31), "priority"),
        ("priority", json!(0.5), "priority"),
        ("cache_salt", json!(""), "cache_salt"),
        ("cache_salt", json!("s".repeat(65)), "cache_salt"),
        ("cache_salt", json!("\u{e9}"), "cache_salt"),
        ("stream_options", json!({"include_usage": true}), "stream_options"),
        ("best_of", json!(2), "best_of"),
    ];
    for (field, value, named) in bad {
        for (path, base) in [
            ("/v1/completions", json!({"prompt": "a"})),
            ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}]})),
        ] {
            let mut body = base;
            body[field] = value.clone();
            let (status, answer) = server.post(path, &body);
            let message = answer["error"]["message"].as_str().unwrap_or_default();
            assert!(status == 400 && message.contains(named), "{path} {field} {value}: {status} {message}");
        }
    }
    still_answers(&server);
}

#[test]
fn prompts_that_are_none_are_refused() {
    let server = start(Duration::ZERO);
    let check = |path: &str, body: Value, named: &str| {
        let (status, answer) = server.post(path, &body);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(named), "{body}: {status} {message}");
    };
    for prompt in
        [json!(""), json!([]), json!([27]), json!([-1]), json!([[]]), json!([[27]]), json!(null), json!(vec![1; 4096])]
    {
        check("/v1/completions", json!({"prompt": prompt}), "prompt");
    }
    check("/v1/completions", json!({"prompt": "a", "logprobs": 21}), "logprobs");
    let content = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    check("/v1/chat/completions", json!({"messages": []}), "messages");
    check("/v1/chat/completions", json!({"messages": ["a"]}), "messages");
    check("/v1/chat/completions", json!({"messages": vec![0; 2049]}), "messages");
    check("/v1/chat/completions", content(json!("")), "messages");
    check("/v1/chat/completions", content(json!([{"type": "text"}])), "messages");
    let tool = json!({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]});
    check("/v1/chat/completions", tool, "tool_calls");
    still_answers(&server);
}

#[test]
fn bodies_and_routes_that_are_none_are_refused() {
    let server = start(Duration::ZERO);
    let deep = [r#"{"prompt": "#.as_bytes(), &b"[".repeat(100_000)].concat();
    let large = [br#"{"prompt": ""#, &b"a".repeat(4 << 20)[..], br#""}"#].concat();
    for (method, path, body, expected) in [
        ("POST", "/v1/completions", &b""[..], 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b"{\"prompt\": \"\xff\"}", 400),
        ("POST", "/v1/completions", b"{\"prompt\": \"\\ud800\"}", 400),
        ("POST", "/v1/chat/completions", &deep, 400),
        ("POST", "/v1/completions", &large, 413),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/v2/../etc/passwd", b"", 404),
        ("POST", "/v1/completions", br#"{"model": "other", "prompt": "a"}"#, 404),
    ] {
        let (status, answer) = server.raw(method, path, body);
        assert_eq!(status, expected, "{answer}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert!(answer["error"]["message"].is_string(), "{answer}");
    }
    still_answers(&server);
}

#[test]
fn a_full_queue_says_when_to_come_back_and_a_draining_server_that_it_ends() {
    let server = start(Duration::from_millis(1));
    let body = json!({"prompt": "a", "max_tokens": 4000, "n": 4}).to_string();
    let sockets: Vec<_> = (0..2).map(|_| server.open("POST", "/v1/completions", body.as_bytes())).collect();
    until("the queue is full", || server.engine.num_live() == 8);
    let (status, answer) = server.post("/v1/completions", &json!({"prompt": "a"}));
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 429 && message.contains("try again in"), "{status} {message}");
    drop(sockets);
    until("they have left", || server.engine.num_live() == 0);
    still_answers(&server);
    server.engine.drain();
    let (status, answer) = server.post("/v1/completions", &json!({"prompt": "a"}));
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 503 && message.contains("shutting down"), "{status} {message}");
}
