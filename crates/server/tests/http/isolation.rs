//! A fault in one request ends that request and no other: its neighbours' tokens are the same as
//! without it.

use std::time::Duration;

use folio_testing::wait::until;
use serde_json::{Value, json};

use crate::harness::{BROKEN, ROW_FAILURE, STEP_ERROR, STEP_PANIC, Server, Setup, read_answer, start_with, token_of};

const COMPLETIONS: &str = "/v1/completions";

fn server() -> Server {
    start_with(Setup { pace: Duration::from_micros(500), max_seqs: 8, all_bytes: true, ..Setup::default() })
}

/// The tokens of a long answer, drawn by its seed.
fn neighbour(server: &Server, seed: usize) -> String {
    let body = json!({
        "prompt": "abc", "max_tokens": 600, "temperature": 1.5, "seed": seed, "stream": true,
        "frequency_penalty": 0.1,
    });
    let events = server.events(COMPLETIONS, &body);
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "the stream is whole");
    let text = |event: &String| {
        let event: Value = serde_json::from_str(event).unwrap_or_default();
        event["choices"][0]["text"].as_str().unwrap_or_default().to_owned()
    };
    events.iter().map(text).collect()
}

/// Does `harm` while three others are being answered, and compares what they get with what they get
/// undisturbed.
fn beside_neighbours(server: &Server, harm: impl Fn()) {
    let undisturbed: Vec<String> = (0..3).map(|seed| neighbour(server, seed)).collect();
    std::thread::scope(|scope| {
        let disturbed: Vec<_> = (0..3).map(|seed| scope.spawn(move || neighbour(server, seed))).collect();
        until("they run", || server.engine.stats().scheduler.running == 3);
        harm();
        for (expected, found) in undisturbed.iter().zip(disturbed) {
            assert_eq!(&found.join().expect("answered"), expected, "a neighbour's answer changed");
        }
    });
    is_sound(server);
}

fn is_sound(server: &Server) {
    until("all have ended", || server.engine.num_live() == 0);
    let (status, answer) = server.post(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 3}));
    assert_eq!((status, &answer["choices"][0]["text"]), (200, &json!("bcd")));
    assert_eq!(server.raw("GET", "/health", b"").0, 200);
}

/// Requests that go wrong at once, and after their first token.
fn fails(server: &Server, token: u32) {
    let message = "the engine could not complete this request";
    let fails_at_once = json!({"prompt": [0, token]});
    let (status, answer) = server.post(COMPLETIONS, &fails_at_once);
    assert_eq!((status, &answer["error"]["message"]), (500, &json!(message)));
    let later = json!({"prompt": "a", "max_tokens": 8, "allowed_token_ids": [token]});
    assert_eq!(server.post(COMPLETIONS, &later).0, 500);
    let mut later = later;
    later["stream"] = json!(true);
    let events = server.events(COMPLETIONS, &later);
    let last: Value = events.last().and_then(|event| serde_json::from_str(event).ok()).expect("an event");
    assert_eq!(last["error"]["message"], message, "{events:?}");
    assert_eq!(events.len(), 2, "one token and the error: {events:?}");
}

#[test]
fn a_row_that_is_not_a_number() {
    let server = server();
    beside_neighbours(&server, || fails(&server, BROKEN));
    assert_eq!(server.engine.stats().steps_failed, 0, "the row failed, not the step");
}

#[test]
fn a_sampler_that_panicked() {
    let server = server();
    beside_neighbours(&server, || fails(&server, token_of(ROW_FAILURE)));
    assert_eq!(server.engine.stats().steps_failed, 0, "the row failed, not the step");
}

#[test]
fn a_step_that_panics() {
    let server = server();
    beside_neighbours(&server, || fails(&server, token_of(STEP_PANIC)));
    assert!(server.engine.stats().steps_failed >= 3, "each of them made a step fail");
}

#[test]
fn a_step_that_fails() {
    let server = server();
    beside_neighbours(&server, || fails(&server, token_of(STEP_ERROR)));
    assert!(server.engine.stats().steps_failed >= 3, "each of them made a step fail");
}

#[test]
fn all_of_them_at_once() {
    let server = server();
    beside_neighbours(&server, || {
        std::thread::scope(|scope| {
            for byte in [b'!', ROW_FAILURE, STEP_PANIC, STEP_ERROR] {
                let server = &server;
                scope.spawn(move || fails(server, token_of(byte)));
            }
        });
    });
}

