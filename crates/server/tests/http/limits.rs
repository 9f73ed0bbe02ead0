//! Each limit on what a request may hold: at it, the request passes, or fails at the next check;
//! one beyond, it is refused.

use std::io::Write;
use std::net::TcpStream;

use folio_server::{Limits, Timeouts};
use serde_json::{Value, json};

use crate::harness::{Server, Setup, read_answer, start_with};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn server(max_seqs: usize) -> Server {
    start_with(Setup { all_bytes: true, max_seqs, ..Setup::default() })
}

fn completion(more: Value) -> Value {
    with(json!({"prompt": "a", "max_tokens": 1}), more)
}

fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}), more)
}

fn with(mut body: Value, more: Value) -> Value {
    for (name, value) in more.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    body
}

fn passes(server: &Server, path: &str, body: &Value) {
    let (status, answer) = server.post(path, body);
    assert_eq!(status, 200, "{path}: {answer}");
}

/// Refused with a message that begins like this: the field, and what it must be.
fn refused(server: &Server, path: &str, body: &Value, expected: &str) {
    let (status, answer) = server.post(path, body);
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 400 && message.starts_with(expected), "{path}: {status} {message}, not {expected}");
}

#[test]
fn the_defaults_are_as_promised() {
    let limits = Limits::default();
    assert_eq!((limits.body_bytes, limits.json_depth, limits.json_values), (4 << 20, 64, 1 << 19));
    assert_eq!((limits.header_bytes, limits.header_fields), (32 << 10, 64));
    assert_eq!((limits.prompts, limits.samples, limits.embedding_inputs), (64, 16, 2048));
    assert_eq!((limits.stops, limits.stop_chars, limits.stop_token_ids), (4, 256, 64));
    assert_eq!((limits.bad_words, limits.bad_word_tokens), (128, 1024));
    assert_eq!((limits.logit_biases, limits.logprobs, limits.messages), (1024, 20, 2048));
    assert_eq!(limits.prompt_logprob_values, 1 << 18);
    assert_eq!((limits.template_kwargs, limits.template_kwarg_bytes), (16, 4 << 10));
    assert_eq!((limits.connections, limits.in_flight, limits.stream_bytes), (1024, 256, 256 << 10));
    assert_eq!((limits.request_id_bytes, limits.cache_salt_bytes, limits.user_chars), (128, 64, 512));
    let times = Timeouts::default();
    let seconds = [
        times.header,
        times.body,
        times.queue.duration(),
        times.write_stall,
        times.request.duration(),
        times.idle,
        times.drain,
    ];
    assert_eq!(seconds.map(|time| time.as_secs()), [10, 30, 60, 30, 600, 75, 30]);
}

#[test]
fn bytes_of_a_body() {
    let server = server(4);
    let body = |bytes: usize| {
        let fine = completion(json!({})).to_string();
        format!("{fine}{}", " ".repeat(bytes - fine.len()))
    };
    let most = 4 << 20;
    assert_eq!(server.raw("POST", COMPLETIONS, body(most).as_bytes()).0, 200);
    assert_eq!(server.raw("POST", COMPLETIONS, body(most + 1).as_bytes()).0, 413);
    // A chunked body does not declare its length.
    let chunked = |bytes: usize| {
        let mut socket = TcpStream::connect(server.address).expect("it listens");
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
                    transfer-encoding: chunked\r\n\r\n";
        let _ = write!(socket, "{head}{bytes:x}\r\n{}\r\n0\r\n\r\n", body(bytes));
        read_answer(&mut socket)
    };
    assert_eq!(chunked(most).0, 200);
    let (status, _, answer) = chunked(most + 1);
    assert!(status == 413 && answer.contains("larger than 4194304 bytes"), "{status} {answer}");
    let small = start_with(Setup { limits: Limits { body_bytes: 100, ..Limits::default() }, ..Setup::default() });
    assert_eq!(small.raw("POST", COMPLETIONS, body(100).as_bytes()).0, 200);
    assert_eq!(small.raw("POST", COMPLETIONS, body(101).as_bytes()).0, 413);
}

#[test]
fn brackets_within_brackets() {
    let server = server(4);
    // The object itself is one level.
    let deep = |levels: usize| format!("{{\"x\":{}{}}}", "[".repeat(levels - 1), "]".repeat(levels - 1));
    let message = |levels: usize| server.raw("POST", CHAT, deep(levels).as_bytes());
    let (status, answer) = message(64);
    assert!(status == 400 && !answer.contains("nests"), "{status} {answer}");
    let (status, answer) = message(65);
    assert!(status == 400 && answer.contains("nests deeper than 64 levels"), "{status} {answer}");
}

