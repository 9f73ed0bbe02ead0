use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::translation::MOST_TAIL;
use super::*;
use crate::tokenizer::made;

/// Words of its own, and two special tokens.
fn words() -> Arc<Tokenizer> {
    let merges = ["h e", "l l", "he ll", "hell o", "o r", "Ġ w", "Ġw or", "Ã ©", "l d"];
    Arc::new(made::all_bytes(&merges, &["<s>", "<end>"], |_| ()))
}

/// A token a byte, with one of these special tokens and one of its own.
fn letters() -> Arc<Tokenizer> {
    Arc::new(made::all_bytes(&[], &["<other>", "<s>"], |_| ()))
}

/// A tokenizer that puts a space before every text.
fn pieces() -> Arc<Tokenizer> {
    Arc::new(made::sentence_piece(&["<s>", "<odd>"], &["▁", "h", "e", "l", "o", "lo", "▁he", "▁hel", "é"]))
}

fn pair(target: Arc<Tokenizer>, draft: Arc<Tokenizer>) -> Arc<Translator> {
    Arc::new(Translator::new(target, draft).expect("they carry text"))
}

fn refused(target: Arc<Tokenizer>, draft: Arc<Tokenizer>) -> String {
    Translator::new(target, draft).err().expect("they do not carry text").to_string()
}

fn following(pair: &Arc<Translator>, tokens: &[u32]) -> Translation {
    let mut translation = pair.begin();
    assert!(translation.follow(tokens));
    translation
}

#[test]
fn every_pair_carries_text() {
    let all = [words(), letters(), pieces()];
    for (target, draft) in all.iter().flat_map(|target| all.iter().map(move |draft| (target, draft))) {
        let pair = pair(Arc::clone(target), Arc::clone(draft));
        let text = "hello world, héllo  日本\n    hello 🦀";
        let tokens = target.encode(text, false).unwrap();
        let translation = following(&pair, &tokens);
        assert_eq!(translation.tokens(), draft.encode(text, false).unwrap());
        // And what comes behind it.
        let more = " hello worldé";
        let back = translation.back(&draft.encode_continuing(more).unwrap(), 99);
        assert_eq!(back, target.encode_continuing(more).unwrap());
        assert_eq!(translation.back(&draft.encode_continuing(more).unwrap(), 2), back[..2]);
        // And at the very beginning, where spaces are added and dropped.
        assert_eq!(
            pair.begin().back(&draft.encode("hello", false).unwrap(), 99),
            target.encode("hello", false).unwrap()
        );
    }
}

#[test]
fn tokens_for_tokens() {
    let pair = pair(words(), letters());
    assert!(pair.stretch() > 1.0, "{}", pair.stretch());
    let hello = words().encode("hello", false).unwrap();
    assert_eq!(hello.len(), 1);
    assert_eq!(following(&pair, &hello).tokens().len(), 5);
}

#[test]
fn parts_of_characters_wait() {
    let (target, draft) = (pieces(), letters());
    let pair = pair(Arc::clone(&target), Arc::clone(&draft));
    let tokens = target.encode("é日", false).unwrap();
    assert_eq!(tokens.len(), 1 + 1 + 3, "a space, a piece, and three bytes");
    let mut translation = pair.begin();
    for (end, text) in [(1, ""), (2, "é"), (3, "é"), (4, "é"), (5, "é日")] {
        assert!(translation.follow(&tokens[..end]));
        assert_eq!(draft.bytes_of(translation.tokens()), text.as_bytes());
    }
    // Behind two bytes of three, a draft that begins with the same character.
    let within = following(&pair, &tokens[..4]);
    let drafted = |text: &str| within.back(&draft.encode(text, false).unwrap(), 99);
    assert_eq!(drafted("日l"), [tokens[4], target.encode_continuing("l").unwrap()[0]]);
    assert_eq!(drafted("月l"), [0; 0]);
    assert_eq!(drafted("l"), [0; 0]);
    // A draft that ends within one.
    let whole = following(&pair, &tokens);
    let bytes = draft.encode("l日", false).unwrap();
    assert_eq!(whole.back(&bytes[..3], 99), target.encode_continuing("l").unwrap());
    // The target has the whole character as a token, but has begun to spell it.
    let first_byte = target.token_id("<0xC3>").unwrap();
    let spelt = following(&pair, &[tokens[0], first_byte]);
    assert_eq!(spelt.back(&draft.encode("él", false).unwrap(), 99), [0; 0]);
}

