//! Pieces of a text that come one after the other: what encoding puts before a text is not put
//! before each of them.

use super::{DecodeStyle, Tokenizer};
use crate::{Error, Result};

/// Stands before a piece where encoding adds a space to whatever comes first. No vocabulary joins
/// it to anything.
const ANCHOR: &str = "\u{1}";

impl Tokenizer {
    /// The ids of a text that goes on from another one.
    pub(crate) fn encode_continuing(&self, text: &str) -> Result<Vec<u32>> {
        if self.leading_space() != Some(true) {
            return self.encode(text, false);
        }
        let ids = self.encode(&format!("{ANCHOR}{text}"), false)?;
        let mut before = 0;
        let num_before = ids.iter().take_while(|&&id| {
            let goes_on = before < 1 + ANCHOR.len();
            before += self.shown_bytes(id, true).len();
            goes_on
        });
        let num_before = num_before.count();
        if self.bytes_of(&ids[..num_before]) != format!(" {ANCHOR}").as_bytes() {
            return Err(Error::Encode(format!("{text:?} does not go on from another text")));
        }
        Ok(ids[num_before..].to_vec())
    }

    /// Whether encoding adds a space to the beginning, which decoding drops. None where only the
    /// library knows what tokens are as text.
    pub(crate) fn leading_space(&self) -> Option<bool> {
        match self.style {
            DecodeStyle::Bytes { drop_leading_space } => Some(drop_leading_space),
            DecodeStyle::Library => None,
        }
    }

    /// The text of these tokens, one behind the other.
    pub(crate) fn bytes_of(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|&id| self.shown_bytes(id, false)).copied().collect()
    }

    /// Whether a token is part of a text: it is known, and does not steer the model.
    pub(crate) fn is_text(&self, id: u32) -> bool {
        self.piece(id).is_some_and(|piece| !piece.special)
    }

    /// Special tokens, with their names.
    pub(crate) fn specials(&self) -> impl Iterator<Item = (u32, &[u8])> {
        let pieces = self.pieces.iter().enumerate();
        pieces.filter_map(|(id, piece)| {
            piece.as_ref().filter(|piece| piece.special).map(|piece| (id as u32, &*piece.bytes))
        })
    }
}
