//! Text that a client wrote, kept from being read as control tokens.
//!
//! A chat template writes control tokens as text, and the tokenizer finds them by that text: a
//! message that spells `<|im_end|>` would end its own turn and could open another one. So where a
//! client's string spells a control token, a mark is put behind its first character before the
//! template runs: a private-use character that occurs nowhere in the conversation. Templates may
//! trim, split, compare and join as ever, and the mark travels along. The tokenizer takes control
//! tokens out of the marked text, and does not find those with a mark inside; then the marks are
//! removed, before anything else looks at the text. A spelled control token is so encoded as
//! ordinary text, in one with the text around it, as transformers does with `split_special_tokens`;
//! a conversation that spells none is not changed at all.
//!
//! Control tokens are those that the vocabulary calls special. Other added tokens, such as the
//! `<think>` of Qwen3, are part of a model's output, and are read in messages as it was trained
//! with them. A string that ends with the beginning of a control token has a mark at its end, so
//! that no text behind it completes the token. A control token that the template itself assembles
//! from the inside of one string, by deleting text in between, is not detected.

use std::collections::{BTreeSet, HashSet};

use serde_json::Value as Json;
use tokenizers::{Model, OffsetType, PreTokenizer};

use super::{Engine, Tokenizer};
use crate::{ChatRender, Error, Result};

/// Private-use characters, those first that hardly any font or program has given a meaning.
const MARKS: [std::ops::RangeInclusive<char>; 2] = ['\u{f800}'..='\u{f8ff}', '\u{e000}'..='\u{f7ff}'];

/// The control tokens of a vocabulary, as a text may spell them.
pub struct ControlTokens {
    tokens: HashSet<Box<str>>,
    /// Proper prefixes of the control tokens.
    beginnings: HashSet<Box<str>>,
    /// The lengths of those that start with a byte, by byte: a place in a text costs one look-up
    /// for each, however many tokens there are.
    lengths: [BTreeSet<usize>; 256],
    longest: usize,
}

/// The character that stands inside every control token that a client spelt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(char);

impl Mark {
    /// How much of a text is marks.
    pub fn bytes_in(self, text: &str) -> usize {
        text.matches(self.0).count() * self.0.len_utf8()
    }
}

impl ControlTokens {
    fn new<'a>(tokens: impl Iterator<Item = &'a str>) -> Self {
        let lengths = [const { BTreeSet::new() }; 256];
        let mut all = Self { tokens: HashSet::new(), beginnings: HashSet::new(), lengths, longest: 0 };
        for token in tokens {
            let Some(&first) = token.as_bytes().first() else { continue };
            all.longest = all.longest.max(token.len());
            all.tokens.insert(token.into());
            all.lengths[usize::from(first)].insert(token.len());
            all.beginnings.extend(token.char_indices().skip(1).map(|(end, _)| Box::from(&token[..end])));
        }
        all
    }

    /// Puts marks into the strings of a conversation. None: it spells no control token, and stays
    /// as it is. Roles are the server's own words, and are left alone.
    pub fn mark(&self, conversation: &mut ChatRender) -> Result<Option<Mark>> {
        let mut spells = false;
        each_string(conversation, &mut |text| spells |= self.is_spelt_in(text));
        if !spells {
            return Ok(None);
        }
        let mut used = HashSet::new();
        each_string(conversation, &mut |text| used.extend(text.chars().filter(is_private)));
        let mark = MARKS.into_iter().flatten().find(|mark| !used.contains(mark));
        let mark = mark.ok_or_else(|| {
            Error::Encode("it spells control tokens and holds every private-use character from U+E000 to U+F8FF".into())
        })?;
        change_strings(conversation, &|text| self.is_spelt_in(text).then(|| self.marked(text, mark)));
        Ok(Some(Mark(mark)))
    }

    fn is_spelt_in(&self, text: &str) -> bool {
        (0..text.len()).any(|at| self.starts_at(text, at)) || self.is_begun_by(text)
    }

    fn starts_at(&self, text: &str, at: usize) -> bool {
        let lengths = &self.lengths[usize::from(text.as_bytes()[at])];
        let token = |length: &usize| text.get(at..at + length);
        lengths.iter().filter_map(token).any(|token| self.tokens.contains(token))
    }

    /// Whether the text's end could go on to be a control token.
    fn is_begun_by(&self, text: &str) -> bool {
        let ends = text.char_indices().rev().map(|(start, _)| &text[start..]);
        ends.take_while(|end| end.len() < self.longest).any(|end| self.beginnings.contains(end))
    }

    fn marked(&self, text: &str, mark: char) -> String {
        let mut marked = String::with_capacity(text.len() + 64);
        for (at, character) in text.char_indices() {
            marked.push(character);
            if self.starts_at(text, at) {
                marked.push(mark);
            }
        }
        if self.is_begun_by(text) {
            marked.push(mark);
        }
        marked
    }
}

