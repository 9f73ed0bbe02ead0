//! The requests that clients choose from: a few dozen that differ in everything that a server may
//! treat differently.
//!
//! Ten kinds occur in equal numbers, so that a random choice gives 10% of several answers, of
//! logprobs and of stops; 30% share their beginning with others. Each is sent whole and as a
//! stream.

use serde_json::{Value, json};

use crate::answer::Route;

pub const MAX_MODEL_LEN: usize = 512;
const NUM_BASES: usize = 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Plain,
    /// `n` above 1.
    Many,
    Logprobs,
    /// Ends at a stop string taken from its own unstopped answer.
    Stop,
    /// An answer of hundreds of kilobytes, for clients that read slowly or not at all.
    Heavy,
}

#[derive(Clone, Debug)]
pub struct Ask {
    pub route: Route,
    pub kind: Kind,
    pub has_shared_prefix: bool,
    pub is_stream: bool,
    pub body: Value,
}

impl Ask {
    pub fn streamed(&self) -> Self {
        let mut ask = Self { is_stream: true, ..self.clone() };
        ask.body["stream"] = json!(true);
        if matches!(self.route, Route::Chat | Route::Completions) {
            ask.body["stream_options"] = json!({"include_usage": true});
        }
        ask
    }

    /// The request's bytes: header and body.
    pub fn bytes(&self) -> (Vec<u8>, Vec<u8>) {
        let body = self.body.to_string().into_bytes();
        (head(self.route.path(), body.len()), body)
    }
}

pub fn head(path: &str, length: usize) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
    .into_bytes()
}

const SHARED: [&str; 3] = [
    "You are a patient teacher of the Rust programming language. You answer in short sentences, you show one small \
     example for every idea, you never use a crate that is not part of the standard library, and you say so when a \
     question has no good answer. The student knows C and Python, but has not yet written a program of their own that \
     uses lifetimes, traits or threads.",
    "The following is the beginning of a module that reads records from a file. Each record has a name, a number and a \
     list of tags. Errors carry the line they were found in. Nothing is read twice, nothing is kept in memory that is \
     not needed any more, and every function has a comment that says why it is there and what it returns to its caller.",
    "Notes on ownership, taken during a review. A value has one owner. Borrowing lends it without giving it away. A \
     mutable borrow excludes every other. What is moved cannot be used again. A lifetime names how long a borrow may \
     last, and the compiler checks that nothing outlives what it points to. With this in mind, we look at the code.",
];

const TOPICS: [&str; 10] = [
    "What does `Rc::clone` do?",
    "Write a function that reverses a linked list.",
    "Why does the borrow checker refuse two mutable borrows?",
    "impl Iterator for Counter {",
    "How do I read a file line by line?",
    "fn main() {\n    let mut numbers = vec![3, 1, 2];\n",
    "Explain the difference between `String` and `&str`.",
    "use std::collections::HashMap;\n\npub fn count_words(text: &str) ->",
    "When should a function return `Result`?",
    "/// Finds the longest common prefix.\nfn",
];

/// One of each, not yet streamed.
pub fn bases() -> Vec<Ask> {
    (0..NUM_BASES).map(base).collect()
}

fn base(index: usize) -> Ask {
    let round = index / 10;
    let either = if round.is_multiple_of(2) { Route::Chat } else { Route::Completions };
    let (kind, route) = match index % 10 {
        0 => (Kind::Many, either),
        1 => (Kind::Logprobs, either),
        2 => (Kind::Stop, [Route::Chat, Route::Completions, Route::Messages][round % 3]),
        3 | 9 => (Kind::Plain, Route::Chat),
        4..=6 => (Kind::Plain, Route::Completions),
        7 => (Kind::Plain, Route::Responses),
        _ => (Kind::Plain, Route::Messages),
    };
    let has_shared_prefix = (index * 7 + round * 3) % 10 < 3;
    // A few answers are long and outgrow their prompts by far. All start while there is room; later
    // there is none.
    let is_long = index % 4 == 3;
    let max_tokens = if is_long { 240 + index * 29 % 120 } else { 16 + index * 29 % 48 };
    let mut body = prompt(index, route, has_shared_prefix);
    match route {
        Route::Responses => {
            body["max_output_tokens"] = json!(max_tokens);
            body["store"] = json!(round.is_multiple_of(2));
            body["temperature"] = json!(0);
        }
        Route::Messages => {
            body["max_tokens"] = json!(max_tokens);
            body["temperature"] = json!(0);
        }
        Route::Chat | Route::Completions => {
            body["max_tokens"] = json!(max_tokens);
            body["return_token_ids"] = json!(true);
            body["ignore_eos"] = json!(is_long);
            sample(&mut body, index);
        }
    }
    match (kind, route) {
        (Kind::Many, _) => body["n"] = json!(2 + round % 3),
        (Kind::Logprobs, Route::Chat) => {
            body["logprobs"] = json!(true);
            body["top_logprobs"] = json!(1 + round);
        }
        (Kind::Logprobs, _) => body["logprobs"] = json!(1 + round),
        _ => {}
    }
    Ask { route, kind, has_shared_prefix, is_stream: false, body }
}

