//! `--packed-cache`: a file of packed weights that is damaged before a start, or under a running
//! server. Answers stay the same.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use folio_testing::wait::until;
use lzma_rust2::LzmaReader;
use serde_json::json;

use crate::server::Server;
use crate::{folio, scratch};

/// The small model in a folder of its own.
fn model(name: &str) -> PathBuf {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let folder = scratch(name);
    let model = folder.join("small.gguf");
    std::fs::copy(models.join("folio-rust-7m.gguf"), &model).expect("a model");
    let packed = std::fs::read(models.join("tokenizer.json.lzma")).expect("a tokenizer");
    let mut json = Vec::new();
    let unpacked = LzmaReader::new_mem_limit(&packed[..], 128 << 10, None).expect("packed").read_to_end(&mut json);
    unpacked.expect("a whole file");
    std::fs::write(folder.join("tokenizer.json"), json).expect("it can be written");
    model
}

fn start(model: &Path) -> Server {
    let model = model.to_str().expect("UTF-8");
    Server::start(&[model, "--packed-cache", "on", "--max-num-seqs", "2", "--max-model-len", "256"])
}

fn ask(server: &Server) -> String {
    let body = json!({"prompt": "fn main() {", "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    let (status, answer) = server.post("/v1/completions", body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["text"].as_str().expect("a text").to_owned()
}

fn packed_file(model: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(model.parent()?.join(".folio")).ok()?;
    entries.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|ending| ending == "packed"))
}

/// A page of garbage between any two of the sampled pages.
fn damage(path: &Path) {
    let file = File::options().write(true).open(path).expect("it is there");
    let len = file.metadata().expect("a file").len();
    for at in 0..31 {
        file.write_all_at(&[0x3f; 4096], len * (2 * at + 1) / 62).expect("it can be written to");
    }
}

fn cut(path: &Path, len: u64) {
    File::options().write(true).open(path).and_then(|file| file.set_len(len)).expect("it can be cut");
}

fn assert_told(lines: &[String], path: &Path) {
    let path = path.to_str().expect("UTF-8");
    assert!(lines.iter().any(|line| line.contains(path) && line.contains("damaged and was removed")), "{lines:#?}");
}

#[test]
fn damage_costs_time_and_no_answer() {
    let model = model("packed-damage");
    let server = start(&model);
    let expected = ask(&server);
    until("a packed file", || packed_file(&model).is_some());
    server.kill();
    let path = packed_file(&model).expect("it was there");

    // Intact: it is used and stays.
    let server = start(&model);
    assert_eq!(ask(&server), expected);
    assert!(path.exists());
    let said = server.kill();
    assert!(said.iter().all(|line| !line.contains("damaged")), "{said:#?}");

    // Damaged before the start: for a server, for one that computes before it is ready, and for a
    // command.
    let good = std::fs::read(&path).expect("it is there");
    let rewrite = || {
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, &good).expect("it can be written");
    };
    damage(&path);
    let server = start(&model);
    assert_eq!(ask(&server), expected, "of a file that was damaged before the start");
    assert_eq!(ask(&server), expected, "and once more");
    assert!(!path.exists(), "it is removed");
    assert_told(&server.kill(), &path);

    rewrite();
    damage(&path);
    let kv = model.with_file_name("kv");
    let server = Server::start(&[
        model.to_str().expect("UTF-8"),
        "--packed-cache",
        "on",
        "--max-num-seqs",
        "2",
        "--max-model-len",
        "256",
        "--kv-disk",
        kv.to_str().expect("UTF-8"),
    ]);
    assert_eq!(ask(&server), expected, "with a disk tier");
    assert_told(&server.greeting, &path);
    server.kill();

    let run = || {
        let flags = ["--packed-cache", "on", "--temperature", "0", "--max-tokens", "40", "--raw", "-p", "fn main() {"];
        let output = folio(&[&["run", model.to_str().expect("UTF-8")], &flags[..]].concat()).output();
        let output = output.expect("it runs");
        assert!(output.status.success(), "{output:?}");
        (output.stdout, String::from_utf8(output.stderr).expect("UTF-8"))
    };
    rewrite();
    let (fine, said) = run();
    assert!(!said.contains("damaged"), "{said}");
    damage(&path);
    let (answer, said) = run();
    assert_eq!(String::from_utf8_lossy(&answer), String::from_utf8_lossy(&fine), "of `folio run`");
    assert_told(&[said], &path);

    // Under a running server: overwritten, truncated, emptied.
    type Change = fn(&Path);
    let changes: [(&str, Change); 3] = [
        ("overwritten", damage),
        ("truncated", |path| cut(path, std::fs::metadata(path).expect("a file").len() / 2)),
        ("emptied", |path| cut(path, 0)),
    ];
    for (what, change) in changes {
        rewrite();
        let mut server = start(&model);
        assert_eq!(ask(&server), expected, "before it is {what}");
        change(&path);
        assert_eq!(ask(&server), expected, "after it was {what}");
        assert_eq!(ask(&server), expected, "after it was {what}, again");
        assert!(!path.exists(), "{what}: it is removed");
        assert_eq!(server.child.try_wait().expect("it can be asked"), None, "{what}: the server runs on");
        assert_told(&server.kill(), &path);
    }

    // Written anew by the next start.
    let server = start(&model);
    assert_eq!(ask(&server), expected);
    until("a new packed file", || path.exists());
    server.kill();
    assert!(std::fs::read(&path).expect("it is there") == good, "the same as at first");
    std::fs::remove_dir_all(model.parent().expect("a folder")).expect("it can be removed");
}
