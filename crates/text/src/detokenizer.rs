//! Tokens to text, one token at a time, in whole characters.
//!
//! A character's bytes may be spread over several tokens: they wait until the character is
//! complete. However the tokens come, the pieces put together are exactly what
//! [`Tokenizer::decode`] gives for all of them.

use std::sync::Arc;

use crate::Tokenizer;
use crate::tokenizer::DecodeStyle;

/// One stream of tokens.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    state: State,
}

#[derive(Clone)]
enum State {
    Bytes {
        /// The beginning of a character whose other bytes have not come yet.
        pending: Vec<u8>,
        /// The next byte, if it is a space, is the one that encoding added.
        at_start: bool,
    },
    /// For decoders only the library knows: the ids since the last clean cut, and how much of their
    /// text is out.
    Library { ids: Vec<u32>, num_shown_ids: usize },
}

impl Detokenizer {
    /// A stream of tokens that are a text of their own.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        let state = match tokenizer.style() {
            DecodeStyle::Bytes { drop_leading_space } => {
                State::Bytes { pending: Vec::new(), at_start: drop_leading_space }
            }
            DecodeStyle::Library => State::Library { ids: Vec::new(), num_shown_ids: 0 },
        };
        Detokenizer { tokenizer, skip_special, state }
    }

    /// A stream of tokens that continue an earlier text: a leading space is part of the text.
    pub fn continuing(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        let mut this = Self::new(tokenizer, skip_special);
        if let State::Bytes { at_start, .. } = &mut this.state {
            *at_start = false;
        }
        this
    }

    /// Takes one more token and returns the characters that are complete now, perhaps none.
    pub fn push(&mut self, id: u32) -> String {
        match &mut self.state {
            State::Bytes { pending, at_start } => {
                let mut bytes = self.tokenizer.shown_bytes(id, self.skip_special);
                if *at_start && !bytes.is_empty() {
                    *at_start = false;
                    bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
                }
                if pending.is_empty()
                    && let Ok(text) = std::str::from_utf8(bytes)
                {
                    return text.to_string();
                }
                pending.extend_from_slice(bytes);
                take_complete(pending)
            }
            // They add nothing, and would be decoded again and again until text came.
            State::Library { .. } if self.skip_special && self.tokenizer.is_special(id) => String::new(),
            State::Library { ids, num_shown_ids } => {
                ids.push(id);
                let shown = self.tokenizer.decode_by_library(&ids[..*num_shown_ids], self.skip_special);
                let text = self.tokenizer.decode_by_library(ids, self.skip_special);
                match text.strip_prefix(shown.as_str()) {
                    Some(new) if !new.is_empty() && !text.ends_with('\u{fffd}') => {
                        let new = new.to_string();
                        // The tokens just shown stay as context for the next ones; those before are
                        // done with.
                        ids.drain(..*num_shown_ids);
                        *num_shown_ids = ids.len();
                        new
                    }
                    _ => String::new(),
                }
            }
        }
    }

    /// The tokens have ended: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        match &mut self.state {
            State::Bytes { pending, .. } => {
                let rest = std::mem::take(pending);
                String::from_utf8_lossy(&rest).into_owned()
            }
            State::Library { ids, num_shown_ids } => {
                let shown = self.tokenizer.decode_by_library(&ids[..*num_shown_ids], self.skip_special);
                let text = self.tokenizer.decode_by_library(ids, self.skip_special);
                *num_shown_ids = ids.len();
                text.strip_prefix(shown.as_str()).unwrap_or_default().to_string()
            }
        }
    }
}

/// Moves everything but an unfinished last character out of `pending`, with U+FFFD for what can
/// never become one.
pub(crate) fn take_complete(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut at = 0;
    loop {
        match std::str::from_utf8(&pending[at..]) {
            Ok(rest) => {
                text.push_str(rest);
                at = pending.len();
                break;
            }
            Err(error) => {
                let valid = at + error.valid_up_to();
                text.push_str(&String::from_utf8_lossy(&pending[at..valid]));
                at = valid;
                let Some(bad) = error.error_len() else { break };
                text.push('\u{fffd}');
                at += bad;
            }
        }
    }
    pending.drain(..at);
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_cut_of_any_bytes_reads_as_the_whole(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x7fu8..=0xf5, Just(0xe6u8), Just(0x97u8)], 0..24),
            cuts in prop::collection::vec(0usize..24, 0..8),
        ) {
            let (mut text, mut pending, mut start) = (String::new(), Vec::new(), 0);
            let ends = (0..bytes.len()).filter(|at| cuts.contains(at)).chain([bytes.len()]);
            for end in ends {
                pending.extend_from_slice(&bytes[start..end]);
                text.push_str(&take_complete(&mut pending));
                prop_assert!(pending.len() < 4, "never more than one unfinished character");
                start = end;
            }
            text.push_str(&String::from_utf8_lossy(&pending));
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
