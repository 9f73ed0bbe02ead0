//! A client with one key tries to learn which questions a client with another key asked: it asks
//! many questions, reads how many drafted tokens of each answer were accepted, and guesses. It may
//! do no better than a coin.

mod judge;

use std::fmt::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use folio_testing::Rng;
use serde_json::{Value, json};

use crate::folio;
use crate::http::request_with;
use crate::scratch;
use crate::server::Server;
use judge::{Counts, chance, guess};

const OTHER: &str = "the-key-of-somebody-else";
const OWN: &str = "the-key-of-the-attacker";

/// Time of the other key's questions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// Before all of the attacker's.
    Before,
    /// In turns with the attacker's: its next question, or another one, so that the server's work
    /// is the same.
    Between,
}

/// A server that drafts, and its model.
#[derive(Clone, Copy)]
struct Setup {
    method: &'static str,
    small: bool,
    fixed: bool,
}

/// Methods without heads run on the small model, which has quicker steps.
const METHODS: [(&str, bool); 7] = [
    ("suffix", true),
    ("ngram", true),
    ("lookahead", true),
    ("auto", true),
    ("auto", false),
    ("medusa", false),
    ("draft", false),
];

impl Setup {
    fn start(self) -> Server {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let keys = scratch("attacker").join(format!("keys-{}", STARTED.fetch_add(1, Ordering::Relaxed)));
        std::fs::write(&keys, format!("{OTHER}\n{OWN}\n")).expect("keys are written");
        let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/folio-rust-7m.gguf");
        let mut command = match std::env::var_os("FOLIO_BIN") {
            Some(program) => std::process::Command::new(program),
            None => folio(&[]),
        };
        command.arg("serve").args(self.small.then_some(small));
        command.args(["--port", "0", "--max-num-seqs", "2", "--max-model-len", "512", "--api-key-file"]).arg(keys);
        command.args(["--speculate", self.method, "--speculate-tokens", "6"]);
        command.args(self.fixed.then_some("--speculate-fixed"));
        Server::start_as(command)
    }

    fn name(self) -> String {
        let mut name = String::new();
        let model = if self.small { "7m" } else { "built in" };
        write!(name, "{} ({model}, {})", self.method, if self.fixed { "fixed" } else { "adaptive" }).expect("text");
        name
    }
}

fn coins(seed: u64, count: usize) -> Vec<bool> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| rng.below(2) == 1).collect()
}

/// Beginnings of functions, no two alike.
fn questions(count: usize) -> Vec<String> {
    const VERBS: [&str; 11] =
        ["count", "find", "sort", "merge", "parse", "split", "reverse", "hash", "encode", "print", "sum"];
    const NOUNS: [&str; 13] = [
        "words", "lines", "bytes", "nodes", "users", "files", "errors", "colors", "points", "tokens", "prices",
        "dates", "keys",
    ];
    const TYPES: [&str; 7] =
        ["&str", "&[u8]", "Vec<String>", "HashMap<String, u32>", "&mut [i64]", "Option<f64>", "char"];
    let question = |n: usize| {
        let (verb, noun) = (VERBS[n % VERBS.len()], NOUNS[n % NOUNS.len()]);
        let (from, to) = (TYPES[n % TYPES.len()], TYPES[(n / 7 + 3) % TYPES.len()]);
        format!("/// {verb} number {n} of the {noun}.\npub fn {verb}_{noun}_{n}({noun}: {from}) -> {to} {{\n    ")
    };
    (0..count).map(question).collect()
}

