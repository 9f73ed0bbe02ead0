//! Fixed work of the code around the model, whose instructions `cargo xtask gates` counts:
//! `instructions PART WORK`. [`counted`] runs the counted part on its own thread; work before and
//! between is not counted. Prints the number of operations.

#[path = "../tests/http/harness.rs"]
#[allow(dead_code)]
mod harness;

use std::hint::black_box;
use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use folio_engine::{SamplingParams, SamplingState};
use folio_scheduler::{Assignment, NewRequest, RequestId, RowResult, Scheduler, SchedulerConfig};
use folio_server::guard::{Guard, GuardConfig, Lifecycle, protect};
use folio_server::router;
use folio_testing::{Rng, wait::until};
use folio_text::{Detokenizer, StopMatcher};
use harness::{Setup, start_with, token_of};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

const VOCAB: usize = 8192;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let operations = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["scheduler", "decode"] => decode(),
        ["scheduler", "arrivals"] => arrivals(),
        ["sampler", "greedy"] => sample(SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
        ["sampler", "drawn"] => sample(SamplingParams {
            seed: 7,
            temperature: 0.8,
            top_k: Some(50),
            top_p: 0.9,
            min_p: 0.01,
            presence_penalty: 0.5,
            repetition_penalty: 1.1,
            logprobs: Some(5),
            ..SamplingParams::default()
        }),
        ["detokenizer", "stops"] => detokenize(),
        ["server", "stream"] => stream(),
        ["server", "chat"] => chat(),
        _ => {
            eprintln!(
                "expected one of: scheduler decode|arrivals, sampler greedy|drawn, detokenizer stops, server stream|chat"
            );
            std::process::exit(2);
        }
    };
    println!("{operations}");
}

#[inline(never)]
fn counted<T>(work: impl FnOnce() -> T) -> T {
    black_box(work())
}

/// A scheduler whose steps are done as soon as they are planned.
struct Steps {
    scheduler: Scheduler,
    now: u64,
    /// Requests end at this length.
    max_len: usize,
}

impl Steps {
    fn new(max_seqs: usize, max_len: usize) -> Self {
        let config = SchedulerConfig { budget_tokens: 2048, max_seqs, ..SchedulerConfig::new(vec![4096]) };
        Self { scheduler: Scheduler::new(config).expect("a sound configuration"), now: 0, max_len }
    }

    fn add(&mut self, id: u64, prompt: impl Iterator<Item = u64>) {
        let prompt = prompt.map(|token| (token % VOCAB as u64) as u32).collect();
        let request = NewRequest::new(RequestId(id), prompt, self.max_len);
        self.scheduler.add(request, self.now).expect("a sound request");
    }

    /// How many requests the step had.
    fn step(&mut self) -> usize {
        self.now += 1_000_000;
        let plan = self.scheduler.schedule(self.now);
        if plan.assignments.is_empty() {
            return 0;
        }
        let result = |a: &Assignment| RowResult {
            id: a.id,
            accepted: Vec::new(),
            token: a.samples.then_some((a.first as u32).wrapping_mul(31) % VOCAB as u32),
        };
        let results: Vec<RowResult> = plan.assignments.iter().map(result).collect();
        self.scheduler.commit(&results, 1_000_000);
        for a in plan.assignments.iter().filter(|a| a.samples && a.first + a.num_rows() + 1 == self.max_len) {
            self.scheduler.finish(a.id).expect("it was in the plan");
        }
        results.len()
    }
}

/// Requests that all decode: rows.
fn decode() -> usize {
    const RUNNING: usize = 64;
    let mut steps = Steps::new(RUNNING, 512);
    (0..RUNNING as u64).for_each(|id| steps.add(id, (0..64).map(|i| id * 40_503 + i * 7)));
    while steps.step() != RUNNING || steps.scheduler.stats().waiting > 0 {}
    let rows = counted(|| (0..256).map(|_| steps.step()).sum());
    assert_eq!(rows, 256 * RUNNING, "all decoded all the time");
    rows
}

