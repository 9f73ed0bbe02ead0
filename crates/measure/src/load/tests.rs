//! Runs against a server of this test.

mod fake;

use std::path::PathBuf;

use serde_json::json;

use super::*;
use crate::progress::Unwatched;
use fake::{Behaviour, FakeServer};

/// 24 requests of 9 tokens in and 5 out to `server`.
fn options(server: &FakeServer) -> Options {
    let dataset = Dataset::Random(Random { input_len: 9, output_len: 5, ..Random::default() });
    Options {
        target: Target {
            base_url: format!("http://{}", server.address),
            api_key: Some("secret".into()),
            ..Target::default()
        },
        prompts: Prompts { dataset, count: 24, ..Prompts::default() },
        ..Options::default()
    }
}

fn at_most(max_concurrency: usize) -> Traffic {
    Traffic { max_concurrency: Some(max_concurrency), ..Traffic::default() }
}

fn run(options: &Options) -> Result<Report> {
    super::run(options, Arc::new(Unwatched))
}

fn errors(outcomes: &[Outcome]) -> Vec<&str> {
    outcomes.iter().filter_map(|outcome| outcome.error.as_deref()).collect()
}

#[test]
fn token_ids_where_the_server_cannot_tokenize() {
    let server = FakeServer::start(Behaviour::default());
    let mut options = options(&server);
    options.prompts.vocab_size = Some(30);
    options.traffic = at_most(4);
    options.contents.detailed = true;
    let Report { model, outcomes, metrics, .. } = run(&options).expect("a run");
    assert_eq!(model, "org/fake");
    assert_eq!(errors(&outcomes), [""; 0]);
    assert!(outcomes.iter().all(|outcome| (outcome.prompt_len, outcome.output_len) == (9, 5)));
    assert!(outcomes.iter().all(|outcome| outcome.itls.len() == 4 && outcome.text == "é0 é1 é2 é3 é4 "));
    assert!(outcomes.iter().all(|outcome| outcome.start + outcome.latency <= metrics.duration));
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
    let lengths = PrefixRepetition { prefix_len: 20, suffix_len: 30, num_prefixes: 2, output_len: 2 };
    let prompts = Prompts { dataset: Dataset::PrefixRepetition(lengths), count: 12, ..Prompts::default() };
    let Report { outcomes, .. } = run(&Options { prompts, ..options(&server) }).expect("a run");
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
    let mut options = options(&server);
    options.target.backend = Backend::OpenaiChat;
    options.traffic.num_warmups = 2;
    let Report { outcomes, .. } = run(&options).expect("a run");
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
    let report = run(&Options { traffic: at_most(3), ..options(&server) }).expect("a run");
    assert_eq!(report.errors(), [("429 Too Many Requests: not now", 8)]);
    let metrics = report.metrics;
    assert_eq!((metrics.completed, metrics.failed), (16, 8));
    assert_eq!((metrics.total_input, metrics.total_output), (16 * 9, 16 * 5));
}

#[test]
fn a_server_that_dies_fails_requests_and_not_the_run() {
    let server = FakeServer::start(Behaviour { dies_after: Some(10), ..Behaviour::default() });
    let Report { outcomes, .. } = run(&Options { traffic: at_most(2), ..options(&server) }).expect("a run");
    let errors = errors(&outcomes);
    assert!((14..=15).contains(&errors.len()), "{errors:?}");
    assert!(errors.iter().any(|error| error.contains("in the middle of an answer")), "{errors:?}");
}

#[test]
fn errors_within_a_stream_and_silence_are_failures() {
    let server = FakeServer::start(Behaviour { breaks_off: true, ..Behaviour::default() });
    let report = run(&options(&server)).expect("a run");
    assert_eq!(report.errors(), [("the answer broke off: out of blocks", 24)]);
    let server = FakeServer::start(Behaviour { hangs: true, ..Behaviour::default() });
    let mut options = options(&server);
    options.target.request_timeout = Duration::from_millis(50);
    assert_eq!(run(&options).expect("a run").errors(), [("no end of the answer within 0.05 s", 24)]);
}

#[test]
fn a_connection_that_was_closed_meanwhile_is_made_anew() {
    let server = FakeServer::start(Behaviour { closes: true, ..Behaviour::default() });
    let Report { outcomes, .. } = run(&Options { traffic: at_most(2), ..options(&server) }).expect("a run");
    assert_eq!(errors(&outcomes), [""; 0]);
    assert!(server.connections() > 24);
}

#[test]
fn keys_are_sent_and_their_absence_is_told() {
    let server = FakeServer::start(Behaviour { key: Some("other"), ..Behaviour::default() });
    let error = run(&options(&server)).expect_err("a wrong key").to_string();
    assert!(error.contains("401"), "{error}");
    let server = FakeServer::start(Behaviour { key: Some("secret"), ..Behaviour::default() });
    assert_eq!(errors(&run(&options(&server)).expect("a run").outcomes), [""; 0]);
}

#[test]
fn options_and_servers_that_cannot_be_used() {
    let server = FakeServer::start(Behaviour::default());
    let check = |change: &dyn Fn(&mut Options), expect: &str| {
        let mut options = options(&server);
        change(&mut options);
        let error = run(&options).expect_err(expect);
        assert!(format!("{error:#}").contains(expect), "{expect}: {error:#}");
    };
    check(&|options| options.target.base_url = "https://a.example".into(), "https is not supported");
    check(
        &|options| {
            options.target.base_url = "http://127.0.0.1:1".into();
            options.target.model = Some("m".into());
        },
        "could not connect",
    );
    check(&|options| options.traffic.max_concurrency = Some(0), "--max-concurrency");
    check(&|options| options.target.endpoint = Some("v1".into()), "--endpoint");
    check(&|options| options.prompts.count = 0, "--num-prompts");
    check(&|options| options.prompts.vocab_size = Some(0), "--vocab-size");
    let missing = PathBuf::from("/no/such/file");
    check(&|options| options.prompts.dataset = Dataset::Trace(Trace::new(&missing)), "/no/such/file");
}
