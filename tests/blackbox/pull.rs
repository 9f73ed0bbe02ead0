//! `folio pull` against the stand-in hub.

use std::path::Path;
use std::process::Output;

use crate::hub::{COMMIT, Hub};
use crate::{folio, scratch};

/// A repository as a small model has it, with files that nobody needs among them.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    let weights = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
    vec![
        ("config.json", br#"{"model_type": "llama"}"#.to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
        ("model.safetensors", weights),
        ("pytorch_model.bin", vec![1; 1000]),
        ("README.md", b"# readme".to_vec()),
    ]
}

fn pull(hub: &Hub, home: &Path, env: &[(&str, &str)]) -> Output {
    let mut command = folio(&["pull", "org/model"]);
    command.env("HF_HOME", home).env("HF_ENDPOINT", hub.endpoint()).envs(env.iter().copied());
    command.output().expect("the binary starts")
}

fn snapshot(home: &Path) -> std::path::PathBuf {
    home.join("hub").join("models--org--model").join("snapshots").join(COMMIT)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

#[test]
fn fetches_what_it_needs_into_the_hub_cache() {
    let (hub, home) = (Hub::start("org/model", &files(), 0, None), scratch("pull"));
    let output = pull(&hub, &home, &[]);
    assert!(output.status.success(), "{}", text(&output));
    for (name, bytes) in files() {
        let found = std::fs::read(snapshot(&home).join(name)).ok();
        let wanted = !matches!(name, "pytorch_model.bin" | "README.md");
        assert_eq!(found, wanted.then_some(bytes), "{name}");
    }
    assert!(text(&output).contains("folio run org/model"));
    // A second pull finds everything in place and downloads nothing.
    let before = hub.seen().len();
    assert!(pull(&hub, &home, &[]).status.success());
    assert!(hub.seen()[before..].iter().all(|request| !request.contains("/resolve/")), "{:?}", hub.seen());
    // And the name now resolves: the error is about the toy weights, no longer about a missing model.
    let inspect = folio(&["inspect", "org/model"]).env("HF_HOME", &home).output().expect("the binary starts");
    assert!(text(&inspect).contains("config.json") || text(&inspect).contains("safetensors"), "{}", text(&inspect));
}

#[test]
fn goes_on_where_a_broken_connection_stopped() {
    let (hub, home) = (Hub::start("org/model", &files(), 1, None), scratch("pull-resume"));
    let output = pull(&hub, &home, &[]);
    assert!(output.status.success(), "{}", text(&output));
    let (_, weights) = files().swap_remove(2);
    assert_eq!(std::fs::read(snapshot(&home).join("model.safetensors")).ok(), Some(weights));
    let resumed = hub.seen().iter().any(|request| request.contains("model.safetensors bytes=100000-"));
    assert!(resumed, "the second request asks for the rest only: {:?}", hub.seen());
}

#[test]
fn a_run_that_was_given_up_is_resumed_by_the_next() {
    let (hub, home) = (Hub::start("org/model", &files(), 5, None), scratch("pull-again"));
    let first = pull(&hub, &home, &[]);
    assert!(!first.status.success(), "{}", text(&first));
    assert!(text(&first).contains("run the same command again"), "{}", text(&first));
    let second = pull(&hub, &home, &[]);
    assert!(second.status.success(), "{}", text(&second));
    let (_, weights) = files().swap_remove(2);
    assert_eq!(std::fs::read(snapshot(&home).join("model.safetensors")).ok(), Some(weights));
}

#[test]
fn a_token_is_sent_and_its_absence_explained() {
    let (hub, home) = (Hub::start("org/model", &files(), 0, Some("secret")), scratch("pull-token"));
    let refused = pull(&hub, &home, &[]);
    assert!(!refused.status.success() && text(&refused).contains("HF_TOKEN"), "{}", text(&refused));
    let accepted = pull(&hub, &home, &[("HF_TOKEN", "secret")]);
    assert!(accepted.status.success(), "{}", text(&accepted));
}

#[test]
fn offline_mode_makes_no_request() {
    let (hub, home) = (Hub::start("org/model", &files(), 0, None), scratch("pull-offline"));
    let output = pull(&hub, &home, &[("HF_HUB_OFFLINE", "1")]);
    assert!(!output.status.success() && text(&output).contains("HF_HUB_OFFLINE"), "{}", text(&output));
    assert!(hub.seen().is_empty());
}
