//! `folio plan`, and a check that a server takes no more memory than planned.

use std::time::{Duration, Instant};

use folio_testing::http::exchange;
use serde_json::Value;

use crate::server::Server;
use crate::{output, refusal, stdout};

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
    let parts = ["weights", "activations", "working", "kv", "host", "bodies"];
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
    // 12 MiB are 128 blocks; one of them stays spare.
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

/// Commands that a page shows, each with its output, word by word: the page breaks lines
/// differently.
fn examples(page: &str) -> Vec<(Vec<&str>, Vec<&str>)> {
    let mut found: Vec<(Vec<&str>, Vec<&str>)> = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        if let Some(command) = line.strip_prefix("    $ folio ") {
            inside = true;
            found.push((command.split_whitespace().collect(), Vec::new()));
        } else if let Some((_, printed)) = found.last_mut().filter(|_| inside && line.starts_with("    ")) {
            printed.extend(line.split_whitespace());
        } else {
            inside = false;
        }
    }
    found
}

/// If this fails after a change to the plan, change the page too.
#[test]
fn the_examples_of_its_page_are_true() {
    let examples = examples(include_str!("../../docs/memory.md"));
    assert_eq!(examples.len(), 2, "{examples:?}");
    for (command, expect) in examples {
        let run = output(&command);
        let printed = String::from_utf8([run.stdout, run.stderr].concat()).expect("UTF-8");
        let found: Vec<&str> = printed.split_whitespace().collect();
        assert_eq!(found, expect, "docs/memory.md shows something else for folio {}:\n{printed}", command.join(" "));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_named_size_that_is_not_there_is_refused_and_can_be_planned() {
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("the system tells");
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("how much there is");
    let total_kib: u64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
    let [memory, kv_mib, host_mib] = [total_kib * 1024 * 2, total_kib / 512, total_kib / 512].map(|n| n.to_string());
    for flags in [["--memory", memory.as_str()], ["--kv-cache-mib", &kv_mib]] {
        for command in [&["serve", "--port", "0"][..], &["run", "-p", "a"]] {
            let text = refusal(&[command, &flags].concat());
            for part in [flags[0], "has", "GiB left", "--memory-unchecked", "--memory-fraction"] {
                assert!(text.contains(part), "{command:?} {flags:?}: {part} is missing: {text}");
            }
        }
        let text = stdout(&[&["plan"], &flags[..]].concat());
        assert!(text.contains("WARNING: the plan takes") && text.contains("requests at once"), "{text}");
        let (planned, there) = (number(&plan(&flags), "/excess/planned"), number(&plan(&flags), "/excess/available"));
        assert!(planned > there && there <= total_kib * 1024, "{planned} {there}");
    }
    let text = refusal(&["serve", "--port", "0", "--kv-cache-mib", "64", "--kv-host-mib", &host_mib]);
    assert!(text.contains("--memory-unchecked"), "{text}");
    assert!(plan(&["--memory", "512MiB"])["excess"].is_null());
}

/// Connections at a time.
const CLIENTS: usize = 250;
/// Most of the sent bytes that may still be held, in KiB.
const LEFT_KIB: u64 = 8 << 10;

/// Three bodies of nearly 4 MiB that are refused after they have been read.
fn refused_bodies() -> [(&'static str, String); 3] {
    let part = r#"{"type":"text","text":"x"}"#;
    let message = format!(r#"{{"role":"user","content":[{}]}}"#, vec![part; 60].join(","));
    [
        ("/v1/completions", format!(r#"{{"prompt":"{}"}}"#, "fn x ".repeat(830_000))),
        ("/v1/completions", format!(r#"{{"prompt":[{}]}}"#, vec!["1234567"; 520_000].join(","))),
        ("/v1/chat/completions", format!(r#"{{"messages":[{}]}}"#, vec![message; 2000].join(","))),
    ]
}

#[cfg(target_os = "linux")]
#[test]
fn many_large_bodies_stay_within_the_plan_and_their_memory_goes_back() {
    let flags = ["--memory", "200MiB"];
    let planned_kib = number(&plan(&flags), "/bytes/total") >> 10;
    let server = Server::start(&flags);
    for _ in 0..4 {
        let (status, answer) =
            server.post("/v1/completions", serde_json::json!({"prompt": "fn main", "max_tokens": 4}));
        assert_eq!(status, 200, "{answer}");
    }
    let before = server.anonymous_kib();
    let bodies = refused_bodies();
    let (mut peak, mut statuses) = (0, Vec::new());
    std::thread::scope(|scope| {
        let ask = |client: usize| {
            let (path, body) = &bodies[client % bodies.len()];
            // A client that is refused while it still sends may find the connection closed.
            exchange(server.port, "POST", path, "", body.as_bytes()).ok().map(|reply| reply.status)
        };
        let clients: Vec<_> = (0..CLIENTS).map(|client| scope.spawn(move || ask(client))).collect();
        while !clients.iter().all(|client| client.is_finished()) {
            peak = peak.max(server.anonymous_kib());
            std::thread::yield_now();
        }
        statuses.extend(clients.into_iter().map(|client| client.join().expect("no panic")));
    });
    let count = |status: u16| statuses.iter().filter(|found| **found == Some(status)).count();
    let (refused, sent_away) = (count(400), count(429));
    assert!(
        refused > 3 && refused + sent_away > CLIENTS / 2,
        "{refused} refused, {sent_away} to come back: {statuses:?}"
    );
    let most = planned_kib + planned_kib / 20;
    assert!(peak <= most, "{peak} KiB were taken, but {planned_kib} were planned; {before} before");
    let begin = Instant::now();
    while server.anonymous_kib() > before + LEFT_KIB {
        let left = server.anonymous_kib();
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "{left} KiB are kept, but {before} were taken before; {peak} at most"
        );
        std::thread::yield_now();
    }
}
