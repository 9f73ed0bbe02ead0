//! `/v1/messages` and `/v1/messages/count_tokens`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{Server, Setup, start, start_with};

const ROUTE: &str = "/v1/messages";

fn create(server: &Server, more: Value) -> Value {
    let (status, message) = server.post(ROUTE, &body(more));
    assert_eq!(status, 200, "{message}");
    message
}

fn body(more: Value) -> Value {
    let mut body = json!({"model": "alphabet", "max_tokens": 3, "messages": [{"role": "user", "content": "ab"}]});
    for (name, value) in more.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    body
}

#[test]
fn messages_are_answered_and_say_why_they_end() {
    let server = start(Duration::ZERO);
    let message = create(&server, json!({"system": "x"}));
    assert!(message["id"].as_str().is_some_and(|id| id.starts_with("msg_")));
    assert_eq!(
        (&message["type"], &message["role"], &message["model"]),
        (&json!("message"), &json!("assistant"), &json!("alphabet"))
    );
    assert_eq!(message["content"], json!([{"type": "text", "text": "cde"}]));
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("max_tokens"), &Value::Null));
    let expected =
        json!({"input_tokens": 3, "output_tokens": 3, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0});
    assert_eq!(message["usage"], expected);

    let message = create(&server, json!({"stop_sequences": ["z", "ef"], "max_tokens": 9}));
    assert_eq!((&message["content"][0]["text"], &message["stop_reason"]), (&json!("cd"), &json!("stop_sequence")));
    assert_eq!(message["stop_sequence"], "ef");
}

#[test]
fn what_the_cache_had_is_counted_apart() {
    let server = start(Duration::ZERO);
    let long = json!({"messages": [{"role": "user", "content": "abcdefghijklmnopqrstuvwxyzabcdefghijk"}]});
    assert_eq!(create(&server, long.clone())["usage"]["cache_read_input_tokens"], 0);
    let usage = &create(&server, long)["usage"];
    assert_eq!([&usage["input_tokens"], &usage["cache_read_input_tokens"]], [5, 32]);
}

#[test]
fn events_come_in_order_under_their_names() {
    let server = start(Duration::ZERO);
    let (status, text) = server.raw("POST", ROUTE, body(json!({"stream": true})).to_string().as_bytes());
    assert_eq!(status, 200, "{text}");
    let lines = |prefix| text.lines().filter_map(move |line: &str| line.strip_prefix(prefix));
    let names: Vec<&str> = lines("event: ").collect();
    let delta = "content_block_delta";
    assert_eq!(
        names,
        [
            "message_start",
            "content_block_start",
            "ping",
            delta,
            delta,
            delta,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    let events: Vec<Value> = lines("data: ").map(|data| serde_json::from_str(data).expect("JSON")).collect();
    assert!(names.iter().zip(&events).all(|(name, event)| event["type"] == *name));
    let start = &events[0]["message"];
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
    assert_eq!([&start["usage"]["input_tokens"], &start["usage"]["output_tokens"]], [2, 0]);
    assert_eq!(events[1]["content_block"], json!({"type": "text", "text": ""}));
    assert_eq!(events[3]["delta"], json!({"type": "text_delta", "text": "c"}));
    assert_eq!(events[7]["delta"], json!({"stop_reason": "max_tokens", "stop_sequence": null}));
    assert_eq!([&events[7]["usage"]["input_tokens"], &events[7]["usage"]["output_tokens"]], [2, 3]);
}

#[test]
fn errors_are_in_anthropics_form() {
    let server = start(Duration::ZERO);
    let broken = json!({"messages": [{"role": "user", "content": "a!"}]});
    let (status, answer) = server.post(ROUTE, &body(broken.clone()));
    assert_eq!((status, &answer["type"], &answer["error"]["type"]), (500, &json!("error"), &json!("api_error")));
    let mut streamed = body(broken);
    streamed["stream"] = json!(true);
    let events = server.events(ROUTE, &streamed);
    let last: Value = serde_json::from_str(events.last().expect("an event")).expect("JSON");
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
    for (more, message) in [
        (json!({"tools": [{}]}), "tools: tools are not supported"),
        (json!({"messages": [{"role": "user", "content": ""}]}), "messages: must have at least one token"),
        (json!({"max_tokens": "3"}), "max_tokens: must be an integer"),
    ] {
        let (status, answer) = server.post(ROUTE, &body(more));
        assert_eq!((status, &answer["error"]["type"]), (400, &json!("invalid_request_error")));
        assert!(answer["error"]["message"].as_str().is_some_and(|text| text.starts_with(message)), "{answer}");
    }
    let (status, answer) = server.post(ROUTE, &body(json!({"model": "other"})));
    assert_eq!((status, &answer["error"]["type"]), (404, &json!("not_found_error")));
}

#[test]
fn an_answer_goes_on_from_the_assistants_last_word() {
    let template = "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}z{% endif %}\
                    {% endfor %}{% if add_generation_prompt %}k{% endif %}";
    let server = start_with(Setup { template, ..Setup::default() });
    let talk =
        |last: &str| json!({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": last}]});
    assert_eq!(create(&server, talk("mn"))["content"][0]["text"], "opq");
    assert_eq!(create(&server, talk(""))["content"][0]["text"], "lmn");
}

#[test]
fn tokens_are_counted_without_an_answer() {
    let server = start(Duration::ZERO);
    let path = "/v1/messages/count_tokens";
    let count = json!({"model": "alphabet", "system": "xyz", "messages": [{"role": "user", "content": "ab"}]});
    assert_eq!(server.post(path, &count), (200, json!({"input_tokens": 5})));
    let (status, answer) = server.post(path, &body(json!({})));
    assert_eq!((status, &answer["type"]), (400, &json!("error")), "max_tokens has no meaning here");
}
