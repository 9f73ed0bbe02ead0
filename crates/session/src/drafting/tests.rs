use super::*;
use crate::options::SpeculateOptions;

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

fn open(model: &Path, method: &str) -> Result<Option<Drafting>> {
    open_named(Some(&model.to_string_lossy()), method)
}

fn open_named(model: Option<&str>, method: &str) -> Result<Option<Drafting>> {
    let method = method.parse().expect("a method");
    let options = Options { speculate: SpeculateOptions { method, ..Default::default() }, ..Options::default() };
    let assets = Assets::open(model, &options)?;
    Drafting::open(&assets, &options)
}

fn refused(model: &Path, method: &str) -> String {
    open(model, method).err().map(|error| format!("{error:#}")).expect("it cannot be had")
}

#[test]
fn nothing_is_guessed_unless_asked() {
    assert!(open(&models().join("folio-rust-7m.gguf"), "off").expect("nothing to open").is_none());
}

#[test]
fn the_smaller_model_is_the_larger_one_s_sibling_and_not_the_other_way() {
    let found = open(&models().join("folio-rust-42m.gguf"), "draft").expect("it is there");
    let found = found.expect("a method");
    assert!(
        matches!(&found.method, OpenedMethod::Draft(draft) if draft.assets.name == "folio-rust-7m"),
        "{}",
        found.describe()
    );
    let error = refused(&models().join("folio-rust-7m.gguf"), "draft");
    assert!(error.contains("no smaller sibling lies beside folio-rust-7m"), "{error}");
}

#[test]
fn heads_lie_beside_the_larger_model() {
    let found = |method| open(&models().join("folio-rust-42m.gguf"), method).expect("it is there");
    for (method, file) in [("eagle", "42m.eagle.gguf"), ("medusa", "42m.medusa.gguf"), ("auto", "42m.eagle.gguf")] {
        let found = found(method).expect("a method");
        let heads = match &found.method {
            OpenedMethod::Eagle(heads) if method != "medusa" => heads,
            OpenedMethod::Medusa(heads) if method == "medusa" => heads,
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
        let found = open_named(None, method).expect("it is inside").expect("a method");
        assert_eq!(found.describe(), said);
        let shares_all = |draft: &Draft| matches!(draft.tokens, Tokens::Shared(16_384..));
        assert!(!matches!(&found.method, OpenedMethod::Draft(draft) if !shares_all(draft)), "{method}");
    }
}

#[cfg(not(feature = "embedded-model"))]
#[test]
fn a_build_without_a_model_says_so() {
    let error = open_named(None, "eagle").err().map(|error| format!("{error:#}"));
    assert!(error.is_some_and(|error| error.contains("no built-in model")));
}

#[test]
fn a_model_by_itself_goes_by_what_was_said() {
    let found = open(&models().join("folio-rust-7m.gguf"), "auto").expect("always there");
    assert!(matches!(found.expect("a method").method, OpenedMethod::Suffix));
}

#[test]
fn what_is_missing_is_named() {
    let model = models().join("folio-rust-7m.gguf");
    assert!(refused(&model, "medusa").contains("name a file: medusa:FILE"));
    assert!(refused(&model, "eagle:nowhere.gguf").contains("nowhere.gguf"));
    assert!(refused(&model, "draft:./nowhere").contains("draft:./nowhere"));
}
