//! Sampling: new for every prompt of a request that names no seed, and repeatable for one that
//! does.

use std::{collections::BTreeSet, time::Duration};

use serde_json::{Value, json};

use crate::harness::{Server, Setup, start_with};

fn server() -> Server {
    start_with(Setup { max_seqs: 8, pace: Duration::ZERO, ..Setup::default() })
}

/// The texts of all choices. So hot that two draws of 24 letters are hardly ever alike.
fn choices(server: &Server, mut body: Value) -> Vec<String> {
    (body["temperature"], body["max_tokens"]) = (json!(100), json!(24));
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let choices = answer["choices"].as_array().expect("a list").iter();
    choices.map(|choice| choice["text"].as_str().expect("a text").to_owned()).collect()
}

fn num_different(texts: &[String]) -> usize {
    texts.iter().collect::<BTreeSet<_>>().len()
}

#[test]
fn every_prompt_without_a_seed_draws_its_own() {
    let server = server();
    let tokens = json!([0, 1]);
    for (body, answers) in [
        (json!({"prompt": ["ab", "ab", "ab", "ab"]}), 4),
        (json!({"prompt": ["ab", "ab", "ab", "ab"], "n": 2}), 8),
        (json!({"prompt": ["ab", "cd", "ef"], "n": 2}), 6),
        (json!({"prompt": [tokens, tokens, tokens]}), 3),
        (json!({"prompt": "ab", "n": 8}), 8),
        (json!({"prompt": ["ab", "ab"], "seed": null}), 2),
    ] {
        let texts = choices(&server, body.clone());
        assert_eq!((texts.len(), num_different(&texts)), (answers, answers), "{body}: {texts:?}");
    }
}

#[test]
fn a_seed_holds_for_every_prompt_and_every_time() {
    let server = server();
    for seed in [0, 7, -1] {
        let body = json!({"prompt": ["ab", "ab", "ab"], "n": 2, "seed": seed});
        let texts = choices(&server, body.clone());
        assert_eq!((&texts[..2], &texts[..2]), (&texts[2..4], &texts[4..]), "equal prompts, equal draws");
        assert_eq!(num_different(&texts), 2, "the answers to one prompt differ: {texts:?}");
        assert_eq!(choices(&server, body), texts, "seed {seed}");
    }
}

#[test]
fn requests_without_a_seed_differ_on_every_route() {
    let server = server();
    let message = json!([{"role": "user", "content": "ab"}]);
    let routes = [
        ("/v1/completions", json!({"prompt": "ab", "max_tokens": 24, "temperature": 100}), "/choices/0/text"),
        (
            "/v1/chat/completions",
            json!({"messages": message, "max_tokens": 24, "temperature": 100}),
            "/choices/0/message/content",
        ),
        (
            "/v1/responses",
            json!({"input": "ab", "max_output_tokens": 24, "temperature": 2}),
            "/output/0/content/0/text",
        ),
        ("/v1/messages", json!({"messages": message, "max_tokens": 24, "temperature": 1}), "/content/0/text"),
    ];
    for (route, body, place) in routes {
        let texts: Vec<String> = (0..64)
            .map(|_| {
                let (status, answer) = server.post(route, &body);
                assert_eq!(status, 200, "{route}: {answer}");
                answer.pointer(place).and_then(Value::as_str).expect("a text").to_owned()
            })
            .collect();
        // On routes that bound the temperature, most answers are the most likely one.
        assert!(num_different(&texts) > 1, "{route}: 64 times {}", texts[0]);
    }
}