/// Requests that come, share the beginning of their prompts with one of eight others, answer
/// shortly and go: requests.
fn arrivals() -> usize {
    const REQUESTS: u64 = 512;
    let mut steps = Steps::new(32, 104);
    counted(|| {
        for id in 0..REQUESTS {
            steps.add(id, (0..96).map(|i| if i < 64 { id % 8 * 977 + i } else { id * 31 + i }));
            steps.step();
        }
        while steps.step() > 0 {}
    });
    assert!(!steps.scheduler.has_work(), "all have gone");
    REQUESTS as usize
}

/// Tokens.
fn sample(params: SamplingParams) -> usize {
    const TOKENS: usize = 64;
    let mut rng = Rng::new(0);
    let rows: Vec<Vec<f32>> =
        (0..TOKENS).map(|_| (0..VOCAB).map(|_| rng.below(4096) as f32 / 256.0).collect()).collect();
    let mut state = SamplingState::new(Arc::new(params), &[1, 2, 3], &[0], 0);
    counted(|| {
        for (position, mut logits) in rows.into_iter().enumerate() {
            let sampled = state.sample(&mut logits, position).expect("finite logits");
            state.observe(black_box(sampled).token);
        }
    });
    TOKENS
}

/// Tokens of characters that have one to three tokens each.
fn detokenize() -> usize {
    let server = start_with(Setup { all_bytes: true, ..Setup::default() });
    let tokenizer = &server.app.service().expect("a model").model.tokenizer;
    let text = "fn größe(πλάτος: f32) -> f32 { 漢字 }\n".repeat(64);
    let tokens: Vec<u32> = text.bytes().map(token_of).collect();
    let (mut pieces, mut stops) = (
        Detokenizer::continuing(Arc::clone(tokenizer), true),
        StopMatcher::new(vec!["fn größe(\n".into(), "}\n\n".into(), "<|end|>".into()], false),
    );
    let shown = counted(|| {
        let mut shown = String::new();
        for &token in &tokens {
            shown.push_str(&stops.push(&pieces.push(token)).0);
        }
        shown.push_str(&stops.push(&pieces.finish()).0);
        shown.push_str(&stops.finish().0);
        shown
    });
    assert_eq!(shown, text);
    tokens.len()
}

/// Streamed tokens.
fn stream() -> usize {
    const TOKENS: usize = 128;
    let body = json!({"prompt": [0, 1, 2, 3], "max_tokens": TOKENS, "stream": true, "logprobs": 2, "seed": 7});
    answer("/v1/completions", &body, b"data: [DONE]\n\n") * TOKENS
}

/// Requests of many words, each answered by one token.
fn chat() -> usize {
    let content = "Größe und \u{1f980}, twice. ".repeat(16);
    let message = |role: &str| json!({"role": role, "content": content});
    let messages = ["user", "assistant", "user", "assistant", "user"].map(message);
    answer("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 1}), b"}")
}

/// Cost of requests before the engine has them and, once it is done, so that nothing waits, of
/// their answers.
fn answer(path: &str, body: &Value, end: &[u8]) -> usize {
    const REQUESTS: usize = 16;
    let server = start_with(Setup { all_bytes: true, ..Setup::default() });
    let lifecycle = Lifecycle::new();
    lifecycle.set_ready();
    let routes = protect(router(server.app.clone()), Guard::new(GuardConfig::new(lifecycle)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    for _ in 0..REQUESTS {
        let request = Request::post(path).header("host", "x").header("content-type", "application/json");
        let request = request.body(Body::from(body.to_string())).expect("a request");
        let response = counted(|| runtime.block_on(routes.clone().oneshot(request))).expect("an answer");
        let status = response.status();
        until("the engine is done", || server.engine.num_live() == 0);
        let text = counted(|| runtime.block_on(response.into_body().collect())).expect("a body").to_bytes();
        assert!(status.is_success() && text.ends_with(end), "{}", String::from_utf8_lossy(&text));
    }
    REQUESTS
}
