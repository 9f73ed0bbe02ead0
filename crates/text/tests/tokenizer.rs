//! Tokenizers as a whole: text comes back, and every way of cutting a stream gives the same text.

use std::path::Path;
use std::sync::Arc;

use folio_testing::Rng;
use folio_text::{Detokenizer, GgufVocab, Tokenizer};
use proptest::prelude::*;

const FIXTURE: &[u8] = include_bytes!("data/tokenizer.json");

fn fixture() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_json(FIXTURE).unwrap())
}

/// The fixture with a decoder that only the library knows.
fn library_decoded() -> Arc<Tokenizer> {
    let mut file: serde_json::Value = serde_json::from_slice(FIXTURE).unwrap();
    let byte_level = file["decoder"].take();
    file["decoder"] = serde_json::json!({"type": "Sequence", "decoders": [byte_level]});
    Arc::new(Tokenizer::from_json(file.to_string().as_bytes()).unwrap())
}

/// Bytes, a few words, a control token and a user-defined one; scores prefer longer words.
fn sentence_piece() -> Arc<Tokenizer> {
    let mut vocab = GgufVocab { model: "llama".into(), unk: Some(0), bos: Some(1), ..Default::default() };
    let mut add = |token: &str, kind: i32, score: f32| {
        vocab.tokens.push(token.into());
        vocab.token_types.push(kind);
        vocab.scores.push(score);
    };
    add("<unk>", 2, 0.0);
    add("<s>", 3, 0.0);
    add("<mark>", 4, 0.0);
    (0..=255).for_each(|byte| add(&format!("<0x{byte:02X}>"), 6, 0.0));
    for (index, piece) in ["▁", "a", "b", "c", "é", "ab", "▁a", "bc", "▁ab", "abc", "▁▁"].iter().enumerate()
    {
        add(piece, 1, index as f32 - 20.0);
    }
    Arc::new(Tokenizer::from_gguf(vocab).unwrap())
}

fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> String {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), skip_special);
    let mut text: String = ids.iter().map(|id| detokenizer.push(*id)).collect();
    text.push_str(&detokenizer.finish());
    text
}

#[test]
fn everything_can_be_shared_between_threads() {
    fn shareable<T: Send + Sync>() {}
    shareable::<Tokenizer>();
    shareable::<Detokenizer>();
    shareable::<folio_text::ChatTemplate>();
    shareable::<folio_text::StopMatcher>();
}

#[test]
fn the_fixture_encodes_as_the_library_says() {
    let tokenizer = fixture();
    let text = "the café 日本 <tool>x🎉<eos>";
    let ids = tokenizer.encode(text, false).unwrap();
    // The ids that the Python package tokenizers gives.
    assert_eq!(ids, [260, 266, 276, 301, 274, 223, 316, 90, 303, 239, 234, 1]);
    assert_eq!(tokenizer.decode(&ids, false), text);
    assert_eq!(tokenizer.decode(&ids, true), "the café 日本 <tool>x🎉", "only special tokens are left out");
    let bos = tokenizer.token_id("<bos>").unwrap();
    assert_eq!(tokenizer.encode("a", true).unwrap()[0], bos);
    assert!(tokenizer.is_special(bos) && !tokenizer.is_special(tokenizer.token_id("<tool>").unwrap()));
    assert_eq!(tokenizer.token_bytes(tokenizer.token_id("Ġthe").unwrap()), Some(&b" the"[..]));
    assert_eq!(tokenizer.token_bytes(tokenizer.vocab_size() as u32), None);
}

#[test]
fn sentence_pieces_merge_by_score() {
    let tokenizer = sentence_piece();
    let check = |text: &str, expect: &[&str]| {
        let ids: Vec<u32> = expect.iter().map(|token| tokenizer.token_id(token).unwrap()).collect();
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text}");
        assert_eq!(tokenizer.decode(&ids, false), text);
    };
    check("abc", &["▁", "abc"]);
    check("ab", &["▁ab"]);
    check("a bc", &["▁a", "▁", "bc"]);
    check("  a", &["▁▁", "▁a"]);
    check("é日", &["▁", "é", "<0xE6>", "<0x97>", "<0xA5>"]);
    check("", &[]);
    let ids = tokenizer.encode("a<mark>b", true).unwrap();
    let tokens = ["<s>", "▁a", "<mark>", "▁", "b"].map(|token| tokenizer.token_id(token).unwrap());
    assert_eq!(ids, tokens, "the BOS token is added, and a space after a token taken whole");
    let continuing = &mut Detokenizer::continuing(Arc::clone(&tokenizer), true);
    assert_eq!(continuing.push(tokenizer.token_id("▁a").unwrap()), " a");
}

