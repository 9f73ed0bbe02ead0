//! Small tokenizers for tests.

use serde_json::{Value, json};

use super::{GgufVocab, Tokenizer, bytes};

/// A byte-level tokenizer of these tokens, with special ones behind them. Each pair in `merges`,
/// written with a space between, is joined to a token.
pub fn byte_level(tokens: &[&str], merges: &[&str], special: &[&str], change: impl FnOnce(&mut Value)) -> Tokenizer {
    let joined: Vec<String> = merges.iter().map(|merge| merge.replace(' ', "")).collect();
    let all = tokens.iter().copied().chain(joined.iter().map(String::as_str)).chain(special.iter().copied());
    let vocab: serde_json::Map<String, Value> = all.enumerate().map(|(id, token)| (token.into(), id.into())).collect();
    let added = special.iter().map(|token| {
        json!({"id": vocab[*token], "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
    });
    change(&mut file);
    Tokenizer::from_json(file.to_string().as_bytes()).expect("a tokenizer")
}

/// One with a token for every byte.
pub fn all_bytes(merges: &[&str], special: &[&str], change: impl FnOnce(&mut Value)) -> Tokenizer {
    let letters: Vec<String> = bytes::alphabet().map(String::from).collect();
    byte_level(&letters.iter().map(String::as_str).collect::<Vec<_>>(), merges, special, change)
}

/// A SentencePiece tokenizer of special tokens, all bytes and pieces; later pieces are joined
/// first.
pub fn sentence_piece(special: &[&str], pieces: &[&str]) -> Tokenizer {
    let mut vocab = GgufVocab { model: "llama".into(), add_bos: Some(false), ..GgufVocab::default() };
    let letters: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    let all = special.iter().map(|token| (*token, 3)).chain(letters.iter().map(|letter| (letter.as_str(), 6)));
    for (id, (token, kind)) in all.chain(pieces.iter().map(|piece| (*piece, 1))).enumerate() {
        vocab.tokens.push(token.into());
        vocab.token_types.push(kind);
        vocab.scores.push(id as f32);
    }
    Tokenizer::from_gguf(vocab).expect("a tokenizer")
}