#[test]
fn what_is_no_text_at_all_becomes_a_mark() {
    let (target, draft) = (pieces(), letters());
    let wrong = target.token_id("<0xFF>").unwrap();
    let translation = following(&pair(Arc::clone(&target), Arc::clone(&draft)), &[wrong, wrong]);
    assert_eq!(draft.bytes_of(translation.tokens()), "\u{fffd}\u{fffd}".as_bytes());
}

#[test]
fn special_tokens_are_no_text() {
    let (target, draft) = (words(), letters());
    let pair = pair(Arc::clone(&target), Arc::clone(&draft));
    let id = |tokenizer: &Tokenizer, name: &str| tokenizer.token_id(name).unwrap();
    let hello = target.encode("hello", false).unwrap()[0];
    let spelt = draft.encode("hello", false).unwrap();
    let tokens = [id(&target, "<s>"), hello, id(&target, "<end>"), hello, 9999];
    let expected = [&[id(&draft, "<s>")], &spelt[..], &spelt].concat();
    for step in 1..=tokens.len() {
        let mut translation = pair.begin();
        tokens.chunks(step).fold(0, |end, chunk| {
            assert!(translation.follow(&tokens[..end + chunk.len()]));
            end + chunk.len()
        });
        assert_eq!(translation.tokens(), expected, "in steps of {step}");
    }
    // In a draft, one that both have stands for itself, and another one ends it.
    let translation = following(&pair, &tokens);
    let drafted = |names: &[&str]| {
        let ids = names.iter().flat_map(|name| match draft.token_id(name) {
            Some(id) => vec![id],
            None => draft.encode(name, false).unwrap(),
        });
        translation.back(&ids.collect::<Vec<_>>(), 99)
    };
    assert_eq!(drafted(&["hello", "<s>", "hello"]), [hello, id(&target, "<s>")]);
    assert_eq!(drafted(&["<s>"]), [id(&target, "<s>")]);
    assert_eq!(drafted(&["hello", "<other>", "hello"]), [hello]);
    // Letters that spell one do not become it.
    let letters: Vec<u32> = "ll<end>".bytes().map(|byte| id(&draft, &char::from(byte).to_string())).collect();
    assert_eq!(translation.back(&letters, 99), target.encode("ll", false).unwrap());
}

