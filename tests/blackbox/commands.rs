//! The commands that answer and measure.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

use serde_json::Value;

use crate::{folio, scratch, stdout};

/// transformers' answers on the same weights: the built-in model's, decoded from its own format.
fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/default-model.json")).expect("the golden is JSON")
}

#[test]
fn run_answers_as_transformers_does() {
    let golden = golden();
    for case in golden["cases"].as_array().expect("cases") {
        let question = case["question"].as_str().expect("a question");
        let tokens = case["max_tokens"].as_u64().expect("a length").to_string();
        let answer = stdout(&["run", "-p", question, "-n", &tokens, "--temperature", "0"]);
        assert_eq!(answer.trim_end(), case["answer"].as_str().expect("an answer").trim_end(), "{question}");
    }
}

#[test]
fn a_seed_repeats_a_sampled_answer() {
    let ask = |seed: &str| {
        stdout(&["run", "-p", "What is a trait?", "-n", "24", "--temperature", "1", "--top-p", "0.9", "--seed", seed])
    };
    assert_eq!(ask("7"), ask("7"));
    assert_ne!(ask("7"), ask("8"));
}

#[test]
fn the_answer_is_the_same_with_any_threads_and_chunks() {
    let question = "How do I use `HashMap::entry`?";
    let plain = stdout(&["run", "-p", question, "-n", "24", "--temperature", "0"]);
    for flags in [["--threads", "1"], ["--threads", "3"], ["--max-num-batched-tokens", "5"]] {
        assert_eq!(
            stdout(&[&["run", "-p", question, "-n", "24", "--temperature", "0"][..], &flags[..]].concat()),
            plain,
            "{flags:?}"
        );
    }
}

