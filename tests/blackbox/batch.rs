//! `folio batch`: every line gets its answer exactly once, however often the program is stopped.

use std::path::Path;
use std::process::{Command, Stdio};

use folio_testing::wait::until;
use serde_json::{Value, json};

use crate::{folio, refusal, scratch};

fn batch(input: &Path, output: &Path) -> Command {
    let paths = [input, output].map(|path| path.to_str().expect("UTF-8"));
    folio(&["batch", paths[0], "-o", paths[1], "--max-num-seqs", "2", "--max-model-len", "512"])
}

fn line(id: &str, url: &str, body: Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": url, "body": body}).to_string() + "\n"
}

fn answers(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("whole lines of JSON")).collect()
}

fn of<'a>(answers: &'a [Value], id: &str) -> &'a Value {
    let mut found = answers.iter().filter(|answer| answer["custom_id"] == id && answer["response"].is_object());
    let answer = found.next().unwrap_or_else(|| panic!("{id} has no answer: {answers:?}"));
    assert!(found.next().is_none(), "{id} has two answers");
    answer
}

#[test]
fn every_line_is_answered_or_says_why_not() {
    let folder = scratch("batch");
    let (input, output) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let chat = json!({"messages": [{"role": "user", "content": "What is a trait?"}], "max_tokens": 8});
    let prompt = json!({"prompt": "fn main() {", "max_tokens": 4, "temperature": 0});
    let mut text = line("chat", "/v1/chat/completions", chat);
    text += &line("text", "/v1/completions", prompt.clone());
    text += &line("text", "/v1/completions", prompt.clone());
    text += &line("vector", "/v1/embeddings", json!({"input": "a vector"}));
    text += &line("response", "/v1/responses", json!({"input": "What is `Vec`?", "max_output_tokens": 4}));
    text += &line("bad", "/v1/completions", json!({"prompt": "x", "max_tokens": -1}));
    text += &line("elsewhere", "/metrics", prompt);
    text += "{\"custom_id\": \n\n";
    std::fs::write(&input, text).expect("writable");
    let run = batch(&input, &output).output().expect("the binary starts");
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert_eq!(run.status.code(), Some(1), "not every line has an answer: {said}");
    assert!(said.contains("4 answered, 4 failed") && said.contains("0 skipped as answered before"), "{said}");
    let found = answers(&output);
    assert_eq!(found.len(), 8);
    for id in ["chat", "text", "vector", "response"] {
        let response = &of(&found, id)["response"];
        assert_eq!(response["status_code"], 200, "{id}: {response}");
        assert!(response["request_id"].as_str().is_some_and(|id| !id.is_empty()) && response["body"].is_object());
    }
    assert_eq!(of(&found, "bad")["response"]["status_code"], 400);
    let mut codes: Vec<_> = found.iter().filter_map(|answer| answer["error"]["code"].as_str()).collect();
    codes.sort_unstable();
    assert_eq!(codes, ["duplicate_custom_id", "invalid_line", "invalid_line"]);
    // A second run: answers are there, and failed lines are asked again and fail again.
    let again = batch(&input, &output).output().expect("the binary starts");
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert_eq!(again.status.code(), Some(1), "{said}");
    assert!(said.contains("0 answered, 4 failed") && said.contains("4 skipped as answered before"), "{said}");
    assert_eq!(answers(&output).len(), 8);
    assert!(refusal(&["batch", "/no/such/file"]).contains("/no/such/file"));
}

#[test]
fn killed_in_the_middle_it_goes_on_where_it_was() {
    let folder = scratch("batch-killed");
    let (input, output) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let prompt = |number: usize| json!({"prompt": format!("// {number}\nfn"), "max_tokens": 8, "temperature": 0});
    let ids: Vec<String> = (0..16).map(|number| format!("r{number}")).collect();
    let text: String = ids.iter().enumerate().map(|(n, id)| line(id, "/v1/completions", prompt(n))).collect();
    std::fs::write(&input, text).expect("writable");
    let mut child = batch(&input, &output).stderr(Stdio::null()).spawn().expect("the binary starts");
    until("answers come", || std::fs::read_to_string(&output).unwrap_or_default().lines().count() >= 3);
    child.kill().expect("it was running");
    child.wait().expect("it ends");
    // The worst state that a kill can leave.
    let mut left = std::fs::read_to_string(&output).expect("readable");
    left += "{\"id\":\"batch_req_";
    std::fs::write(&output, left).expect("writable");
    assert!(batch(&input, &output).stderr(Stdio::null()).status().expect("it starts").success());
    let found = answers(&output);
    assert_eq!(found.len(), ids.len());
    for id in &ids {
        assert_eq!(of(&found, id)["response"]["status_code"], 200);
    }
}

#[test]
fn what_failed_is_asked_again_and_has_one_line() {
    let folder = scratch("batch-again");
    let (input, output) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let body = |model: &str| json!({"model": model, "prompt": "fn", "max_tokens": 2, "temperature": 0});
    let write = |second: &str| {
        let lines = [line("a", "/v1/completions", body("folio-rust-42m")), line("b", "/v1/completions", body(second))];
        std::fs::write(&input, lines.concat()).expect("writable");
    };
    // One name is wrong, and an earlier run was refused for lack of room.
    write("nobody");
    let busy = json!({
        "id": "batch_req_1", "custom_id": "a", "error": null,
        "response": {"status_code": 429, "request_id": "r", "body": {"error": {"message": "too many requests"}}},
    });
    std::fs::write(&output, format!("{busy}\n")).expect("writable");
    let run = batch(&input, &output).output().expect("the binary starts");
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert_eq!(run.status.code(), Some(1), "{said}");
    assert!(said.contains("1 answered, 1 failed") && said.contains("0 skipped as answered before"), "{said}");
    let found = answers(&output);
    let statuses = ["a", "b"].map(|id| of(&found, id)["response"]["status_code"].as_u64());
    assert_eq!((found.len(), statuses), (2, [Some(200), Some(404)]), "{found:?}");
    // Corrected, the same command succeeds.
    write("folio-rust-42m");
    let run = batch(&input, &output).output().expect("the binary starts");
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(run.status.success() && said.contains("1 answered, 0 failed, 1 skipped as answered before"), "{said}");
    let found = answers(&output);
    assert_eq!((found.len(), of(&found, "b")["response"]["status_code"].as_u64()), (2, Some(200)), "{found:?}");
}

#[test]
fn two_runs_do_not_share_an_output() {
    let folder = scratch("batch-twice");
    let (input, output) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let slow = json!({"prompt": "fn", "max_tokens": 300, "ignore_eos": true, "temperature": 0});
    let text: String = (0..4).map(|n| line(&format!("r{n}"), "/v1/completions", slow.clone())).collect();
    std::fs::write(&input, text).expect("writable");
    let mut first = batch(&input, &output).stderr(Stdio::null()).spawn().expect("the binary starts");
    until("answers come", || output.exists() && !answers(&output).is_empty());
    let second = batch(&input, &output).output().expect("the binary starts");
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains("another `folio batch`") && said.contains("out.jsonl"), "{said}");
    assert!(first.wait().expect("it ends").success());
    assert_eq!(answers(&output).len(), 4);
}
