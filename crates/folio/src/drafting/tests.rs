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
    open_named(Some(&model.to_string_lossy()), flags)
}

fn open_named(model: Option<&str>, flags: &[&str]) -> Result<Option<Drafting>> {
    let args = Line::try_parse_from([&["folio"], flags].concat()).expect("flags parse").engine;
    let assets = Assets::open(model, None)?;
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
fn heads_lie_beside_the_larger_model() {
    let found = |method| open(&models().join("folio-rust-42m.gguf"), &["--speculate", method]).expect("it is there");
    for (method, file) in [("eagle", "42m.eagle.gguf"), ("medusa", "42m.medusa.gguf"), ("auto", "42m.eagle.gguf")] {
        let found = found(method).expect("a method");
        let heads = match &found.method {
            Opened::Eagle(heads) if method != "medusa" => heads,
            Opened::Medusa(heads) if method == "medusa" => heads,
            _ => panic!("{method}: {}", found.describe()),
        };
        assert!(heads.name.ends_with(file), "{method}: {}", heads.name);
    }
}

#[cfg(feature = "embedded-model")]
#[test]
fn the_built_in_model_needs_no_files() {
    for (method, said) in [
        ("eagle", "an EAGLE head, built in (eagle)"),
        ("medusa", "Medusa heads, built in (medusa)"),
        ("draft", "the draft model folio-rust-7m"),
        ("auto", "an EAGLE head, built in (eagle)"),
    ] {
        let found = open_named(None, &["--speculate", method]).expect("it is inside").expect("a method");
        assert_eq!(found.describe(), said);
        let shares_all = |draft: &Draft| matches!(draft.tokens, Tokens::Shared(16_384..));
        assert!(!matches!(&found.method, Opened::Draft(draft) if !shares_all(draft)), "{method}");
    }
}

#[cfg(not(feature = "embedded-model"))]
#[test]
fn a_build_without_a_model_says_so() {
    let error = open_named(None, &["--speculate", "eagle"]).err().map(|error| format!("{error:#}"));
    assert!(error.is_some_and(|error| error.contains("no built-in model")));
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
