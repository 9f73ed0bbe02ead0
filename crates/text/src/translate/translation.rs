//! One request, in the tokens of a draft model.
//!
//! Translated text stays as it is except for the last few words: more text may join them to other
//! tokens, so they are encoded anew with the new text. A step costs its new tokens and that tail,
//! however long the request is.

use std::sync::Arc;

use super::Translator;
use crate::detokenizer::take_complete;

/// Bytes of text beyond which the beginning of the tail is settled, and how many stay in it at
/// least.
pub(super) const MOST_TAIL: usize = 512;
const LEAST_TAIL: usize = 128;

/// Tokens that are read at once, so that a long prompt does not hold up a step.
const MOST_READ: usize = 4096;

/// See the [module](self).
pub struct Translation {
    pair: Arc<Translator>,
    /// Number of the request's tokens that were read.
    num_read: usize,
    /// The request's tokens in the draft model's vocabulary.
    tokens: Vec<u32>,
    /// How many of these stay whatever comes.
    num_settled: usize,
    /// Text of the other tokens.
    pub(super) tail: String,
    /// The beginning of a character whose other bytes have not come yet: the draft model does not
    /// hear of it.
    pending: Vec<u8>,
    /// Whether there is no text before the tail, or a special token.
    begins: bool,
    /// Whether a tokenizer failed: there are no drafts for the request any more.
    failed: bool,
}

impl Translation {
    pub(super) fn new(pair: Arc<Translator>) -> Self {
        Self {
            pair,
            num_read: 0,
            tokens: Vec::new(),
            num_settled: 0,
            tail: String::new(),
            pending: Vec::new(),
            begins: true,
            failed: false,
        }
    }

    /// Reads on in a request's tokens, which only ever grow; a long way is gone in several calls.
    /// Whether all were read.
    pub fn follow(&mut self, tokens: &[u32]) -> bool {
        let new = tokens.get(self.num_read..tokens.len().min(self.num_read + MOST_READ)).unwrap_or_default();
        if !new.is_empty() && !self.failed {
            self.failed = self.read(new).is_none();
        }
        if self.failed {
            self.tokens.clear();
        }
        !self.failed && self.num_read == tokens.len()
    }

    /// The request in the draft model's tokens; none if it cannot be translated.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    fn read(&mut self, new: &[u32]) -> Option<()> {
        let pair = Arc::clone(&self.pair);
        if self.num_read == 0 && pair.to_draft.get(&new[0]).is_none_or(|own| pair.before.first() != Some(own)) {
            self.tokens.extend(&pair.before);
            self.num_settled = self.tokens.len();
        }
        self.num_read += new.len();
        for &id in new {
            if pair.target.is_text(id) {
                self.pending.extend(pair.target.shown_bytes(id, true));
                continue;
            }
            self.take_text();
            self.settle(self.tail.len())?;
            self.pending.clear();
            self.tokens.extend(pair.to_draft.get(&id));
            self.num_settled = self.tokens.len();
            self.begins = true;
        }
        self.take_text();
        if self.tail.len() > MOST_TAIL {
            self.settle(cut(&self.tail))?;
        }
        self.tokens.truncate(self.num_settled);
        let tail = self.encode(&self.tail)?;
        self.tokens.extend(tail);
        Some(())
    }

    /// Whole characters go to the tail.
    fn take_text(&mut self) {
        let mut text = take_complete(&mut self.pending);
        let begins = self.begins && self.tail.is_empty();
        if begins && self.pair.target.leading_space() == Some(true) && text.starts_with(' ') {
            text.remove(0);
        }
        self.tail.push_str(&text);
    }

    /// Settles the first `len` bytes of the tail: their tokens will not change any more.
    fn settle(&mut self, len: usize) -> Option<()> {
        let settled = self.encode(&self.tail[..len])?;
        self.tokens.truncate(self.num_settled);
        self.tokens.extend(settled);
        self.num_settled = self.tokens.len();
        self.tail.drain(..len);
        self.begins &= len == 0;
        Some(())
    }

    /// Tokens of text at the beginning of the tail.
    fn encode(&self, text: &str) -> Option<Vec<u32>> {
        let draft = &self.pair.draft;
        match (text.is_empty(), self.begins) {
            (true, _) => Some(Vec::new()),
            (false, true) => draft.encode(text, false).ok(),
            (false, false) => draft.encode_continuing(text).ok(),
        }
    }

    /// The draft model's continuation of [`tokens`](Self::tokens), in at most `most` tokens of the
    /// target. Only whole characters, and only tokens that stand for the same text.
    pub fn back(&self, drafted: &[u32], most: usize) -> Vec<u32> {
        let (target, draft) = (&self.pair.target, &self.pair.draft);
        let text_len = drafted.iter().take_while(|&&id| draft.is_text(id)).count();
        let mut bytes = draft.bytes_of(&drafted[..text_len]);
        let begins = self.begins && self.tail.is_empty() && self.pending.is_empty();
        if begins && draft.leading_space() == Some(true) && bytes.starts_with(b" ") {
            bytes.remove(0);
        }
        let text = match std::str::from_utf8(&bytes) {
            Ok(text) => text,
            Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default(),
        };
        // The target is within a character that is new to the draft model: what it drafts has to
        // begin with the same.
        if !text.as_bytes().starts_with(&self.pending) {
            return Vec::new();
        }
        let ids = match (text.is_empty(), begins) {
            (true, _) => Ok(Vec::new()),
            (false, true) => target.encode(text, false),
            (false, false) => target.encode_continuing(text),
        };
        let Ok(ids) = ids else { return Vec::new() };
        let mut expected = text.as_bytes();
        let mut known = self.pending.len();
        let mut out = Vec::new();
        for (number, &id) in ids.iter().enumerate() {
            let mut found = target.shown_bytes(id, true);
            if number == 0 && begins && target.leading_space() == Some(true) {
                found = found.strip_prefix(b" ").unwrap_or(found);
            }
            let Some(rest) = expected.strip_prefix(found).filter(|_| target.is_text(id)) else { break };
            expected = rest;
            match known.checked_sub(found.len()) {
                Some(left) if known > 0 => known = left,
                None if known > 0 => return Vec::new(),
                _ => out.push(id),
            }
        }
        let is_whole = text.len() == bytes.len() && expected.is_empty();
        out.extend(drafted.get(text_len).and_then(|id| self.pair.to_target.get(id)).filter(|_| is_whole));
        out.truncate(most);
        out
    }
}

/// A place in a long tail where hardly any tokenizer has a token that goes on: before a word with a
/// space, as late as may be.
fn cut(tail: &str) -> usize {
    let (first, last) = (tail.len() - MOST_TAIL, tail.len() - LEAST_TAIL);
    let bytes = tail.as_bytes();
    let is_word = |at: usize| {
        bytes[at] == b' ' && bytes[at + 1].is_ascii_alphabetic() && at > 0 && !bytes[at - 1].is_ascii_whitespace()
    };
    (first..last).rev().find(|&at| is_word(at)).unwrap_or_else(|| tail.floor_char_boundary(last))
}