#[test]
fn values_of_a_body() {
    let server = start_with(Setup { limits: Limits { json_values: 9, ..Limits::default() }, ..Setup::default() });
    // Besides the list's own: the body, and the list as a value of it.
    let list = |values: usize| server.raw("POST", CHAT, json!({"x": vec![0; values]}).to_string().as_bytes());
    let (status, answer) = list(7);
    assert!(status == 400 && answer.contains("messages: this field is required"), "{status} {answer}");
    let (status, answer) = list(8);
    assert!(status == 400 && answer.contains("more than 9 values"), "{status} {answer}");
}

#[test]
fn bytes_and_fields_of_a_header() {
    let server = server(4);
    let ask = |request: String| {
        let mut socket = TcpStream::connect(server.address).expect("it listens");
        socket.write_all(request.as_bytes()).expect("it reads");
        read_answer(&mut socket).0
    };
    let (before, after) = ("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: ", "\r\n\r\n");
    let of_bytes = |bytes: usize| format!("{before}{}{after}", "y".repeat(bytes - before.len() - after.len()));
    assert_eq!([ask(of_bytes(32 << 10)), ask(of_bytes((32 << 10) + 1))], [200, 431]);
    let of_fields = |fields: usize| {
        let more: String = (2..fields).map(|number| format!("x{number}: y\r\n")).collect();
        format!("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{more}\r\n")
    };
    assert_eq!([ask(of_fields(64)), ask(of_fields(65))], [200, 431]);
}

#[test]
fn prompts_and_answers() {
    let many = server(64);
    passes(&many, COMPLETIONS, &completion(json!({"prompt": vec!["a"; 64]})));
    refused(&many, COMPLETIONS, &completion(json!({"prompt": vec!["a"; 65]})), "prompt: must be at most 64 strings");
    for (path, body) in [(COMPLETIONS, completion(json!({}))), (CHAT, chat(json!({})))] {
        passes(&many, path, &with(body.clone(), json!({"n": 16})));
        refused(&many, path, &with(body, json!({"n": 17})), "n: must be an integer from 1 to 16");
    }
    // All answers of one request run side by side.
    let few = server(6);
    passes(&few, COMPLETIONS, &completion(json!({"prompt": ["a", "b"], "n": 3})));
    refused(
        &few,
        COMPLETIONS,
        &completion(json!({"prompt": ["a", "b"], "n": 4})),
        "n: 8 answers requested, but at most 6 can run at once",
    );
    // Inputs wait for each other.
    passes(&few, "/v1/embeddings", &json!({"input": vec!["a"; 2048]}));
    refused(
        &few,
        "/v1/embeddings",
        &json!({"input": vec!["a"; 2049]}),
        "input: must be at most 2048 strings or arrays of token ids",
    );
}

#[test]
fn tokens_of_a_prompt() {
    let server = server(4);
    passes(&server, COMPLETIONS, &completion(json!({"prompt": vec![0; 4095]})));
    passes(&server, COMPLETIONS, &completion(json!({"prompt": "a".repeat(4095)})));
    for prompt in [json!(vec![0; 4096]), json!("a".repeat(4096)), json!("a".repeat(1 << 20))] {
        let (status, answer) = server.post(COMPLETIONS, &completion(json!({"prompt": prompt})));
        assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")), "{answer}");
    }
    passes(&server, COMPLETIONS, &completion(json!({"prompt": vec![0; 5000], "truncate_prompt_tokens": 4095})));
    let beyond = completion(json!({"prompt": [0], "truncate_prompt_tokens": 4096}));
    refused(&server, COMPLETIONS, &beyond, "truncate_prompt_tokens: must be an integer from 1 to 4095");
}

#[test]
fn what_ends_an_answer() {
    let server = server(4);
    for (path, body) in [(COMPLETIONS, completion(json!({}))), (CHAT, chat(json!({})))] {
        let with = |more: Value| with(body.clone(), more);
        passes(&server, path, &with(json!({"stop": ["w", "x", "y", "z"]})));
        refused(&server, path, &with(json!({"stop": ["v", "w", "x", "y", "z"]})), "stop: must be an array of 0 to 4");
        passes(&server, path, &with(json!({"stop": ["s".repeat(256)]})));
        refused(&server, path, &with(json!({"stop": ["s".repeat(257)]})), "stop[0]: must have 1 to 256");
        passes(&server, path, &with(json!({"stop_token_ids": vec![9; 64]})));
        refused(
            &server,
            path,
            &with(json!({"stop_token_ids": vec![9; 65]})),
            "stop_token_ids: must be an array of 0 to 64",
        );
    }
    let messages = |more: Value| chat(more);
    passes(&server, "/v1/messages", &messages(json!({"stop_sequences": ["w", "x", "y", "z"]})));
    let five = messages(json!({"stop_sequences": ["v", "w", "x", "y", "z"]}));
    refused(&server, "/v1/messages", &five, "stop_sequences: must be an array of 0 to 4");
}

