//! `/v1/responses`: answers, events, and stored responses of each caller.

use std::time::Duration;

use folio_server::Limits;
use serde_json::{Value, json};

use crate::harness::{Server, Setup, read_answer, start, start_with};

const ROUTE: &str = "/v1/responses";

fn create(server: &Server, body: &Value) -> Value {
    let (status, response) = server.post(ROUTE, body);
    assert_eq!(status, 200, "{response}");
    response
}

fn text_of(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().expect("a text")
}

fn get(server: &Server, path: &str) -> (u16, Value) {
    let (status, body) = server.raw("GET", path, b"");
    (status, serde_json::from_str(&body).expect("JSON"))
}

fn path_of(response: &Value) -> String {
    format!("{ROUTE}/{}", response["id"].as_str().expect("an id"))
}

#[test]
fn a_conversation_goes_on_from_what_was_kept() {
    let server = start(Duration::ZERO);
    let first =
        create(&server, &json!({"input": "ab", "max_output_tokens": 3, "instructions": "x", "metadata": {"a": "b"}}));
    assert_eq!((text_of(&first), &first["status"]), ("cde", &json!("incomplete")));
    assert_eq!(first["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(
        (&first["store"], &first["metadata"], &first["instructions"]),
        (&json!(true), &json!({"a": "b"}), &json!("x"))
    );
    let usage = &first["usage"];
    assert_eq!([&usage["input_tokens"], &usage["output_tokens"], &usage["total_tokens"]], [3, 3, 6]);
    assert_eq!(get(&server, &path_of(&first)), (200, first.clone()));

    let next = json!({
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "fg"}]}], "stop": "j",
        "previous_response_id": first["id"],
    });
    let second = create(&server, &next);
    assert_eq!((text_of(&second), &second["status"]), ("hi", &json!("completed")));
    // ab, cde, fg: instructions are of their own response alone.
    assert_eq!(second["usage"]["input_tokens"], 7);
    assert_eq!((&second["previous_response_id"], &second["instructions"]), (&first["id"], &Value::Null));

    let (status, items) = get(&server, &format!("{}/input_items?order=asc", path_of(&second)));
    let texts: Vec<_> =
        items["data"].as_array().expect("items").iter().map(|item| &item["content"][0]["text"]).collect();
    assert_eq!((status, texts), (200, ["ab", "cde", "fg"].map(|text| json!(text)).iter().collect()));
    assert_eq!(items["data"][1]["id"], first["output"][0]["id"]);

    let (status, body) = server.raw("DELETE", &path_of(&first), b"");
    assert!(status == 200 && body.contains(r#""deleted":true"#), "{body}");
    assert_eq!(get(&server, &path_of(&first)).0, 404);
    assert_eq!(server.raw("DELETE", &path_of(&first), b"").0, 404);
    assert_eq!(server.post(ROUTE, &next).0, 404, "there is nothing to go on from");
    assert_eq!(get(&server, &path_of(&second)).0, 200, "it has a copy of its own");
}

#[test]
fn events_come_in_order_and_end_with_the_response() {
    let server = start(Duration::ZERO);
    let body = json!({
        "input": "ab", "max_output_tokens": 3, "stream": true, "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    });
    let events: Vec<Value> =
        server.events(ROUTE, &body).iter().map(|event| serde_json::from_str(event).expect("JSON")).collect();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().expect("a type")).collect();
    let delta = "response.output_text.delta";
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            delta,
            delta,
            delta,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
    );
    assert!(events.iter().enumerate().all(|(index, event)| event["sequence_number"] == index));
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!((deltas.as_str(), &events[7]["text"]), ("cde", &json!("cde")));
    assert_eq!(events[4]["logprobs"][0]["token"], "c");
    assert_eq!(events[4]["logprobs"][0]["top_logprobs"].as_array().map(Vec::len), Some(2));
    let last = &events[10]["response"];
    assert_eq!((text_of(last), &events[0]["response"]["status"]), ("cde", &json!("in_progress")));
    assert_eq!(last["output"][0]["content"][0]["logprobs"].as_array().map(Vec::len), Some(3));
    assert_eq!(get(&server, &path_of(last)), (200, last.clone()), "what is kept is what was sent");
}

#[test]
fn every_event_has_its_type_for_a_name() {
    let server = start(Duration::ZERO);
    let (_, body) = server.raw("POST", ROUTE, br#"{"input": "ab", "stop": "e", "stream": true}"#);
    let named = |prefix| body.lines().filter_map(move |line: &str| line.strip_prefix(prefix));
    let mut pairs = named("event: ").zip(named("data: ")).peekable();
    assert!(pairs.peek().is_some());
    for (name, data) in pairs {
        assert_eq!(serde_json::from_str::<Value>(data).expect("JSON")["type"], name);
    }
    assert!(body.contains("event: response.completed\n"));
}

#[test]
fn a_failure_is_told_and_not_kept() {
    let server = start(Duration::ZERO);
    let (status, answer) = server.post(ROUTE, &json!({"input": "a!"}));
    assert_eq!((status, &answer["error"]["type"]), (500, &json!("server_error")));
    let events = server.events(ROUTE, &json!({"input": "a!", "stream": true}));
    let last: Value = serde_json::from_str(events.last().expect("an event")).expect("JSON");
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(
        (&last["response"]["error"]["code"], &last["response"]["store"]),
        (&json!("server_error"), &json!(false))
    );
    assert_eq!(get(&server, &path_of(&last["response"])).0, 404);
}

#[test]
fn what_is_not_to_be_kept_or_does_not_fit_is_not() {
    let limits = Limits { stored_response_bytes: 100, ..Limits::default() };
    for (server, store) in [(start(Duration::ZERO), false), (start_with(Setup { limits, ..Setup::default() }), true)] {
        let body = json!({"input": "ab", "max_output_tokens": 1, "store": store});
        let response = create(&server, &body);
        assert_eq!(response["store"], false);
        assert_eq!(get(&server, &path_of(&response)).0, 404);
    }
}

#[test]
fn a_key_finds_its_own_responses_alone() {
    let keys = "aaaaaaaaaaaaaaaa\nbbbbbbbbbbbbbbbb\n";
    let server = start_with(Setup { keys, ..Setup::default() });
    let send = |key: char, method: &str, path: &str, body: &Value| {
        let field = format!("authorization: Bearer {}\r\n", key.to_string().repeat(16));
        let body = if method == "POST" { body.to_string() } else { String::new() };
        let (status, _, body) = read_answer(&mut server.open_with(&field, method, path, body.as_bytes()));
        (status, serde_json::from_str::<Value>(&body).expect("JSON"))
    };
    let (status, response) = send('a', "POST", ROUTE, &json!({"input": "ab", "max_output_tokens": 1}));
    assert_eq!(status, 200, "{response}");
    let (path, next) = (path_of(&response), json!({"input": "d", "previous_response_id": response["id"]}));
    assert_eq!(send('b', "GET", &path, &json!(null)).0, 404);
    assert_eq!(send('b', "DELETE", &path, &json!(null)).0, 404);
    assert_eq!(send('b', "POST", ROUTE, &next).0, 404);
    assert_eq!(send('a', "GET", &path, &json!(null)), (200, response));
}

#[test]
fn refusals_name_the_fields_of_this_route() {
    let server = start(Duration::ZERO);
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": ""}), "input"),
        (json!({"input": "a".repeat(5000)}), "input"),
        (json!({"input": "a", "truncation": "auto"}), "truncation"),
    ] {
        let (status, answer) = server.post(ROUTE, &body);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
    for path in ["/v1/responses/resp_1", "/v1/responses/%ff", "/v1/responses/resp_1/input_items"] {
        let (status, answer) = get(&server, path);
        assert_eq!((status, &answer["error"]["type"]), (404, &json!("not_found_error")), "{path}");
    }
}
