//! Text to token ids and back, whatever file the tokenizer came from.
//!
//! Two engines encode: the `tokenizers` crate (tokenizer.json, and the BPE kinds of GGUF rebuilt as
//! one) and a SentencePiece merge written here (the "llama" kind of GGUF). Decoding does not go
//! through either: every token's bytes lie in one table, and text is those bytes read as UTF-8.
//! Only tokenizers with an unusual decoder go the slow way.

mod bpe;
mod bytes;
mod common;
mod continuing;
mod control;
mod ends;
mod gguf;
mod json;
#[cfg(test)]
pub(crate) mod made;
mod pretokenize;
mod spm;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use self::control::{ControlTokens, Mark};
pub use self::gguf::GgufVocab;
use self::spm::SentencePiece;
use crate::{Error, Result};

/// Ids beyond this are nonsense: no published vocabulary has a tenth of it.
const MAX_VOCAB: usize = 1 << 24;

/// Shareable: every method takes `&self`.
pub struct Tokenizer {
    engine: Engine,
    /// The piece of each id; ids the vocabulary leaves out are `None`.
    pieces: Vec<Option<Piece>>,
    style: DecodeStyle,
    /// Put before and after by `encode` with `add_special`, where the engine does not do so itself.
    frame: Frame,
}

struct Piece {
    bytes: Box<[u8]>,
    special: bool,
}

enum Engine {
    Library(Box<tokenizers::Tokenizer>),
    SentencePiece { model: Box<SentencePiece>, ids: HashMap<String, u32> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecodeStyle {
    /// Text is the bytes of the pieces, one after the other, less one leading space where encoding
    /// adds one.
    Bytes { drop_leading_space: bool },
    /// Only the library knows how pieces join.
    Library,
}

#[derive(Clone, Copy, Debug, Default)]
struct Frame {
    before: Option<u32>,
    after: Option<u32>,
}

impl Tokenizer {
    /// Reads a tokenizer from the bytes of a tokenizer.json.
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        json::load(bytes)
    }

    /// Reads a tokenizer from the `tokenizer.ggml.*` metadata of a GGUF file.
    pub fn from_gguf(vocab: GgufVocab) -> Result<Self> {
        gguf::load(vocab)
    }

    /// The ids of `text`. Special tokens written in the text become their ids; `add_special` adds
    /// those the model wants at the start and the end.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let frame = if add_special { self.frame } else { Frame::default() };
        let mut ids: Vec<u32> = frame.before.into_iter().collect();
        match &self.engine {
            Engine::Library(library) => {
                let encode = || library.encode_fast(text, add_special).map_err(|error| error.to_string());
                ids.extend_from_slice(guarded(encode)?.get_ids());
            }
            Engine::SentencePiece { model, .. } => model.encode(text, None, &mut ids)?,
        }
        ids.extend(frame.after);
        Ok(ids)
    }

    /// The text of `ids`. Ids outside the vocabulary are left out; bytes that are no UTF-8 become
    /// U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        match self.style {
            DecodeStyle::Library => self.decode_by_library(ids, skip_special),
            DecodeStyle::Bytes { drop_leading_space } => {
                let mut bytes = Vec::new();
                for &id in ids {
                    bytes.extend_from_slice(self.shown_bytes(id, skip_special));
                }
                let start = usize::from(drop_leading_space && bytes.first() == Some(&b' '));
                String::from_utf8_lossy(&bytes[start..]).into_owned()
            }
        }
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The bytes a token adds to the text; for an unusual decoder, the token as the vocabulary
    /// writes it.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.piece(id).map(|piece| &*piece.bytes)
    }

    /// The id of a token, written as the vocabulary writes it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        match &self.engine {
            Engine::Library(library) => library.token_to_id(token),
            Engine::SentencePiece { ids, .. } => ids.get(token).copied(),
        }
    }

    /// Whether a token steers the model and is no part of the text.
    pub fn is_special(&self, id: u32) -> bool {
        self.piece(id).is_some_and(|piece| piece.special)
    }

    pub(crate) fn style(&self) -> DecodeStyle {
        self.style
    }

    /// The bytes to show for an id: none for one that is unknown or left out.
    pub(crate) fn shown_bytes(&self, id: u32, skip_special: bool) -> &[u8] {
        match self.piece(id) {
            Some(piece) if !(skip_special && piece.special) => &piece.bytes,
            _ => &[],
        }
    }

    pub(crate) fn decode_by_library(&self, ids: &[u32], skip_special: bool) -> String {
        let Engine::Library(library) = &self.engine else {
            return String::new();
        };
        let decoded = catch_unwind(AssertUnwindSafe(|| library.decode(ids, skip_special)));
        decoded.ok().and_then(std::result::Result::ok).unwrap_or_default()
    }

    fn piece(&self, id: u32) -> Option<&Piece> {
        self.pieces.get(id as usize)?.as_ref()
    }
}

/// Runs the library's encoding; a panic in it becomes an error too.
fn guarded<T>(encode: impl FnOnce() -> Result<T, String>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(encode))
        .unwrap_or_else(|_| Err("the tokenizer panicked, most likely over a costly pattern".into()))
        .map_err(Error::Encode)
}