#[test]
fn words_that_are_not_said() {
    let server = server(4);
    let word = |number: usize| format!("{}{}", letter(number / 26), letter(number % 26));
    let words = |count: usize| completion(json!({"bad_words": (0..count).map(word).collect::<Vec<_>>()}));
    passes(&server, COMPLETIONS, &words(128));
    refused(&server, COMPLETIONS, &words(129), "bad_words: must be an array of 0 to 128");
    passes(&server, COMPLETIONS, &completion(json!({"bad_words": ["z".repeat(256)]})));
    refused(&server, COMPLETIONS, &completion(json!({"bad_words": ["z".repeat(257)]})), "bad_words[0]: must have 1 to");
    // Their tokens count together. A word that begins with a space stands for itself alone.
    let sized = |server: &Server, tokens: usize| {
        let whole = (0..tokens / 256).map(|number| format!(" {number:0>255}"));
        let rest = (!tokens.is_multiple_of(256)).then(|| format!(" {}", "z".repeat(tokens % 256 - 1)));
        server.post(COMPLETIONS, &completion(json!({"bad_words": whole.chain(rest).collect::<Vec<_>>()})))
    };
    let (status, answer) = sized(&server, 1024);
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = sized(&server, 1026);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("bad_words")), "{answer}");
    let limits = Limits { bad_word_tokens: 10, ..Limits::default() };
    let strict = start_with(Setup { all_bytes: true, limits, ..Setup::default() });
    assert_eq!([sized(&strict, 10).0, sized(&strict, 11).0], [200, 400]);
}

fn letter(number: usize) -> char {
    char::from(b'a' + number as u8)
}

#[test]
fn biases_and_logprobs() {
    let server = server(4);
    let biases =
        |count: usize| (0..count).map(|token| (token.to_string(), json!(1))).collect::<serde_json::Map<_, _>>();
    for (path, body) in [(COMPLETIONS, completion(json!({}))), (CHAT, chat(json!({})))] {
        let bias = |count: usize| with(body.clone(), json!({"logit_bias": biases(count)}));
        passes(&server, path, &bias(257));
        // More than the model has tokens, but not more than may be named.
        refused(&server, path, &bias(1024), "logit_bias: must have keys that are token ids below 257");
        refused(&server, path, &bias(1025), "logit_bias: must have at most 1024 tokens");
        passes(&server, path, &with(body.clone(), json!({"prompt_logprobs": 20})));
        let beyond = with(body.clone(), json!({"prompt_logprobs": 21}));
        refused(&server, path, &beyond, "prompt_logprobs: must be an integer from 0 to 20");
    }
    passes(&server, COMPLETIONS, &completion(json!({"logprobs": 20})));
    refused(&server, COMPLETIONS, &completion(json!({"logprobs": 21})), "logprobs: must be an integer from 0 to 20");
    passes(&server, CHAT, &chat(json!({"logprobs": true, "top_logprobs": 20})));
    refused(&server, CHAT, &chat(json!({"logprobs": true, "top_logprobs": 21})), "top_logprobs: must be");
    let bias = |value: f64| completion(json!({"logit_bias": {"1": value}}));
    [100.0, -100.0].into_iter().for_each(|value| passes(&server, COMPLETIONS, &bias(value)));
    [100.1, -100.1].into_iter().for_each(|value| refused(&server, COMPLETIONS, &bias(value), "logit_bias.1: must be"));
}

#[test]
fn logprobs_of_a_prompt_all_together() {
    let limits = Limits { prompt_logprob_values: 20, ..Limits::default() };
    let server = start_with(Setup { all_bytes: true, limits, ..Setup::default() });
    // Each token's own, and one more beside it, for each answer.
    let told = |prompt: &str, n: usize| completion(json!({"prompt": prompt, "prompt_logprobs": 1, "n": n}));
    passes(&server, COMPLETIONS, &told("abcdefghij", 1));
    refused(&server, COMPLETIONS, &told("abcdefghijk", 1), "prompt_logprobs: 22 log-probabilities");
    passes(&server, COMPLETIONS, &told("abcde", 2));
    refused(&server, COMPLETIONS, &told("abcdef", 2), "prompt_logprobs: 24 log-probabilities");
}