fn is_private(character: &char) -> bool {
    MARKS.iter().any(|range| range.contains(character))
}

/// Everything that a client wrote, names of values within values included.
fn each_string(conversation: &ChatRender, see: &mut impl FnMut(&str)) {
    fn within(value: &Json, see: &mut impl FnMut(&str)) {
        match value {
            Json::String(text) => see(text),
            Json::Array(items) => items.iter().for_each(|item| within(item, see)),
            Json::Object(map) => map.iter().for_each(|(name, value)| {
                see(name);
                within(value, see);
            }),
            _ => {}
        }
    }
    let ChatRender { messages, tools, documents, extra, .. } = conversation;
    let fields = messages.iter().filter_map(Json::as_object).flatten().filter(|(name, _)| *name != "role");
    fields.for_each(|(_, value)| within(value, see));
    tools.iter().chain(documents).chain(extra.values()).for_each(|value| within(value, see));
}

/// The same, to be changed where there is a change to make.
fn change_strings(conversation: &mut ChatRender, change: &impl Fn(&str) -> Option<String>) {
    fn within(value: &mut Json, change: &impl Fn(&str) -> Option<String>) {
        match value {
            Json::String(text) => *text = change(text).unwrap_or_else(|| std::mem::take(text)),
            Json::Array(items) => items.iter_mut().for_each(|item| within(item, change)),
            Json::Object(map) => {
                map.values_mut().for_each(|value| within(value, change));
                if map.keys().any(|name| change(name).is_some()) {
                    let pairs = std::mem::take(map).into_iter();
                    *map = pairs.map(|(name, value)| (change(&name).unwrap_or(name), value)).collect();
                }
            }
            _ => {}
        }
    }
    let ChatRender { messages, tools, documents, extra, .. } = conversation;
    let fields = messages.iter_mut().filter_map(Json::as_object_mut).flatten().filter(|(name, _)| *name != "role");
    fields.for_each(|(_, value)| within(value, change));
    tools.iter_mut().chain(documents).chain(extra.values_mut()).for_each(|value| within(value, change));
}

impl Tokenizer {
    /// The tokens that steer the model, by which a conversation's strings are marked.
    pub fn control_tokens(&self) -> ControlTokens {
        match &self.engine {
            Engine::Library(library) => {
                let added = library.get_added_vocabulary().get_added_tokens_decoder();
                ControlTokens::new(added.values().filter(|token| token.special).map(|token| token.content.as_str()))
            }
            Engine::SentencePiece { ids, .. } => {
                ControlTokens::new(ids.iter().filter(|(_, id)| self.is_special(**id)).map(|(token, _)| token.as_str()))
            }
        }
    }

    /// The ids of what a template made of a marked conversation: control tokens are those that the
    /// template wrote. Nothing is put before or behind.
    pub fn encode_marked(&self, text: &str, mark: Option<Mark>) -> Result<Vec<u32>> {
        let Some(Mark(mark)) = mark else { return self.encode(text, false) };
        match &self.engine {
            Engine::Library(library) => {
                super::guarded(|| self.encode_by_parts(library, text, mark).map_err(|error| error.to_string()))
            }
            Engine::SentencePiece { model, .. } => {
                let mut ids = Vec::new();
                model.encode(text, Some(mark), &mut ids)?;
                Ok(ids)
            }
        }
    }

    /// The steps of the library's own `encode`, with the marks removed as soon as added tokens have
    /// been found.
    fn encode_by_parts(&self, library: &tokenizers::Tokenizer, text: &str, mark: char) -> tokenizers::Result<Vec<u32>> {
        let mut parts = library.get_added_vocabulary().extract_and_normalize(library.get_normalizer(), text);
        parts.normalize(|part| {
            if part.get().contains(mark) {
                part.filter(|character| character != mark);
            }
            Ok(())
        })?;
        if let Some(splitter) = library.get_pre_tokenizer() {
            splitter.pre_tokenize(&mut parts)?;
        }
        parts.tokenize(|part| {
            let tokens = library.get_model().tokenize(part.get())?;
            // Some vocabularies hold control tokens among their ordinary ones, so that merging
            // could lead there.
            let is_control = |id: u32, text: &str| self.is_special(id) && part.get().contains(text);
            match tokens.iter().find(|token| is_control(token.id, &token.value)) {
                Some(token) => Err(format!("{:?} has no form but that of a control token", token.value).into()),
                None => Ok(tokens),
            }
        })?;
        Ok(parts.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }
}

#[cfg(test)]
mod tests;