#[test]
fn gguf_metadata_is_checked() {
    let check = |vocab: GgufVocab, expect: &str| {
        let error = Tokenizer::from_gguf(vocab).err().unwrap().to_string();
        assert!(error.contains(expect), "{error}");
    };
    let good = GgufVocab { model: "gpt2".into(), pre: "gpt-2".into(), tokens: vec!["a".into()], ..Default::default() };
    check(GgufVocab { tokens: vec![], ..good.clone() }, "tokenizer.ggml.tokens");
    check(GgufVocab { model: "bert".into(), ..good.clone() }, "tokenizer.ggml.model");
    check(GgufVocab { pre: "nonsense".into(), ..good.clone() }, "tokenizer.ggml.pre: the splitting rule \"nonsense\"");
    check(GgufVocab { bos: Some(1), ..good.clone() }, "tokenizer.ggml.bos_token_id");
    check(GgufVocab { scores: vec![0.0; 2], ..good.clone() }, "tokenizer.ggml.scores");
    check(GgufVocab { merges: vec!["ab".into()], ..good.clone() }, "tokenizer.ggml.merges: entry 0");
    check(GgufVocab { merges: vec!["a b".into()], ..good.clone() }, "tokenizer.ggml.merges");
    check(GgufVocab { add_eos: Some(true), ..good.clone() }, "tokenizer.ggml.eos_token_id");
    assert!(Tokenizer::from_gguf(good).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 128, ..Default::default() })]

    #[test]
    fn text_comes_back(text in "[ -~éß日本🎉\n\t]{0,40}") {
        for tokenizer in [fixture(), library_decoded()] {
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, false), text.clone());
            prop_assert_eq!(stream(&tokenizer, &ids, false), text.clone());
        }
        let spm = sentence_piece();
        let ids = spm.encode(&text, false).unwrap();
        prop_assert_eq!(spm.decode(&ids, false), text.clone());
    }

    #[test]
    fn a_stream_of_any_tokens_is_their_text(
        ids in prop::collection::vec(0u32..340, 0..30),
        skip_special: bool,
    ) {
        for tokenizer in [fixture(), sentence_piece()] {
            prop_assert_eq!(stream(&tokenizer, &ids, skip_special), tokenizer.decode(&ids, skip_special));
        }
    }
}

#[test]
fn the_trained_model_s_tokenizer_round_trips() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/folio-rust-42m/tokenizer.json");
    let Ok(bytes) = std::fs::read(&path) else {
        return folio_testing::skip!(Shared, "models/folio-rust-42m is not there");
    };
    let tokenizer = Arc::new(Tokenizer::from_json(&bytes).unwrap());
    assert_eq!(tokenizer.vocab_size(), 16384);
    let text = "<|im_start|>user\nWhat does `Rc::clone` do?<|im_end|>\nfn main() { let s = \"héé 日本 🎉\"; }\n";
    let ids = tokenizer.encode(text, true).unwrap();
    assert_eq!((ids[0], tokenizer.is_special(ids[0])), (1, true));
    assert_eq!(tokenizer.decode(&ids, false), text);
    assert_eq!(stream(&tokenizer, &ids, false), text);
    // A fixed pseudo-random walk over the whole vocabulary: bytes that are no text included.
    let mut rng = Rng::new(1);
    let ids: Vec<u32> = (0..5000).map(|_| rng.below(16384) as u32).collect();
    for skip_special in [false, true] {
        assert_eq!(stream(&tokenizer, &ids, skip_special), tokenizer.decode(&ids, skip_special));
    }
}