#[test]
fn a_chat_remembers_and_starts_anew() {
    let mut child = folio(&["run", "-n", "12", "--temperature", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut input = child.stdin.take().expect("stdin");
    input.write_all(b"What is `Vec`?\nWhat is `Vec`?\n/new\nWhat is `Vec`?\n/exit\n").expect("the chat reads");
    drop(input);
    let mut text = String::new();
    child.stdout.take().expect("stdout").read_to_string(&mut text).expect("UTF-8");
    assert!(child.wait().expect("it ends").success());
    let first = stdout(&["run", "-p", "What is `Vec`?", "-n", "12", "--temperature", "0"]);
    assert!(text.starts_with(&first), "the first turn is the one-shot answer:\n{text}");
    assert!(text.ends_with(&first), "after /new the history is gone:\n{text}");
    assert!(text.len() > 2 * first.len(), "three answers were given:\n{text}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    let mut child = folio(&["run", "--raw", "-n", "3000"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut input = child.stdin.take().expect("stdin");
    let mut answers = BufReader::new(child.stdout.take().expect("stdout"));
    input.write_all(b"fn main() {\n").expect("the chat reads");
    let mut byte = [0u8; 1];
    answers.read_exact(&mut byte).expect("the answer begins");
    let interrupted = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(interrupted.expect("kill runs").success());
    input.write_all(b"/exit\n").expect("the program still reads");
    drop(input);
    let mut rest = Vec::new();
    while answers.read_until(b'\n', &mut rest).expect("readable") > 0 {}
    assert!(child.wait().expect("it ends").success(), "the program ended by itself, not by the signal");
}

#[test]
fn inspect_tells_the_formula() {
    let text = stdout(&["inspect"]);
    for expect in
        ["folio-rust-42m", "llama", "8 heads, 2 kv heads of 64", "bytes per token", "2 x 12 x 2 x 128", "4096"]
    {
        assert!(text.contains(expect), "{expect} is missing:\n{text}");
    }
    for (format, bytes) in [("bf16", "6144"), ("int8", "3264"), ("int4", "1920")] {
        let row = text.lines().find(|line| line.starts_with(format));
        assert_eq!(row.and_then(|row| row.split_whitespace().nth(1)), Some(bytes), "{format}:\n{text}");
    }
}

#[test]
fn eval_scores_a_text() {
    let file = scratch("eval").join("text.rs");
    std::fs::write(&file, include_str!("../../crates/scheduler/src/plan.rs")).expect("writable");
    let text = stdout(&["eval", "--text", file.to_str().expect("UTF-8"), "--json", "--window", "256"]);
    let score: Value = serde_json::from_str(&text).expect("JSON");
    let nats = score["nats_per_token"].as_f64().expect("a number");
    assert!((0.5..4.0).contains(&nats), "Rust code is neither noise nor certain to a Rust model: {score}");
    let scored = score["tokens"].as_u64().unwrap_or(0) - score["windows"].as_u64().unwrap_or(0);
    assert_eq!(score["tokens_scored"], scored, "each window's first token is not scored: {score}");
}

#[test]
fn eval_finds_no_difference_between_a_model_and_itself() {
    let file = scratch("eval-against").join("text.jsonl");
    let documents = [include_str!("commands.rs"), include_str!("bad_input.rs"), "fn main() {}"];
    let lines: Vec<String> = documents.iter().map(|text| serde_json::json!({"text": text}).to_string()).collect();
    std::fs::write(&file, lines.join("\n")).expect("writable");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/folio-rust-7m.gguf");
    let flags = ["--tokens", "100", "--window", "64", "--json", "--threads", "2"];
    let command = ["eval", model, "--text", file.to_str().expect("UTF-8"), "--against", model];
    let same: Value = serde_json::from_str(&stdout(&[&command[..], &flags[..]].concat())).expect("JSON");
    assert_eq!((&same["kl_mean"], &same["greedy_agreement"]), (&0.0.into(), &1.0.into()), "{same}");
    assert_eq!(same["perplexity"], same["base"]["perplexity"], "{same}");
    assert_eq!(same["tokens"], 100, "{same}");
    assert!(same["weight_bytes_on_disk"].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{same}");

    let flags = [&["--against-backend", "reference"], &flags[..]].concat();
    let fast: Value = serde_json::from_str(&stdout(&[&command[..], &flags[..]].concat())).expect("JSON");
    let divergence = fast["kl_mean"].as_f64().expect("a number");
    // A smaller model has more near ties among its choices: the bound is twice the 42M model's.
    assert!(divergence > 0.0 && divergence < 2e-3, "rounding shows, and does not matter: {fast}");
}

#[test]
fn bench_reports_rates_and_ceilings() {
    let text = stdout(&[
        "bench",
        "throughput",
        "--json",
        "--rounds",
        "1",
        "--input-len",
        "16",
        "--output-len",
        "24",
        "--concurrency",
        "1,3",
    ]);
    let report: Value = serde_json::from_str(&text).expect("JSON");
    let results = report["results"].as_array().expect("results");
    assert_eq!(results.iter().map(|row| row["streams"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(3)]);
    let fields = ["decode_tokens_per_s", "decode_of_read_bandwidth", "first_token_ms", "itl_ms_p99", "waste_bound"];
    for field in fields {
        assert!(results.iter().all(|row| row[field].as_f64().is_some_and(|value| value > 0.0)), "{field}: {report}");
    }
    assert!(report["ceilings"]["read_bytes_per_s"].as_f64().is_some_and(|rate| rate > 1e8), "{report}");
}

fn bench(flags: &[&str]) -> Value {
    let text = stdout(&[&["bench", flags[0], "--json", "--threads", "1"], &flags[1..]].concat());
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn benches_of_the_scheduler_report_what_they_compare() {
    let short = ["--input-len", "16", "--output-len", "4", "--streams", "2"];
    let one = ["--pairs", "1", "--rounds", "1", "--prompt-len", "100"];
    let prefix = bench(&[&["prefix"], &short[..], &one[..]].concat());
    assert_eq!(prefix["cached_tokens"], 96, "all full blocks are found again: {prefix}");
    assert!(prefix["first_token_ms"]["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), "{prefix}");
    assert!(prefix["cost_at_no_hit"]["median"].as_f64().is_some_and(f64::is_finite), "{prefix}");

    let fairness = bench(&[&["fairness", "--requests", "6", "--flood", "4", "--weights", "1:2"], &short[..]].concat());
    let tenants = fairness["tenants"].as_array().expect("tenants");
    assert_eq!(tenants.iter().map(|tenant| tenant["requests"].as_u64()).collect::<Vec<_>>(), [Some(24), Some(6)]);
    assert!(tenants.iter().all(|tenant| tenant["tokens"].as_u64().is_some_and(|tokens| tokens > 0)), "{fairness}");

    let rounds = bench(&["interference", "--rounds", "1", "--streams", "2", "--prompt-len", "100"]);
    let results = rounds["results"].as_array().expect("results");
    assert_eq!(results.len(), 2);
    for field in ["/during_ms_p99/median", "/first_token_ms/best", "/first_token_ratio"] {
        let found = |row: &Value| row.pointer(field).and_then(Value::as_f64).is_some_and(|value| value > 0.0);
        assert!(results.iter().all(found), "{field}: {rounds}");
    }
}

#[test]
fn bench_http_compares_the_server_with_its_engine() {
    let streams = ["--concurrency", "3", "--prompt-tokens", "16", "--tokens", "4"];
    let report = bench(&[&["http", "--pairs", "1", "--rounds", "3"], &streams[..]].concat());
    for field in
        ["/ratio/median", "/direct/tokens_per_s/best", "/http/cpu/server/us_per_token", "/first_token_ms/http/p99"]
    {
        let value = report.pointer(field).and_then(Value::as_f64);
        assert!(value.is_some_and(|value| value > 0.0 && value.is_finite()), "{field}: {report}");
    }
    let share = report.pointer("/http/cpu/server/share").and_then(Value::as_f64);
    assert!(share.is_some_and(|share| share > 0.0 && share <= 1.0), "a share of this machine: {report}");
    let events = report["events_per_token"].as_f64();
    assert!(events.is_some_and(|events| events > 0.5 && events <= 1.0), "an event for most tokens: {report}");
}