fn prompt(index: usize, route: Route, has_shared_prefix: bool) -> Value {
    let topic = TOPICS[(index + index / 10) % TOPICS.len()];
    let shared = if has_shared_prefix { SHARED[index % SHARED.len()] } else { "" };
    let text =
        |topic: &str| if shared.is_empty() { format!("{topic} // {index}") } else { format!("{shared}\n\n{topic}") };
    let messages = match (route, has_shared_prefix) {
        (Route::Chat, true) => json!([{"role": "system", "content": shared}, {"role": "user", "content": topic}]),
        _ => json!([{"role": "user", "content": text(topic)}]),
    };
    match (route, index % 10) {
        (Route::Chat | Route::Messages, _) => json!({"messages": messages}),
        (Route::Responses, _) => json!({"input": text(topic)}),
        (Route::Completions, 5) => {
            // Lengths around a block's end.
            let from = if has_shared_prefix { 7 } else { 100 * (index + 1) };
            json!({"prompt": token_ids(from, 30 + index % 5)})
        }
        (Route::Completions, 6) => json!({"prompt": [text(topic), text(TOPICS[index / 10])]}),
        (Route::Completions, _) => json!({"prompt": text(topic)}),
    }
}

fn token_ids(from: usize, count: usize) -> Vec<usize> {
    (0..count).map(|at| 300 + (from + at * 37) % 3000).collect()
}

/// Greedy, or sampled from a seed in one of several ways.
fn sample(body: &mut Value, index: usize) {
    if (index + index / 10).is_multiple_of(2) {
        body["temperature"] = json!(0);
        return;
    }
    body["seed"] = json!(1000 + index);
    body["temperature"] = json!(0.6 + 0.1 * (index % 5) as f64);
    let (field, value) = [
        ("top_p", json!(0.9)),
        ("top_k", json!(40)),
        ("min_p", json!(0.05)),
        ("repetition_penalty", json!(1.1)),
        ("presence_penalty", json!(0.5)),
    ][index / 2 % 5]
        .clone();
    body[field] = value;
}

/// Their answers are larger than all buffers between the engine and a client that does not read.
pub fn heavy() -> Ask {
    let body = json!({
        "prompt": token_ids(9, 400), "prompt_logprobs": 20, "max_tokens": 4, "temperature": 0, "return_token_ids": true,
    });
    Ask { route: Route::Completions, kind: Kind::Heavy, has_shared_prefix: false, is_stream: false, body }
}

/// Requests that must be refused, and the expected status.
pub struct Malformed {
    pub name: &'static str,
    pub bytes: Vec<u8>,
    pub status: u16,
}

pub fn malformed(routes: &[Route]) -> Vec<Malformed> {
    let mut all = Vec::new();
    let raw = |name, text: &str, status| Malformed { name, bytes: text.as_bytes().to_vec(), status };
    all.push(raw("unknown route", "GET /v1/nothing HTTP/1.1\r\nhost: localhost\r\n\r\n", 404));
    all.push(raw("no HTTP", "\u{1}\u{2}\u{3} what?\r\n\r\n", 400));
    let too_large = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: \
                     99999999\r\n\r\n";
    all.push(raw("body too large", too_large, 413));
    let no_json = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: \
                   2\r\n\r\n{}";
    all.push(raw("not said to be JSON", no_json, 415));
    for &route in routes {
        let path = route.path();
        let mut post = |name, body: String, status| {
            let bytes = [head(path, body.len()), body.into_bytes()].concat();
            all.push(Malformed { name, bytes, status });
        };
        let (field, limit) = match route {
            Route::Completions => ("prompt", "max_tokens"),
            Route::Chat => ("messages", "max_tokens"),
            Route::Responses => ("input", "max_output_tokens"),
            Route::Messages => ("messages", "max_tokens"),
        };
        post("bad JSON", "{\"model\": ".into(), 400);
        post("nested too deep", "[".repeat(100_000), 400);
        post("wrong type", json!({field: {"a": 1}, limit: 4}).to_string(), 400);
        let with = |name: &str, value: Value| {
            let mut body = prompt(4, route, false);
            body[limit] = json!(4);
            body[name] = value;
            body.to_string()
        };
        post("bad field", with("no_such_field", json!(1)), 400);
        post("bad value", with("temperature", json!(-1)), 400);
        post("wrong type of value", with("stream", json!("yes")), 400);
        post("unknown model", with("model", json!("another")), 404);
        let long = "fn ".repeat(3 * MAX_MODEL_LEN);
        let long = match field {
            "messages" => json!([{"role": "user", "content": long}]),
            _ => json!(long),
        };
        post("too long", with(field, long), 400);
        all.push(raw("wrong method", &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n"), 405));
    }
    all
}
