//! `folio serve`: the OpenAI routes on a real socket.

use serde_json::Value;

use crate::http::request;
use crate::server::Server;

fn chat(extra: Value) -> Value {
    let mut body = serde_json::json!({
        "messages": [{"role": "user", "content": "What does `Rc::clone` do?"}], "temperature": 0, "max_tokens": 16,
    });
    for (key, value) in extra.as_object().into_iter().flatten() {
        body[key] = value.clone();
    }
    body
}

#[test]
fn answers_streams_and_refuses() {
    let server = Server::start(&["--max-num-seqs", "8"]);
    assert_eq!(request(server.port, "GET", "/health", "").status, 200);
    let models: Value = serde_json::from_str(&request(server.port, "GET", "/v1/models", "").body).expect("JSON");
    assert_eq!(models["data"][0]["id"], "folio-rust-42m");

    let (status, whole) = server.post("/v1/chat/completions", chat(Value::Null));
    assert_eq!(status, 200, "{whole}");
    let text = whole["choices"][0]["message"]["content"].as_str().expect("an answer").to_string();
    assert!(!text.is_empty());
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 16);

    // A stream's pieces add up to the whole answer; the prompt comes from the prefix cache and
    // changes nothing.
    let body = chat(serde_json::json!({"stream": true, "stream_options": {"include_usage": true}}));
    let events = request(server.port, "POST", "/v1/chat/completions", &body.to_string()).body;
    let data: Vec<&str> = events.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(data.last(), Some(&"[DONE]"));
    let chunks: Vec<Value> = data.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let joined: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(joined, text);
    assert_eq!(chunks.last().expect("chunks")["usage"]["completion_tokens"], 16);

    // Stop strings are cut; logprobs and several answers are as requested.
    let stop: String = text.chars().skip(5).take(3).collect();
    let (_, stopped) = server.post("/v1/chat/completions", chat(serde_json::json!({"stop": stop})));
    assert_eq!(stopped["choices"][0]["message"]["content"].as_str(), text.split(&stop).next());
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let (_, many) =
        server.post("/v1/chat/completions", chat(serde_json::json!({"n": 2, "logprobs": true, "top_logprobs": 2})));
    for choice in many["choices"].as_array().expect("choices") {
        assert_eq!(choice["message"]["content"], text.as_str());
        assert_eq!(choice["logprobs"]["content"].as_array().map(Vec::len), Some(16));
    }
    let (status, completion) =
        server.post("/v1/completions", serde_json::json!({"prompt": "fn main() {", "temperature": 0}));
    assert_eq!((status, completion["usage"]["completion_tokens"].as_u64()), (200, Some(16)), "{completion}");

    let refused = |body: Value, field: &str| {
        let (status, answer) = server.post("/v1/chat/completions", body);
        assert_eq!(status, 400, "{answer}");
        let message = answer["error"]["message"].as_str().unwrap_or_default().to_string();
        assert!(message.contains(field), "{field}: {message}");
    };
    let tool = serde_json::json!({"type": "function", "function": {"name": "f"}});
    refused(chat(serde_json::json!({"tools": [tool]})), "tools");
    refused(chat(serde_json::json!({"temperature": -1})), "temperature");
    refused(chat(serde_json::json!({"n": 1_000_000})), "n");
    refused(chat(serde_json::json!({"logit_bias": {"999999": 1}})), "logit_bias");
    refused(chat(serde_json::json!({"messages": []})), "messages");
    refused(chat(serde_json::json!({"messages": [{"role": "user"}]})), "messages");
    refused(Value::String("no object".into()), "");
    let (status, answer) = server.post("/v1/chat/completions", chat(serde_json::json!({"model": "another"})));
    assert_eq!(status, 404, "{answer}");
    assert_eq!(request(server.port, "GET", "/nowhere", "").status, 404);
    assert_eq!(
        server.post("/v1/chat/completions", chat(Value::Null)).1["choices"],
        whole["choices"],
        "and it still answers"
    );
}