#[test]
fn messages_and_variables_of_a_template() {
    let server = server(4);
    let messages = |count: usize| chat(json!({"messages": vec![json!({"role": "user", "content": "a"}); count]}));
    let said = |count: usize| messages(count)["messages"].clone();
    passes(&server, CHAT, &messages(2048));
    refused(&server, CHAT, &messages(2049), "messages: must be an array of 1 to 2048");
    passes(&server, "/v1/messages", &messages(2048));
    refused(&server, "/v1/messages", &messages(2049), "messages: must be an array of 1 to 2048");
    passes(&server, "/v1/responses", &json!({"input": said(2048), "max_output_tokens": 1}));
    refused(&server, "/v1/responses", &json!({"input": said(2049)}), "input: must be an array of 1 to 2048");
    let variables = |count: usize| {
        let names: serde_json::Map<_, _> = (0..count).map(|number| (format!("v{number}"), json!(1))).collect();
        chat(json!({"chat_template_kwargs": names}))
    };
    passes(&server, CHAT, &variables(16));
    refused(&server, CHAT, &variables(17), "chat_template_kwargs: must have at most 16 fields");
    // Bytes of keys and values together.
    let sized = |bytes: usize| chat(json!({"chat_template_kwargs": {"v": "x".repeat(bytes - 1)}}));
    passes(&server, CHAT, &sized(4096));
    refused(&server, CHAT, &sized(4097), "chat_template_kwargs: must have at most 4096 bytes");
}

#[test]
fn texts_that_are_only_compared() {
    let server = server(4);
    for (path, body) in [
        (COMPLETIONS, completion(json!({}))),
        (CHAT, chat(json!({}))),
        ("/v1/responses", json!({"input": "a", "max_output_tokens": 1})),
    ] {
        for (field, most) in [("cache_salt", 64), ("user", 512), ("request_id", 128), ("safety_identifier", 512)] {
            let sized = |length: usize| with(body.clone(), json!({field: "s".repeat(length)}));
            passes(&server, path, &sized(most));
            refused(&server, path, &sized(most + 1), &format!("{field}: must "));
        }
    }
    // A client's own name for its request comes back, unless it is too long: then ours does.
    let echoed = |length: usize| {
        let field = format!("x-request-id: {}\r\n", "i".repeat(length));
        let (status, head, _) = read_answer(&mut server.open_with(&field, "GET", "/health", b""));
        assert_eq!(status, 200);
        head.contains(&"i".repeat(length))
    };
    assert_eq!([echoed(128), echoed(129)], [true, false]);
}

#[test]
fn responses_that_are_kept() {
    let kept = |limits: Limits, count: usize| -> Vec<u16> {
        let server = start_with(Setup { all_bytes: true, limits, ..Setup::default() });
        let create = |_| {
            let (status, answer) = server.post("/v1/responses", &json!({"input": "a", "max_output_tokens": 1}));
            assert_eq!(status, 200, "{answer}");
            answer["id"].as_str().expect("an id").to_owned()
        };
        let ids: Vec<String> = (0..count).map(create).collect();
        ids.iter().map(|id| server.raw("GET", &format!("/v1/responses/{id}"), b"").0).collect()
    };
    let few = Limits { stored_responses: 2, ..Limits::default() };
    assert_eq!(kept(few.clone(), 2), [200, 200]);
    assert_eq!(kept(few, 3), [404, 200, 200]);
    // Two of them fit into this many bytes, three do not.
    let bytes = kept_bytes();
    let small = Limits { stored_response_bytes: bytes * 5 / 2, ..Limits::default() };
    assert_eq!(kept(small, 3), [404, 200, 200]);
    let none = Limits { stored_response_bytes: bytes / 2, ..Limits::default() };
    assert_eq!(kept(none, 1), [404]);
}

/// Bytes of one of them: the fewest that store it, give or take a few.
fn kept_bytes() -> usize {
    let is_kept = |bytes: usize| {
        let limits = Limits { stored_response_bytes: bytes, ..Limits::default() };
        let server = start_with(Setup { all_bytes: true, limits, ..Setup::default() });
        let (_, answer) = server.post("/v1/responses", &json!({"input": "a", "max_output_tokens": 1}));
        server.raw("GET", &format!("/v1/responses/{}", answer["id"].as_str().expect("an id")), b"").0 == 200
    };
    (1..).map(|step| step * 256).find(|bytes| is_kept(*bytes)).expect("some number is enough")
}
