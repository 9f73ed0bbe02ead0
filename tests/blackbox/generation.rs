//! Default sampling: from the model's own files, in every command and on every route.

use serde_json::{Value, json};

use crate::server::Server;
use crate::{refusal, scratch, stdout};

#[test]
fn run_draws_as_the_model_says_and_anew_each_time() {
    let ask = |flags: &[&str]| stdout(&[&["run", "-p", "What is a trait?", "-n", "24"][..], flags].concat());
    let hot = || ask(&["--temperature", "2"]);
    assert_ne!(hot(), hot(), "every run has a fresh seed");
    assert_eq!(ask(&["--seed", "3"]), ask(&["--seed", "3"]));
    // The built-in model says temperature 0.7 and top_p 0.95.
    assert_eq!(ask(&["--seed", "3"]), ask(&["--seed", "3", "--temperature", "0.7", "--top-p", "0.95"]));
    let greedy = ask(&["--temperature", "0"]);
    assert_eq!(ask(&["--override-generation-config", r#"{"temperature": 0}"#]), greedy);
    assert_ne!(ask(&["--temperature", "0", "--repetition-penalty", "5"]), greedy);
    let folder = scratch("generation-run");
    let own = json!({"temperature": 0, "repetition_penalty": 5, "max_new_tokens": 9, "typical_p": 0.5});
    std::fs::write(folder.join("generation_config.json"), own.to_string()).expect("written");
    let folder = folder.to_str().expect("UTF-8");
    let short = stdout(&["run", "-p", "What is a trait?", "--generation-config", folder]);
    assert_eq!(
        short,
        stdout(&["run", "-p", "What is a trait?", "-n", "9", "--temperature", "0", "--repetition-penalty", "5"])
    );
    let said = crate::output(&["run", "-p", "x", "-n", "1", "--generation-config", folder]).stderr;
    assert!(String::from_utf8_lossy(&said).contains("typical_p 0.5"), "{}", String::from_utf8_lossy(&said));
    assert!(refusal(&["run", "-p", "x", "--generation-config", "/no/such"]).contains("auto, vllm or a folder"));
    assert!(refusal(&["run", "-p", "x", "--override-generation-config", "{\"a\": 1}"]).contains("a: not one of"));
}

#[test]
fn every_route_has_the_same_defaults() {
    let folder = scratch("generation-serve");
    let own = json!({"temperature": 0, "repetition_penalty": 5, "max_new_tokens": 7, "no_repeat_ngram_size": 3});
    std::fs::write(folder.join("generation_config.json"), own.to_string()).expect("written");
    let server = Server::start(&["--max-num-seqs", "4", "--generation-config", folder.to_str().expect("UTF-8")]);
    let notes: Vec<&String> = server.greeting.iter().filter(|line| line.contains("no_repeat_ngram_size 3")).collect();
    assert_eq!(notes.len(), 1, "{:#?}", server.greeting);
    let messages = json!([{"role": "user", "content": "What is a trait?"}]);
    let ask = |path: &str, extra: Value| {
        let mut body = match path {
            "/v1/responses" => json!({"input": messages}),
            "/v1/messages" => json!({"model": "folio-rust-42m", "messages": messages, "max_tokens": 50}),
            "/v1/completions" => json!({"prompt": "let a = [0, 0, 0, 0, 0, 0,"}),
            _ => json!({"messages": messages}),
        };
        extra.as_object().into_iter().flatten().for_each(|(key, value)| body[key] = value.clone());
        let (status, answer) = server.post(path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        let usage = &answer["usage"];
        let tokens = usage["completion_tokens"].as_u64().or(usage["output_tokens"].as_u64());
        let text = [
            &answer["choices"][0]["message"]["content"],
            &answer["choices"][0]["text"],
            &answer["output"][0]["content"][0]["text"],
            &answer["content"][0]["text"],
        ];
        let text = text.into_iter().find_map(Value::as_str).expect("a text").to_string();
        (tokens.expect("counted"), text)
    };
    let chat = ask("/v1/chat/completions", Value::Null);
    assert_eq!(chat.0, 7);
    for path in ["/v1/responses", "/v1/messages"] {
        assert_eq!(ask(path, Value::Null), chat, "{path}");
    }
    let completion = ask("/v1/completions", Value::Null);
    assert_eq!(completion.0, 7);
    // The request's values have precedence, within bounds.
    let spelled = json!({"temperature": 0, "repetition_penalty": 5, "max_tokens": 50});
    assert_eq!(ask("/v1/chat/completions", spelled.clone()), chat);
    assert_eq!(ask("/v1/completions", spelled), completion);
    assert_ne!(ask("/v1/completions", json!({"repetition_penalty": 1})), completion);
    assert_eq!(ask("/v1/completions", json!({"max_tokens": 3})).0, 3);
}
