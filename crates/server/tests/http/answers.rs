//! Answers to good requests, and the end of a request whose client disconnects.

use std::{io::Read, time::Duration};

use folio_testing::wait::until;
use serde_json::{Value, json};

use crate::harness::{BROKEN, Server, start};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn completion(server: &Server, body: Value) -> Value {
    let (status, answer) = server.post(COMPLETIONS, &body);
    assert_eq!(status, 200, "{answer}");
    answer
}

#[test]
fn a_stop_string_ends_the_answer_and_everything_is_counted() {
    let server = start(Duration::ZERO);
    let answer = completion(&server, json!({"prompt": "ab", "max_tokens": 20, "stop": "fgh"}));
    assert_eq!(answer["choices"][0]["text"], "cde");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let usage = &answer["usage"];
    assert_eq!([&usage["prompt_tokens"], &usage["completion_tokens"], &usage["total_tokens"]], [2, 6, 8]);
    assert!(answer["created"].as_u64() > Some(1_700_000_000), "{answer}");
    let included = json!({"prompt": "ab", "stop": ["zz", "fgh"], "include_stop_str_in_output": true});
    assert_eq!(completion(&server, included)["choices"][0]["text"], "cdefgh");
    let cut = completion(&server, json!({"prompt": [0, 1], "max_tokens": 4, "stop": "fgh"}));
    assert_eq!((&cut["choices"][0]["text"], &cut["choices"][0]["finish_reason"]), (&json!("cdef"), &json!("length")));
}

#[test]
fn samples_are_streamed_and_the_prompt_is_counted_once() {
    let server = start(Duration::ZERO);
    let prompt = "abcdefghijklmnopqrstuvwxyzabcdefghijk";
    let body = json!({
        "messages": [{"role": "user", "content": prompt}], "n": 3, "max_tokens": 5, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let events = server.events(CHAT, &body);
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|e| serde_json::from_str(e).expect("JSON")).collect();
    let mut texts = [const { String::new() }; 3];
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        let index = choice["index"].as_u64().expect("an index") as usize;
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
    }
    assert_eq!(texts, ["lmnop"; 3]);
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
    let usage = &chunks.last().expect("usage")["usage"];
    assert_eq!([&usage["prompt_tokens"], &usage["completion_tokens"]], [37, 15]);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0, "nobody had asked before");
    let again = completion(&server, json!({"prompt": prompt}));
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 32);
}

#[test]
fn a_salt_keeps_prompts_apart() {
    let server = start(Duration::ZERO);
    let cached = |salt: &str| {
        let body = json!({"prompt": "abcdefghijklmnopqrstuvwxyzabcdefghijk", "cache_salt": salt, "priority": -1});
        completion(&server, body)["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    };
    assert_eq!([cached("a"), cached("b"), cached("a")], [Some(0), Some(0), Some(32)]);
}

#[test]
fn logprobs_are_numbers() {
    let server = start(Duration::ZERO);
    let body = json!({
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": true, "top_logprobs": 20,
    });
    let (_, answer) = server.post(CHAT, &body);
    let entry = &answer["choices"][0]["logprobs"]["content"][0];
    assert_eq!(entry["token"], "b");
    let top: Vec<f64> = entry["top_logprobs"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|top| top["logprob"].as_f64().expect("a number"))
        .collect();
    assert_eq!((top.len(), top.last()), (20, Some(&-9999.0)), "what the model rules out");
    let answer = completion(&server, json!({"prompt": "a", "max_tokens": 2, "logprobs": 20}));
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["b", "c"]));
}

#[test]
fn a_row_that_went_wrong_fails_its_request_alone() {
    let server = start(Duration::ZERO);
    let (status, answer) = server.post(COMPLETIONS, &json!({"prompt": [0, BROKEN]}));
    assert_eq!((status, &answer["error"]["type"]), (500, &json!("server_error")));
    let events = server.events(COMPLETIONS, &json!({"prompt": [0, BROKEN], "stream": true}));
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(events[0].contains("\"error\""), "{events:?}");
    assert_eq!(completion(&server, json!({"prompt": "a", "max_tokens": 2}))["choices"][0]["text"], "bc");
}

#[test]
fn a_client_that_leaves_takes_its_request_along() {
    for stream in [true, false] {
        let server = start(Duration::from_millis(2));
        let body = json!({"prompt": "a", "max_tokens": 4000, "stream": stream, "n": 2}).to_string();
        let mut socket = server.open("POST", COMPLETIONS, body.as_bytes());
        if stream {
            socket.read_exact(&mut [0; 400]).expect("events");
        }
        until("it runs", || server.engine.stats().tokens_sampled > 4);
        drop(socket);
        until("both have ended", || server.engine.stats().samples_ended == 2);
        until("the engine is idle", || server.engine.stats().scheduler.running == 0);
        assert!(server.engine.stats().tokens_sampled < 4000, "stream {stream}: it ran to its end");
    }
}

#[test]
fn a_token_that_ends_an_answer_is_counted_and_told_but_not_shown() {
    let server = start(Duration::ZERO);
    let body = json!({
        "prompt": "a", "max_tokens": 20, "stop_token_ids": [5], "logprobs": 1, "return_token_ids": true,
    });
    let whole = completion(&server, body.clone());
    let choice = &whole["choices"][0];
    assert_eq!((&choice["text"], &choice["stop_reason"]), (&json!("bcde"), &json!(5)));
    assert_eq!(choice["token_ids"], json!([1, 2, 3, 4, 5]));
    assert_eq!(choice["logprobs"]["tokens"], json!(["b", "c", "d", "e", "f"]));
    assert_eq!(whole["usage"]["completion_tokens"], 5);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = server.events(COMPLETIONS, &streamed);
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).expect("JSON")).collect();
    let ids: Vec<&Value> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array()).flatten().collect();
    assert_eq!(json!(ids), choice["token_ids"]);
    assert_eq!(chunks.last().expect("usage")["usage"], whole["usage"]);
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "stop_token_ids": [1], "logprobs": true});
    let (_, answer) = server.post(CHAT, &chat);
    assert_eq!(answer["choices"][0]["message"]["content"], "");
    assert_eq!(answer["choices"][0]["logprobs"]["content"][0]["token"], "b", "{answer}");
}

#[test]
fn a_wrong_method_is_told_the_right_one_in_every_style() {
    let server = start(Duration::ZERO);
    for path in [COMPLETIONS, "/v1/messages"] {
        let mut answer = String::new();
        let _ = server.open("GET", path, b"").read_to_string(&mut answer);
        assert!(
            answer.starts_with("HTTP/1.1 405") && answer.to_ascii_lowercase().contains("\r\nallow: post"),
            "{answer}"
        );
    }
}
