//! Runs against a server of this test's own.

mod fake;

use clap::Parser;
use serde_json::json;

use super::*;
use crate::args::DatasetArgs;
use fake::{Behaviour, FakeServer};

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    bench: ServeBench,
}

pub fn parse(flags: &str) -> ServeBench {
    Command::try_parse_from(std::iter::once("bench").chain(flags.split_whitespace())).expect("valid flags").bench
}

pub fn dataset(flags: &str) -> DatasetArgs {
    parse(flags).dataset
}

fn run(server: &FakeServer, flags: &str) -> Result<(String, Vec<Outcome>, f64)> {
    let args = parse(&format!("--base-url http://{} {flags}", server.address));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(bench(&args, Some("secret")))
}

fn errors(outcomes: &[Outcome]) -> Vec<&str> {
    outcomes.iter().filter_map(|outcome| outcome.error.as_deref()).collect()
}

const SHORT: &str = "--num-prompts 24 --random-input-len 9 --random-output-len 5";

#[test]
fn token_ids_where_the_server_cannot_tokenize() {
    let server = FakeServer::start(Behaviour::default());
    let flags = format!("{SHORT} --max-concurrency 4 --vocab-size 30 --save-result --save-detailed");
    let (model, outcomes, duration) = run(&server, &flags).expect("a run");
    assert_eq!(model, "org/fake");
    assert_eq!(errors(&outcomes), [""; 0]);
    assert!(outcomes.iter().all(|outcome| (outcome.prompt_len, outcome.output_len) == (9, 5)));
    assert!(outcomes.iter().all(|outcome| outcome.itls.len() == 4 && outcome.text == "é0 é1 é2 é3 é4 "));
    assert!(outcomes.iter().all(|outcome| outcome.start + outcome.latency <= duration));
    let seen = server.seen();
    assert_eq!(seen.len(), 24);
    for body in &seen {
        let ids = body["prompt"].as_array().expect("token ids");
        assert!(ids.iter().all(|id| id.as_u64().is_some_and(|id| id < 30)));
        assert_eq!((&body["model"], &body["ignore_eos"]), (&json!("org/fake"), &json!(true)));
        assert_eq!((&body["temperature"], &body["max_tokens"]), (&json!(0.0), &json!(5)));
    }
    assert!(server.connections() <= 4, "connections are kept: {}", server.connections());
}

#[test]
fn text_of_exact_length_where_it_can() {
    let server = FakeServer::start(Behaviour { tokenizes: true, ..Behaviour::default() });
    let flags = "--num-prompts 12 --dataset-name prefix_repetition --prefix-repetition-num-prefixes 2 \
                 --prefix-repetition-prefix-len 20 --prefix-repetition-suffix-len 30 --prefix-repetition-output-len 2";
    let (_, outcomes, _) = run(&server, flags).expect("a run");
    assert_eq!(errors(&outcomes), [""; 0]);
    let lens: Vec<usize> = outcomes.iter().map(|outcome| outcome.prompt_len).collect();
    assert_eq!(lens, [50; 12], "as the server counts them, special tokens included");
    let seen = server.seen();
    let mut starts: Vec<Vec<&str>> = Vec::new();
    for body in &seen {
        assert!(body.get("ignore_eos").is_none());
        starts.push(body["prompt"].as_str().expect("text").split_whitespace().take(15).collect());
    }
    starts.sort();
    starts.dedup();
    assert_eq!(starts.len(), 2, "prefixes are shared");
}

#[test]
fn chats_are_words() {
    let server = FakeServer::start(Behaviour::default());
    let (_, outcomes, _) = run(&server, &format!("{SHORT} --backend openai-chat --num-warmups 2")).expect("a run");
    assert_eq!(errors(&outcomes), [""; 0]);
    assert!(outcomes.iter().all(|outcome| (outcome.output_len, outcome.itls.len()) == (5, 4)));
    let seen = server.seen();
    assert_eq!(seen.len(), 24 + 2);
    let content = seen[0]["messages"][0]["content"].as_str().expect("text");
    assert_eq!(content.split(' ').count(), 9);
    assert_eq!(seen[0]["max_completion_tokens"], 5);
}