#[test]
fn samples_of_one_request_fail_together_and_its_prompts_too() {
    let server = server();
    beside_neighbours(&server, || {
        let (status, _) = server.post(COMPLETIONS, &json!({"prompt": "a#", "n": 3}));
        assert_eq!(status, 500);
        let (status, _) = server.post(COMPLETIONS, &json!({"prompt": ["a", "a!", "b"]}));
        assert_eq!(status, 500);
    });
}

/// The template of a model: its effect on one conversation stays within that conversation.
const TEMPLATE: &str = "{% set text = messages[0].content %}\
    {% if text == 'raise' %}{{ raise_exception('zqmarkerqz') }}\
    {% elif text == 'loop' %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}\
    {% elif text == 'write' %}{% for i in range(100000) %}{{ 'zqmarkerqz' * 1000 }}{% endfor %}\
    {% elif text == 'recurse' %}{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}\
    {% elif text == 'missing' %}{{ nothing.at.all.here }}\
    {% elif text == 'divide' %}{{ 1 // 0 }}\
    {% elif text == 'convert' %}{{ 'zqmarkerqz' | int('x') + 1 }}\
    {% elif text == 'include' %}{% include '/etc/passwd' %}\
    {% else %}{{ text }}{% endif %}";

fn talk(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 3})
}

#[test]
fn a_template_that_does_not_end_well() {
    let server = start_with(Setup {
        pace: Duration::from_micros(500),
        max_seqs: 8,
        all_bytes: true,
        template: TEMPLATE,
        ..Setup::default()
    });
    let refusal = "messages: the model's chat template refuses this conversation";
    beside_neighbours(&server, || {
        std::thread::scope(|scope| {
            // More of them than there are threads that prepare prompts.
            for text in ["raise", "loop", "write", "recurse", "missing", "divide", "include", "loop"] {
                let server = &server;
                scope.spawn(move || {
                    for path in ["/v1/chat/completions", "/v1/messages", "/tokenize"] {
                        let mut body = talk(text);
                        if path == "/tokenize" {
                            body["max_tokens"].take();
                            body.as_object_mut().expect("an object").remove("max_tokens");
                        }
                        let (status, answer) = server.post(path, &body);
                        assert_eq!((status, &answer["error"]["message"]), (400, &json!(refusal)), "{text}");
                    }
                });
            }
        });
        let (status, answer) = server.post("/v1/chat/completions", &talk("a"));
        assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &json!("bcd")));
    });
}

#[test]
fn a_route_that_panics() {
    async fn planted() -> &'static str {
        panic!("planted panic")
    }
    let server = start_with(Setup {
        pace: Duration::from_micros(500),
        max_seqs: 8,
        all_bytes: true,
        extra: || axum::Router::new().route("/panic", axum::routing::post(planted)),
        ..Setup::default()
    });
    beside_neighbours(&server, || {
        for _ in 0..3 {
            let (status, answer) = server.post("/panic", &json!({}));
            assert_eq!(
                (status, &answer["error"]["message"]),
                (500, &json!("an internal error has ended this request"))
            );
        }
    });
}

#[test]
fn a_client_that_leaves_in_the_middle() {
    let server = server();
    beside_neighbours(&server, || {
        for stream in [true, false] {
            for _ in 0..5 {
                let body = json!({"prompt": "a", "max_tokens": 3000, "stream": stream, "n": 2}).to_string();
                let socket = server.open("POST", COMPLETIONS, body.as_bytes());
                until("it runs", || server.engine.num_live() > 3);
                drop(socket);
                until("it has gone", || server.engine.num_live() <= 3);
            }
        }
    });
}

#[test]
fn an_answer_says_which_error_ended_it_on_every_route() {
    let server = server();
    let message = json!([{"role": "user", "content": "a#"}]);
    let requests = [
        ("/v1/chat/completions", json!({"messages": message})),
        ("/v1/completions", json!({"prompt": "a#"})),
        ("/v1/responses", json!({"input": "a#"})),
        ("/v1/messages", json!({"messages": message, "max_tokens": 4})),
        ("/v1/embeddings", json!({"input": "a#"})),
    ];
    beside_neighbours(&server, || {
        for (path, body) in &requests {
            let (status, answer) = server.post(path, body);
            assert_eq!(status, 500, "{path}: {answer}");
            assert_eq!(answer["error"]["message"], "the engine could not complete this request", "{path}");
        }
        for (path, body) in &requests[..4] {
            let mut body = body.clone();
            body["stream"] = json!(true);
            let mut socket = server.open("POST", path, body.to_string().as_bytes());
            let (status, _, events) = read_answer(&mut socket);
            assert_eq!(status, 200, "{path}: {events}");
            assert!(events.contains("the engine could not complete this request"), "{path}: {events}");
        }
    });
}
