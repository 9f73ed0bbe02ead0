//! tokenizer.json, read by the `tokenizers` crate.
//!
//! The file is untrusted: the library may refuse it or panic, and both become an error that names
//! the part of the file that does not load. Settings that would change results silently (dropout,
//! truncation, padding) are refused or switched off.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PaddingParams, PostProcessorWrapper,
    PreTokenizerWrapper, TruncationParams,
};

use super::{DecodeStyle, Engine, Frame, MAX_VOCAB, Piece, Tokenizer, bytes};
use crate::{Error, Result};

/// Ids that a small vocabulary may leave out.
const MAX_HOLES: usize = 1 << 16;

pub fn load(file: &[u8]) -> Result<Tokenizer> {
    let fail = |field: &str, reason: String| Error::TokenizerJson { field: field.into(), reason };
    let json: Value = serde_json::from_slice(file).map_err(|error| fail("file", error.to_string()))?;
    check(&json)?;
    let loaded = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(file)));
    let library = match loaded {
        Ok(Ok(library)) => library,
        Ok(Err(error)) => return Err(blame(&json, error.to_string())),
        Err(_) => return Err(blame(&json, "the loader panicked".into())),
    };
    let style = decode_style(json.get("decoder").unwrap_or(&Value::Null));
    wrap(library, style, Frame::default()).map_err(|reason| fail("model.vocab", reason))
}

/// Puts the table of pieces beside a loaded library tokenizer.
pub fn wrap(
    mut library: tokenizers::Tokenizer,
    style: JsonStyle,
    frame: Frame,
) -> std::result::Result<Tokenizer, String> {
    library.with_padding(None);
    library.with_truncation(None).map_err(|error| error.to_string())?;
    let vocabulary = catch_unwind(AssertUnwindSafe(|| library.get_vocab(true)))
        .map_err(|_| "the vocabulary cannot be listed".to_string())?;
    if vocabulary.is_empty() {
        return Err("it has no tokens".into());
    }
    let largest = vocabulary.values().copied().max().unwrap_or(0) as usize;
    if largest >= MAX_VOCAB {
        return Err(format!("id {largest} is beyond the limit of {MAX_VOCAB}"));
    }
    // The table has a place for every id up to the largest: one far id must not make it large.
    if largest > MAX_HOLES + 2 * vocabulary.len() {
        return Err(format!("id {largest} is far beyond the {} tokens", vocabulary.len()));
    }
    let added = library.get_added_tokens_decoder();
    let mut pieces: Vec<Option<Piece>> = (0..=largest).map(|_| None).collect();
    for (token, id) in vocabulary {
        let bytes = match style {
            JsonStyle::ByteLevel => bytes::of_byte_level(&token),
            JsonStyle::SentencePiece { .. } => bytes::of_sentence_piece(&token),
            JsonStyle::Other => token.into_bytes(),
        };
        let special = added.get(&id).is_some_and(|token| token.special);
        pieces[id as usize] = Some(Piece { bytes: bytes.into(), special });
    }
    let style = match style {
        JsonStyle::ByteLevel => DecodeStyle::Bytes { drop_leading_space: false },
        JsonStyle::SentencePiece { drop_leading_space } => DecodeStyle::Bytes { drop_leading_space },
        JsonStyle::Other => DecodeStyle::Library,
    };
    Ok(Tokenizer { engine: Engine::Library(Box::new(library)), pieces, style, frame })
}

/// The decoders whose work the byte table does.
#[derive(Clone, Copy)]
pub enum JsonStyle {
    ByteLevel,
    SentencePiece { drop_leading_space: bool },
    Other,
}

fn decode_style(decoder: &Value) -> JsonStyle {
    let kind = |value: &Value| value.get("type").and_then(Value::as_str).unwrap_or_default().to_string();
    if kind(decoder) == "ByteLevel" {
        return JsonStyle::ByteLevel;
    }
    let steps = decoder.get("decoders").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let is_replace =
        |step: &Value| kind(step) == "Replace" && step["pattern"]["String"] == "\u{2581}" && step["content"] == " ";
    let is_strip =
        |step: &Value| kind(step) == "Strip" && step["content"] == " " && step["start"] == 1 && step["stop"] == 0;
    match steps {
        [replace, fallback, fuse, rest @ ..]
            if is_replace(replace) && kind(fallback) == "ByteFallback" && kind(fuse) == "Fuse" =>
        {
            match rest {
                [] => JsonStyle::SentencePiece { drop_leading_space: false },
                [strip] if is_strip(strip) => JsonStyle::SentencePiece { drop_leading_space: true },
                _ => JsonStyle::Other,
            }
        }
        _ => JsonStyle::Other,
    }
}

/// Refuses files that the library would accept but Folio does not.
fn check(json: &Value) -> Result<()> {
    let fail = |field: &str, reason: String| Err(Error::TokenizerJson { field: field.into(), reason });
    if !json.is_object() {
        return fail("file", "expected an object".into());
    }
    let Some(model) = json.get("model").filter(|model| model.is_object()) else {
        return fail("model", "expected an object".into());
    };
    if model.get("dropout").and_then(Value::as_f64).is_some_and(|dropout| dropout != 0.0) {
        return fail("model.dropout", "expected none: it makes encoding random".into());
    }
    for (index, token) in json.get("added_tokens").and_then(Value::as_array).into_iter().flatten().enumerate() {
        let id = token.get("id").and_then(Value::as_u64);
        if id.is_none_or(|id| id >= MAX_VOCAB as u64) {
            let found = token.get("id").unwrap_or(&Value::Null);
            return fail(&format!("added_tokens[{index}].id"), format!("expected 0 to {MAX_VOCAB}, found {found}"));
        }
    }
    Ok(())
}

/// Finds the part of the file that does not load by itself.
fn blame(json: &Value, reason: String) -> Error {
    fn loads<T: DeserializeOwned>(value: &Value) -> std::result::Result<(), String> {
        if value.is_null() {
            return Ok(());
        }
        match catch_unwind(AssertUnwindSafe(|| serde_json::from_value::<T>(value.clone()).map(drop))) {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) => Err("the loader panicked".into()),
        }
    }
    let part = |name: &str| json.get(name).unwrap_or(&Value::Null).clone();
    let parts = [
        ("version", loads::<String>(&part("version"))),
        ("truncation", loads::<TruncationParams>(&part("truncation"))),
        ("padding", loads::<PaddingParams>(&part("padding"))),
        ("added_tokens", loads::<Vec<AddedToken>>(&part("added_tokens"))),
        ("normalizer", loads::<NormalizerWrapper>(&part("normalizer"))),
        ("pre_tokenizer", loads::<PreTokenizerWrapper>(&part("pre_tokenizer"))),
        ("post_processor", loads::<PostProcessorWrapper>(&part("post_processor"))),
        ("decoder", loads::<DecoderWrapper>(&part("decoder"))),
        ("model", loads::<ModelWrapper>(&part("model"))),
    ];
    for field in ["version", "added_tokens"] {
        if json.get(field).is_some_and(Value::is_null) {
            return Error::TokenizerJson { field: field.into(), reason };
        }
    }
    for (field, result) in parts {
        if let Err(reason) = result {
            return Error::TokenizerJson { field: field.into(), reason };
        }
    }
    Error::TokenizerJson { field: "file".into(), reason }
}
