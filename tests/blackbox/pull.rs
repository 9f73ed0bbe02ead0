//! `folio pull` against the stand-in hub.

use std::path::Path;
use std::process::Output;

use crate::hub::{COMMIT, Hub};
use crate::{folio, scratch};

/// The files of a small model's repository, with unneeded ones among them.
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
    pull_of(hub, home, "org/model", env)
}

fn pull_of(hub: &Hub, home: &Path, model: &str, env: &[(&str, &str)]) -> Output {
    let mut command = folio(&["pull", model]);
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
    // The name now resolves: the error is about the toy weights, no longer about a missing model.
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

/// Downloaded files of a repository, by name.
fn fetched(home: &Path, repo: &str) -> Vec<String> {
    let snapshot = home.join("hub").join(format!("models--{}", repo.replace('/', "--"))).join("snapshots").join(COMMIT);
    let mut files = Vec::new();
    let mut folders = vec![snapshot.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.path().is_dir() {
                true => folders.push(entry.path()),
                false => files.extend(entry.path().strip_prefix(&snapshot).map(|path| path.display().to_string())),
            }
        }
    }
    files.sort_unstable();
    files
}

#[test]
fn one_quantization_of_a_gguf_repository_is_fetched_and_found() {
    let model = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/folio-rust-7m.gguf"));
    let model = model.expect("the repository has it");
    let files = [
        ("README.md", b"# readme".to_vec()),
        ("config.json", b"{}".to_vec()),
        ("imatrix.dat", vec![0; 10]),
        ("mmproj-small-1.5-F16.gguf", vec![1; 1000]),
        ("F16/small-1.5-F16-00001-of-00002.gguf", vec![2; 1000]),
        ("F16/small-1.5-F16-00002-of-00002.gguf", vec![3; 1000]),
        ("small-1.5-Q2_K.gguf", vec![4; 1000]),
        ("small-1.5-Q4_K_M.gguf", model.clone()),
        ("small-1.5-Q8_0.gguf", model),
    ];
    let repo = "org/small-1.5-GGUF";
    let (hub, home) = (Hub::start(repo, &files, 0, None), scratch("pull-gguf"));
    let of_hub = |model: &str| pull_of(&hub, &home, model, &[]);
    let inspect = |model: &str| {
        let output = folio(&["inspect", model]).env("HF_HOME", &home).output().expect("the binary starts");
        (output.status.success(), text(&output))
    };
    let title = |name: &str| format!("{name} at {COMMIT}");

    let said = text(&of_hub(repo));
    assert_eq!(fetched(&home, repo), ["config.json", "small-1.5-Q4_K_M.gguf"], "{said}");
    for part in
        ["small-1.5-Q4_K_M.gguf", &format!("{repo}:Q8_0"), &format!("{repo}:F16"), &format!("folio run {repo}\n")]
    {
        assert!(said.contains(part), "{part} in {said}");
    }
    assert!(!said.contains("mmproj"), "{said}");
    for name in
        [repo.to_string(), format!("{repo}:Q4_K_M"), format!("{repo}:q4_k_m"), format!("{repo}/small-1.5-Q4_K_M.gguf")]
    {
        let (works, said) = inspect(&name);
        assert!(works && said.starts_with(&title(&name)), "{name}: {said}");
    }
    // Another quantization must be named explicitly.
    let (works, said) = inspect(&format!("{repo}:Q8_0"));
    assert!(
        !works && said.contains(&format!("folio pull {repo}:Q8_0")) && said.contains(&format!("{repo}:Q4_K_M")),
        "{said}"
    );
    let output = of_hub(&format!("{repo}:Q8_0"));
    assert!(text(&output).contains(&format!("folio run {repo}:Q8_0\n")), "{}", text(&output));
    assert!(inspect(&format!("{repo}:Q8_0")).0 && inspect(repo).0, "both are there now");
    let parts = of_hub(&format!("{repo}/F16/small-1.5-F16-00001-of-00002.gguf"));
    assert!(parts.status.success(), "{}", text(&parts));
    let expect = [
        "F16/small-1.5-F16-00001-of-00002.gguf",
        "F16/small-1.5-F16-00002-of-00002.gguf",
        "config.json",
        "small-1.5-Q4_K_M.gguf",
        "small-1.5-Q8_0.gguf",
    ];
    assert_eq!(fetched(&home, repo), expect);
    let unknown = of_hub(&format!("{repo}:Q9_9"));
    assert!(!unknown.status.success() && text(&unknown).contains(&format!("it has {repo}:F16")), "{}", text(&unknown));
}

#[test]
fn what_is_no_model_is_not_offered_to_run() {
    let adapter = [("adapter_config.json", b"{}".to_vec()), ("adapter_model.safetensors", vec![0; 100])];
    let (hub, home) = (Hub::start("org/lora", &adapter, 0, None), scratch("pull-lora"));
    let said = text(&pull_of(&hub, &home, "org/lora", &[]));
    assert!(said.contains("LoRA adapter") && !said.contains("folio run"), "{said}");
}

#[test]
fn what_describes_a_quantization_is_fetched_too() {
    let files = [
        ("config.json", b"{}".to_vec()),
        ("hf_quant_config.json", b"{}".to_vec()),
        ("model.safetensors", vec![0; 100]),
    ];
    let (hub, home) = (Hub::start("org/modelopt", &files, 0, None), scratch("pull-modelopt"));
    assert!(pull_of(&hub, &home, "org/modelopt", &[]).status.success());
    assert_eq!(fetched(&home, "org/modelopt"), ["config.json", "hf_quant_config.json", "model.safetensors"]);
}