#[test]
fn what_fails_is_counted() {
    let server = FakeServer::start(Behaviour { refuses_every: Some(3), ..Behaviour::default() });
    let (_, outcomes, duration) = run(&server, &format!("{SHORT} --max-concurrency 3")).expect("a run");
    assert_eq!(errors(&outcomes), ["429 Too Many Requests: not now"; 8]);
    let metrics = Metrics::new(&outcomes, duration, &[99.0], &[]);
    assert_eq!((metrics.completed, metrics.failed), (16, 8));
    assert_eq!((metrics.total_input, metrics.total_output), (16 * 9, 16 * 5));
}

#[test]
fn a_server_that_dies_fails_requests_and_not_the_run() {
    let server = FakeServer::start(Behaviour { dies_after: Some(10), ..Behaviour::default() });
    let (_, outcomes, _) = run(&server, &format!("{SHORT} --max-concurrency 2")).expect("a run");
    let errors = errors(&outcomes);
    assert!((14..=15).contains(&errors.len()), "{errors:?}");
    assert!(errors.iter().any(|error| error.contains("in the middle of an answer")), "{errors:?}");
}

#[test]
fn errors_within_a_stream_and_silence_are_failures() {
    let server = FakeServer::start(Behaviour { breaks_off: true, ..Behaviour::default() });
    let (_, outcomes, _) = run(&server, SHORT).expect("a run");
    assert_eq!(errors(&outcomes), ["the answer broke off: out of blocks"; 24]);
    let server = FakeServer::start(Behaviour { hangs: true, ..Behaviour::default() });
    let (_, outcomes, _) = run(&server, &format!("{SHORT} --request-timeout 0.05")).expect("a run");
    assert_eq!(errors(&outcomes), ["no end of the answer within 0.05 s"; 24]);
}

#[test]
fn a_connection_that_was_closed_meanwhile_is_made_anew() {
    let server = FakeServer::start(Behaviour { closes: true, ..Behaviour::default() });
    let (_, outcomes, _) = run(&server, &format!("{SHORT} --max-concurrency 2")).expect("a run");
    assert_eq!(errors(&outcomes), [""; 0]);
    assert!(server.connections() > 24);
}

#[test]
fn keys_are_sent_and_their_absence_is_told() {
    let server = FakeServer::start(Behaviour { key: Some("other"), ..Behaviour::default() });
    let error = run(&server, SHORT).expect_err("a wrong key").to_string();
    assert!(error.contains("401"), "{error}");
    let server = FakeServer::start(Behaviour { key: Some("secret"), ..Behaviour::default() });
    assert_eq!(errors(&run(&server, SHORT).expect("a run").1), [""; 0]);
}

#[test]
fn flags_and_servers_that_cannot_be_used() {
    let check = |flags: &str, expect: &str| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let error = runtime.block_on(bench(&parse(flags), None)).expect_err(flags);
        assert!(format!("{error:#}").contains(expect), "{flags}: {error:#}");
    };
    check("--base-url https://a.example", "https is not supported");
    check("--base-url http://127.0.0.1:1 --model m", "could not connect");
    check("--max-concurrency 0", "--max-concurrency");
    let server = FakeServer::start(Behaviour::default());
    let at = format!("--base-url http://{}", server.address);
    check(&format!("{at} --endpoint v1"), "--endpoint");
    check(&format!("{at} --num-prompts 0"), "--num-prompts");
    check(&format!("{at} --dataset-name sharegpt"), "--dataset-path");
    check(&format!("{at} --dataset-path x"), "--dataset-path");
    check(&format!("{at} --dataset-name trace --dataset-path /no/such/file"), "/no/such/file");
}