#[test]
fn the_draft_model_s_own_beginning_comes_once() {
    let framed = |file: &mut serde_json::Value| {
        let id = file["model"]["vocab"]["<s>"].clone();
        file["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [id], "tokens": ["<s>"]}}});
    };
    let (target, draft) = (words(), Arc::new(made::all_bytes(&[], &["<s>"], framed)));
    let pair = pair(Arc::clone(&target), Arc::clone(&draft));
    let plain = target.encode("hello", false).unwrap();
    let begun = [&[target.token_id("<s>").unwrap()], &plain[..]].concat();
    let expected = draft.encode("hello", true).unwrap();
    assert_eq!(expected.len(), 6);
    assert_eq!(following(&pair, &plain).tokens(), expected);
    assert_eq!(following(&pair, &begun).tokens(), expected);
}

/// A step costs its own tokens and a tail, and what is before that tail stays.
#[test]
fn a_long_text_is_translated_once() {
    let (target, draft) = (words(), letters());
    let pair = pair(Arc::clone(&target), Arc::clone(&draft));
    for text in ["hello world; ".repeat(900), "日本語".repeat(900), "x".repeat(9000)] {
        let tokens = target.encode(&text, false).unwrap();
        let mut translation = pair.begin();
        let mut before: Vec<u32> = Vec::new();
        for end in 1..=tokens.len() {
            assert!(translation.follow(&tokens[..end]));
            assert!(translation.tail.len() <= MOST_TAIL);
            let same = before.iter().zip(translation.tokens()).take_while(|(a, b)| a == b).count();
            assert!(same + MOST_TAIL >= before.len(), "{same} of {} are left", before.len());
            before.clear();
            before.extend(translation.tokens());
        }
        assert!(draft.bytes_of(&before) == text.as_bytes());
        let mut at_once = pair.begin();
        let calls = std::iter::repeat_with(|| at_once.follow(&tokens)).take_while(|has_all| !has_all).count();
        assert_eq!(calls, (tokens.len() - 1) / 4096);
        assert!(draft.bytes_of(at_once.tokens()) == text.as_bytes());
    }
}

#[test]
fn a_pair_that_loses_text_is_refused() {
    let lower = |file: &mut serde_json::Value| file["normalizer"] = json!({"type": "Lowercase"});
    let error = refused(words(), Arc::new(made::all_bytes(&[], &[], lower)));
    assert!(
        error.contains("\"The quick") && error.contains("from the draft model's tokenizer as \"the quick"),
        "{error}"
    );
    let error = refused(Arc::new(made::all_bytes(&[], &[], lower)), words());
    assert!(error.contains("from the model's tokenizer"), "{error}");
    let unusual = |file: &mut serde_json::Value| {
        file["decoder"] = json!({"type": "Sequence", "decoders": [file["decoder"].take()]});
    };
    let error = refused(words(), Arc::new(made::all_bytes(&[], &[], unusual)));
    assert!(error.contains("only the draft model's tokenizer itself knows"), "{error}");
    let few: Vec<String> = (b'!'..=b'~').map(|byte| char::from(byte).to_string()).collect();
    let few: Vec<&str> = few.iter().map(String::as_str).collect();
    refused(words(), Arc::new(made::byte_level(&few, &[], &[], |_| ())));
}

#[test]
fn few_tokens_may_come_back_as_others() {
    let composes = |file: &mut serde_json::Value| file["normalizer"] = json!({"type": "NFC"});
    let draft = Arc::new(made::all_bytes(&[], &[], composes));
    // An accent behind a letter: composed, it is one character of two bytes.
    let accents = |letters: &[&str]| -> Arc<Tokenizer> {
        let joined: Vec<String> = letters.iter().map(|letter| format!("{letter} Ìģ")).collect();
        let merges: Vec<&str> = std::iter::once("Ì ģ").chain(joined.iter().map(String::as_str)).collect();
        Arc::new(made::all_bytes(&merges, &[], |_| ()))
    };
    let target = accents(&["e"]);
    let translation =
        following(&pair(Arc::clone(&target), Arc::clone(&draft)), &target.encode("e\u{301}", false).unwrap());
    assert_eq!(draft.bytes_of(translation.tokens()), "é".as_bytes());
    let error = refused(accents(&["e", "a", "o", "i"]), draft);
    assert!(error.contains("4 of 133 tokens of the model's vocabulary") && error.contains("\"e\\u{301}\""), "{error}");
}

static PAIRS: LazyLock<[Arc<Translator>; 2]> = LazyLock::new(|| [pair(words(), letters()), pair(words(), pieces())]);

proptest! {
    /// However the tokens come, the draft model has the text of all of them.
    #[test]
    fn any_cut_of_any_tokens_is_the_same_text(
        ids in prop::collection::vec(0u32..265, 0..60),
        cuts in prop::collection::vec(1usize..60, 0..8),
        spaced in any::<bool>(),
    ) {
        let pair = &PAIRS[usize::from(spaced)];
        let mut detokenizer = crate::Detokenizer::new(Arc::clone(&pair.target), true);
        let text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        let mut translation = pair.begin();
        for end in (0..ids.len()).filter(|at| cuts.contains(at)).chain([ids.len()]) {
            prop_assert!(translation.follow(&ids[..end]));
        }
        prop_assert_eq!(pair.draft.decode(translation.tokens(), false), text);
    }
}