/// The counts in an answer's `usage`.
fn ask(server: &Server, key: &str, question: &str, tokens: usize) -> Counts {
    let body = json!({"prompt": question, "max_tokens": tokens, "temperature": 0, "ignore_eos": true});
    let fields = format!("authorization: Bearer {key}\r\n");
    let answer = request_with(server.port, "POST", "/v1/completions", &fields, &body.to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
    let usage = serde_json::from_str::<Value>(&answer.body).expect("JSON")["usage"].clone();
    let count = |value: &Value| value.as_u64().unwrap_or(0) as usize;
    let details = &usage["completion_tokens_details"];
    Counts {
        accepted: count(&details["accepted_prediction_tokens"]),
        rejected: count(&details["rejected_prediction_tokens"]),
        cached: count(&usage["prompt_tokens_details"]["cached_tokens"]),
        tokens: count(&usage["completion_tokens"]),
    }
}

/// Counts that the attacker reads if the other client asks the questions chosen by its coins; none:
/// it asks none of them.
fn read(setup: Setup, questions: &[String], coins: Option<&[bool]>, when: When, tokens: usize) -> Vec<Counts> {
    let server = setup.start();
    let asked = |n: usize| coins.is_some_and(|coins| coins[n]);
    if when == When::Before {
        for (n, question) in questions.iter().enumerate().filter(|(n, _)| asked(*n)) {
            let counts = ask(&server, OTHER, question, tokens);
            assert_eq!(counts.tokens, tokens, "question {n}");
        }
    }
    let read = questions.iter().enumerate().map(|(n, question)| {
        if when == When::Between {
            let other = if asked(n) { question.clone() } else { format!("{question}let other_{n} = ") };
            ask(&server, OTHER, &other, tokens);
        }
        ask(&server, OWN, question, tokens)
    });
    read.collect()
}

/// Result of an attack: hits among this number of guesses, and the chance that a coin is as far
/// from one half.
fn attack(setup: Setup, when: When, num_questions: usize, seed: u64, tokens: usize) -> (usize, f64, Vec<Counts>) {
    let questions = questions(num_questions + num_questions / 2);
    let coins = coins(seed, questions.len());
    let fresh = read(setup, &questions, None, when, tokens);
    let found = read(setup, &questions, Some(&coins), when, tokens);
    let (known, unknown) = coins.split_at(num_questions / 2);
    let guesses = guess(&found, &fresh, known);
    let hits = guesses.iter().zip(unknown).filter(|(guess, coin)| guess == coin).count();
    let p = chance(hits, unknown.len());
    let differ = found.iter().zip(&fresh).filter(|(found, fresh)| found != fresh).count();
    println!(
        "{}, {when:?}: {hits} of {}, p = {p:.3e}; {differ} counts are not those of a fresh server",
        setup.name(),
        unknown.len()
    );
    if setup.fixed {
        assert_eq!(found, fresh, "{}, {when:?}: what another asked shows", setup.name());
    }
    (hits, p, found)
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |value| value.parse().expect("a number"))
}

/// Chance that an attacker is this lucky.
const ALPHA: f64 = 0.001;

/// `cargo xtask attacker` runs this with 200 questions, on every method.
#[test]
fn nobody_learns_what_another_key_asked() {
    let seed = number("FOLIO_ATTACKER_SEED", 7);
    let num_questions = number("FOLIO_ATTACKER_QUESTIONS", 0) as usize;
    let mut failed = Vec::new();
    let mut check = |setup: Setup, when, num_questions, tokens| {
        let (hits, p, _) = attack(setup, when, num_questions, seed, tokens);
        if p < ALPHA {
            failed.push(format!("{}, {when:?}: {hits} of {num_questions}, p = {p:.1e}", setup.name()));
        }
    };
    if num_questions == 0 {
        check(Setup { method: "suffix", small: true, fixed: false }, When::Before, 20, 16);
        check(Setup { method: "auto", small: false, fixed: false }, When::Between, 12, 16);
    }
    for (method, small) in METHODS {
        if num_questions == 0 {
            check(Setup { method, small, fixed: true }, When::Between, 4, 12);
            continue;
        }
        for (fixed, when) in [(true, When::Before), (false, When::Before), (false, When::Between)] {
            check(Setup { method, small, fixed }, when, num_questions, 24);
        }
    }
    assert!(failed.is_empty(), "the attacker wins: {failed:#?}");
}

/// A key's own earlier answers still help it.
#[test]
fn a_key_still_learns_from_its_own_answers() {
    let server = Setup { method: "suffix", small: true, fixed: true }.start();
    let questions = questions(4);
    let all = |key| -> usize { questions.iter().map(|question| ask(&server, key, question, 32).accepted).sum() };
    let (first, second, other) = (all(OWN), all(OWN), all(OTHER));
    assert!(second > 4 * 24 && second > first, "{first} held at first, {second} when asked again");
    assert_eq!(other, first, "to another key all of it is new");
}
