use clap::Parser;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    engine: EngineArgs,
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

fn open(model: &Path, flags: &[&str]) -> Result<Option<Drafting>> {
    let args = Line::try_parse_from([&["folio"], flags].concat()).expect("flags parse").engine;
    let assets = Assets::open(Some(&model.to_string_lossy()), None)?;
    Drafting::open(&assets, &args)
}

fn refused(model: &Path, flags: &[&str]) -> String {
    open(model, flags).err().map(|error| format!("{error:#}")).expect("it cannot be had")
}

#[test]
fn nothing_is_guessed_unless_asked() {
    assert!(open(&models().join("folio-rust-7m.gguf"), &[]).expect("nothing to open").is_none());
}

#[test]
fn the_smaller_model_is_the_larger_one_s_sibling_and_not_the_other_way() {
    let found = open(&models().join("folio-rust-42m.gguf"), &["--speculate", "draft"]).expect("it is there");
    let found = found.expect("a method");
    assert!(
        matches!(&found.method, Opened::Draft(draft) if draft.assets.name == "folio-rust-7m"),
        "{}",
        found.describe()
    );
    let error = refused(&models().join("folio-rust-7m.gguf"), &["--speculate", "draft"]);
    assert!(error.contains("no smaller sibling lies beside folio-rust-7m"), "{error}");
}

#[test]
fn a_model_by_itself_goes_by_what_was_said() {
    let found = open(&models().join("folio-rust-7m.gguf"), &["--speculate", "auto"]).expect("always there");
    assert!(matches!(found.expect("a method").method, Opened::Suffix));
}

#[test]
fn what_is_missing_is_named() {
    let model = models().join("folio-rust-7m.gguf");
    assert!(refused(&model, &["--speculate", "medusa"]).contains("name a file: medusa:FILE"));
    assert!(refused(&model, &["--speculate", "eagle:nowhere.gguf"]).contains("nowhere.gguf"));
    assert!(refused(&model, &["--speculate", "draft:./nowhere"]).contains("draft:./nowhere"));
}
