//! `folio plan`, and that a server takes what the plan says.

use serde_json::Value;

use crate::server::Server;
use crate::{refusal, stdout};

fn plan(flags: &[&str]) -> Value {
    let text = stdout(&[&["plan", "--json"], flags].concat());
    serde_json::from_str(&text).expect("JSON")
}

fn number(plan: &Value, path: &str) -> u64 {
    plan.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path} is missing: {plan}"))
}

#[test]
fn the_table_adds_up() {
    let text = stdout(&["plan", "--memory", "512MiB"]);
    for part in ["weights", "activations", "working memory", "keys and values", "total", "--memory", "of 4096"] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    let plan = plan(&["--memory", "512MiB", "--kv-host-mib", "16"]);
    let parts = ["weights", "activations", "working", "kv", "host"];
    let sum: u64 = parts.iter().map(|part| number(&plan, &format!("/bytes/{part}"))).sum();
    let block = number(&plan, "/groups/0/block_bytes");
    assert_eq!(number(&plan, "/bytes/total"), sum);
    assert!(sum <= 512 << 20 && sum + block > 512 << 20, "{plan}");
    assert_eq!(number(&plan, "/kv_tokens"), 16 * number(&plan, "/groups/0/blocks"));
    assert_eq!(block, 16 * 6144);
}

#[test]
fn a_context_that_does_not_fit_is_refused_or_shortened() {
    let budget = ["--kv-cache-mib", "12"];
    let text = refusal(&[&["plan"], &budget[..]].concat());
    // 12 MiB are 128 blocks, one of which is kept to spare.
    for part in ["4096 tokens", "24.1 MiB", "--kv-cache-mib", "12.0 MiB", "--max-model-len 2032", "--fit"] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    let fitted = plan(&[&budget[..], &["--fit"]].concat());
    assert_eq!((number(&fitted, "/max_model_len"), number(&fitted, "/shrunk_from")), (2032, 4096));
    let text = refusal(&["plan", "--memory", "30MiB"]);
    assert!(text.contains("30.0 MiB") && text.contains("weights"), "{text}");
    let text = refusal(&["plan", "--memory", "a lot"]);
    assert!(text.contains("--memory"), "{text}");
}

#[test]
fn a_fitted_server_says_so_and_keeps_to_it() {
    let server = Server::start(&["--kv-cache-mib", "2", "--fit", "--max-num-seqs", "2"]);
    let greeting = server.greeting.join("\n");
    for part in ["--fit", "4096", "320 now", "memory plan of folio-rust-42m", "requests at once"] {
        assert!(greeting.contains(part), "{part} is missing:\n{greeting}");
    }
    let ask = |tokens: usize| {
        let body = serde_json::json!({"prompt": vec![5; tokens], "max_tokens": 4, "temperature": 0});
        server.post("/v1/completions", body)
    };
    let (status, answer) = ask(300);
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = ask(320);
    assert_eq!(status, 400, "{answer}");
}
