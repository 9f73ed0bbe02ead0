//! A program outside the workspace that depends on this crate by path: it builds offline, with the
//! default features alone, and answers.

use std::path::Path;
use std::process::Command;

use folio_testing::Folder;

const MANIFEST: &str = r#"[package]
name = "folio-outside"
version = "0.0.0"
edition = "2024"

[workspace]

[dependencies]
folio-session = { path = "SESSION" }

"#;

const PROGRAM: &str = r#"
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let session = folio_session::Session::open(None, &folio_session::Options::default())?;
    println!("{}", session.answer("What does `Rc::clone` do?")?);
    Ok(())
}
"#;

#[test]
fn a_crate_outside_the_workspace_answers() {
    let session = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = session.parent().and_then(Path::parent).expect("the crate lies in crates/ of the workspace");
    let read = |file: &str| std::fs::read_to_string(root.join(file)).expect("the workspace has it");
    // The workspace's own profile, so that packages that are compiled already are taken as they are.
    let workspace = read("Cargo.toml");
    let profile = workspace.find("[profile.dev]").expect("the workspace has a profile for tests");
    let folder = Folder::new("outside");
    let manifest = MANIFEST.replace("SESSION", &session.to_string_lossy());
    folder.write("Cargo.toml", manifest + &workspace[profile..]);
    folder.write("Cargo.lock", read("Cargo.lock"));
    std::fs::create_dir(folder.join("src")).expect("the folder is writable");
    folder.write("src/main.rs", PROGRAM);

    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it lies in the target folder");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["run", "--offline", "--quiet"]).current_dir(&*folder).env("CARGO_TARGET_DIR", target);
    let output = cargo.output().expect("cargo runs");
    let answer = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(answer.split_whitespace().count() > 5, "an answer of several words: {answer:?}");
}
