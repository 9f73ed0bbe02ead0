//! `--kv-disk`: prefixes that outlive the process, and files that cannot be trusted.

use std::path::Path;

use folio_testing::{http::exchange, wait};
use serde_json::{Value, json};

use crate::scratch;
use crate::server::Server;

fn start(folder: &Path) -> Server {
    Server::start(&["--max-num-seqs", "8", "--max-model-len", "1024", "--kv-disk", folder.to_str().expect("UTF-8")])
}

/// A system prompt of some hundred tokens and a short question.
fn chat(question: &str) -> Value {
    let rules: String = (0..60).map(|rule| format!("Rule {rule}: be brief about number {}. ", rule * rule)).collect();
    json!({
        "messages": [{"role": "system", "content": rules}, {"role": "user", "content": question}],
        "temperature": 0, "max_tokens": 12,
    })
}

struct Reply {
    text: String,
    prompt: u64,
    cached: u64,
}

fn ask(server: &Server, question: &str) -> Reply {
    let (status, answer) = server.post("/v1/chat/completions", chat(question));
    assert_eq!(status, 200, "{answer}");
    Reply {
        text: answer["choices"][0]["message"]["content"].as_str().expect("an answer").to_string(),
        prompt: answer["usage"]["prompt_tokens"].as_u64().expect("a count"),
        cached: answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0),
    }
}

/// All files below the folder, with their sizes.
fn files(folder: &Path) -> Vec<(std::path::PathBuf, u64)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(about) if about.is_dir() => found.extend(files(&entry.path())),
            Ok(about) => found.push((entry.path(), about.len())),
            Err(_) => {}
        }
    }
    found.sort();
    found
}

/// Chunks are written beside the answers: waits for at least `least` of them.
fn wait_for_chunks(folder: &Path, least: usize) {
    let chunks = || files(folder).iter().filter(|(_, bytes)| *bytes > 100_000).count();
    let written = wait::poll(wait::SOON, || (chunks() >= least).then_some(()));
    assert!(written.is_some(), "no chunk was written: {:?}", files(folder));
}

#[test]
fn a_long_system_prompt_survives_a_restart() {
    let folder = scratch("kv-disk");
    let first = start(&folder);
    let fresh = ask(&first, "What is `Vec`?");
    assert_eq!(fresh.cached, 0);
    assert!(fresh.prompt > 400, "the prompt is long: {}", fresh.prompt);
    wait_for_chunks(&folder, 3);
    first.kill();

    let second = start(&folder);
    let found = ask(&second, "What is `Vec`?");
    assert!(found.cached >= 3 * 128, "{} tokens of {} were found", found.cached, found.prompt);
    assert_eq!(found.text, fresh.text, "and the answer is the same");
    assert!(ask(&second, "What is `Rc`?").cached >= 3 * 128, "another question shares the beginning");
    second.kill();

    // A damaged file and a foreign one are skipped, with a message.
    let chunks: Vec<_> = files(&folder).into_iter().filter(|(_, bytes)| *bytes > 100_000).collect();
    for (path, bytes) in &chunks {
        let mut content = std::fs::read(path).expect("readable");
        content[*bytes as usize / 2] ^= 1;
        std::fs::write(path, content).expect("writable");
    }
    std::fs::write(folder.join("notes.txt"), "not a chunk").expect("writable");
    let third = start(&folder);
    let again = ask(&third, "What is `Vec`?");
    assert_eq!((again.cached, again.text), (0, fresh.text.clone()), "a damaged chunk is never used");
    let said = third.kill().join("\n");
    assert!(said.contains("warning") && said.contains("damaged"), "it says so: {said}");
    assert!(folder.join("notes.txt").exists(), "what is not ours is left alone");
}

#[test]
fn killed_in_the_middle_of_traffic_it_comes_back_right() {
    let (folder, empty) = (scratch("kv-disk-killed"), scratch("kv-disk-empty"));
    let question = |number: usize| format!("Explain item {number} of the list.");
    let right: Vec<String> = {
        let server = start(&empty);
        (0..4).map(|number| ask(&server, &question(number)).text).collect()
    };
    for round in 0..3 {
        let server = start(&folder);
        for (number, right) in right.iter().enumerate() {
            assert_eq!(&ask(&server, &question(number)).text, right, "round {round}, question {number}");
        }
        // There are running requests and partly written chunks when it dies.
        let port = server.port;
        let traffic: Vec<_> = (0..6)
            .map(|number| {
                std::thread::spawn(move || {
                    let body = chat(&format!("{number} in round {round}: tell me a long story about it"));
                    exchange(port, "POST", "/v1/chat/completions", "", body.to_string().as_bytes())
                })
            })
            .collect();
        wait_for_chunks(&folder, 1);
        let said = server.kill().join("\n");
        assert!(!said.contains("panicked"), "{said}");
        traffic.into_iter().for_each(|client| drop(client.join()));
    }
}
