//! Peak allocation of bodies while they are read: no more than was reserved for them.
//!
//! The one test is alone in its program, since other tests would be counted too.
#![allow(unsafe_code)] // a global allocator that counts

#[path = "../http/harness.rs"]
#[allow(dead_code)]
mod harness;

use std::alloc::{GlobalAlloc, Layout, System};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::Request;
use folio_server::guard::{Guard, GuardConfig, Lifecycle, protect};
use folio_server::{Limits, router};
use harness::{Setup, start_with};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use tower::ServiceExt;

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; only the sizes are noted beside it.
// A block that grows is a new one and a copy, as the trait's own `realloc` has it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), SeqCst) + layout.size();
        MOST.fetch_max(held, SeqCst);
        // SAFETY: the caller's promises are passed on as they are.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller's promises are passed on as they are.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that a body of any length may take besides: an answer, a task, a frame.
const BESIDES: usize = 192 << 10;

/// A body as it comes from a connection: in pieces, with no other copy of the rest.
struct Arriving {
    text: Arc<str>,
    at: usize,
    is_told: bool,
}

impl HttpBody for Arriving {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = &self.text.as_bytes()[self.at..];
        let piece = Bytes::copy_from_slice(&piece[..piece.len().min(16 << 10)]);
        self.at += piece.len();
        Poll::Ready((!piece.is_empty()).then(|| Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        match self.is_told {
            true => SizeHint::with_exact((self.text.len() - self.at) as u64),
            false => SizeHint::default(),
        }
    }
}

/// The shapes that cost most: `(route, body, status)`.
fn bodies(length: usize) -> Vec<(&'static str, String, u16)> {
    let list = |item: &str, most: usize| {
        let count = ((length - 200) / (item.len() + 1)).clamp(1, most);
        format!("[{}]", vec![item; count].join(","))
    };
    let values = 500_000;
    let text = "x".repeat(length - 100);
    let escapes = r"\u00e9".repeat((length - 100) / 6);
    let parts = |kind: &str| list(&format!(r#"{{"type":"{kind}","text":"x"}}"#), 1000);
    let message = |parts: &str| format!(r#"{{"role":"user","content":{parts}}}"#);
    let few = message(&format!("[{}]", vec![r#"{"type":"text","text":"x"}"#; 60].join(",")));
    let names: Vec<String> = (0..(length - 100) / 12).map(|name| format!(r#""n{name}":1"#)).collect();
    let same: Vec<&str> = vec![r#""":1"#; ((length - 100) / 5).min(values)];

    vec![
        ("/v1/completions", format!(r#"{{"prompt":"{text}"}}"#), 400),
        ("/v1/completions", format!(r#"{{"prompt":"{escapes}"}}"#), 400),
        ("/v1/completions", format!(r#"{{"prompt":{}}}"#, list("7", values)), 400),
        ("/v1/completions", format!(r#"{{"prompt":{}}}"#, list("[7]", values / 2)), 400),
        ("/v1/completions", format!(r#"{{"prompt":{}}}"#, list(r#"{"a":1}"#, values / 2)), 400),
        ("/v1/completions", format!(r#"{{"prompt":"a","max_tokens":1{}}}"#, " ".repeat(length - 100)), 200),
        ("/v1/completions", format!("{{{}}}", names.join(",")), 400),
        ("/v1/completions", format!("{{{}}}", same.join(",")), 400),
        ("/v1/completions", format!(r#"{{"prompt":"{text}"#), 400),
        ("/v1/chat/completions", format!(r#"{{"messages":[{}],"x":1}}"#, message(&parts("text"))), 400),
        ("/v1/chat/completions", format!(r#"{{"messages":{},"x":1}}"#, list(&few, 2000)), 400),
        // A short one is answered, and the answer is not to be measured.
        (
            "/v1/chat/completions",
            format!(r#"{{"max_tokens":1,"messages":[{}]}}"#, message(&format!(r#""{text}""#))),
            400,
        ),
        ("/v1/messages", format!(r#"{{"messages":[{}]}}"#, message(&parts("text"))), 400),
        (
            "/v1/responses",
            format!(
                r#"{{"max_output_tokens":16,"input":[{}]}}"#,
                message(&format!(r#"[{{"type":"output_text","text":"a","logprobs":{}}}]"#, list("{}", values / 2)))
            ),
            200,
        ),
        ("/v1/responses", format!(r#"{{"input":"a","metadata":{{"a":{}}}}}"#, list("[]", values / 2)), 400),
        ("/v1/embeddings", format!(r#"{{"input":{},"x":1}}"#, list(r#""a""#, 2048)), 400),
        ("/tokenize", format!(r#"{{"messages":[{}]}}"#, message(&parts("text"))), 0),
    ]
}

#[test]
fn bodies_take_no_more_than_is_set_aside_for_them() {
    // Long strings cannot fit the context, so they are not tokenized: a tokenizer takes memory of
    // its own.
    let server = start_with(Setup { all_bytes: true, max_model_len: 512, ..Setup::default() });
    let lifecycle = Lifecycle::new();
    lifecycle.set_ready();
    let limits = Limits::default();
    let memory = server.app.body_memory();
    let all = memory.free();
    let routes = protect(router(server.app.clone()), Guard::new(GuardConfig::new(lifecycle)));
    // A tokenizer keeps a cache for each thread that runs it, so one thread does all blocking work.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build().expect("a runtime");
    // Once for what is made when it is first needed.
    for (round, length) in
        [1000, 1000, 20 << 10, 60 << 10, 300 << 10, 1 << 20, limits.body_bytes].into_iter().enumerate()
    {
        for (path, body, expected) in bodies(length) {
            let body: Arc<str> = body.into();
            assert!(body.len() <= limits.body_bytes, "{path}: {}", body.len());
            for is_told in [true, false] {
                let arriving = Arriving { text: Arc::clone(&body), at: 0, is_told };
                let request = Request::post(path).header("host", "x").header("content-type", "application/json");
                let request = request.body(Body::new(arriving)).expect("a request");
                let before = HELD.load(SeqCst);
                MOST.store(before, SeqCst);
                let response = runtime.block_on(routes.clone().oneshot(request)).expect("an answer");
                let status = response.status().as_u16();
                let told = runtime.block_on(response.into_body().collect()).expect("a body").to_bytes();
                let taken = MOST.load(SeqCst) - before;
                let what = format!("{path} {:.60}... of {} bytes, told: {is_told}", body, body.len());
                assert!(
                    length < 60 << 10 || expected == 0 || status == expected,
                    "{what}: {status} {:.300}",
                    String::from_utf8_lossy(&told)
                );
                // One that does not tell its length has taken room for the largest.
                let length = if is_told || body.len() <= 64 << 10 { body.len() } else { limits.body_bytes };
                let most = folio_server::BODY_WHILE_READ * length + BESIDES;
                assert!(round == 0 || taken <= most, "{what} takes {taken}, and {most} were set aside");
                drop(told);
                folio_testing::wait::until("the request is over", || memory.free() == all);
            }
        }
    }
}
