//! The BPE kinds of GGUF, rebuilt as a tokenizer of the `tokenizers` crate.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::replace::Replace;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::gguf::{CONTROL, GgufVocab, USER_DEFINED, frame};
use super::json::{JsonStyle, wrap};
use super::{Tokenizer, pretokenize};
use crate::{Error, Result};

pub fn load(vocab: GgufVocab) -> Result<Tokenizer> {
    let built = catch_unwind(AssertUnwindSafe(|| build(&vocab)));
    built.unwrap_or_else(|_| fail("tokens", "the tokenizer cannot be built: the library panicked".into()))
}

fn fail<T>(field: &'static str, reason: String) -> Result<T> {
    Err(Error::TokenizerGguf { field, reason })
}

fn build(vocab: &GgufVocab) -> Result<Tokenizer> {
    // Gemma 4 merges plain UTF-8 with spaces shown as U+2581; all others merge the byte-level
    // alphabet.
    let raw = vocab.model == "gemma4";
    let pre = if raw { None } else { Some(pretokenize::rule(&vocab.pre)?) };
    let ids = vocab.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id as u32));
    let vocabulary: tokenizers::models::bpe::Vocab = ids.collect();
    let mut model = BPE::builder()
        .vocab_and_merges(vocabulary, merges(vocab)?)
        .ignore_merges(pre.is_some_and(|rule| rule.whole_words_first))
        .byte_fallback(raw);
    if let Some(unknown) = vocab.unk.filter(|_| raw) {
        model = model.unk_token(vocab.tokens[unknown as usize].clone()).fuse_unk(true);
    }
    let model = model.build().or_else(|error| fail("merges", error.to_string()))?;
    let mut library = tokenizers::Tokenizer::new(model);
    match pre {
        Some(rule) => {
            library.with_pre_tokenizer(Some(splitter(rule.patterns)?));
        }
        None => {
            let show_spaces = Replace::new(" ", "\u{2581}").or_else(|error| fail("pre", error.to_string()))?;
            library.with_normalizer(Some(show_spaces)).or_else(|error| fail("pre", error.to_string()))?;
        }
    }
    add_tokens(vocab, &mut library)?;
    let style = if raw { JsonStyle::SentencePiece { drop_leading_space: false } } else { JsonStyle::ByteLevel };
    let bos_by_default = pre.is_some_and(|rule| rule.bos_by_default);
    wrap(library, style, frame(vocab, bos_by_default)).or_else(|reason| fail("tokens", reason))
}

fn merges(vocab: &GgufVocab) -> Result<Vec<(String, String)>> {
    let pair = |(index, merge): (usize, &String)| {
        // A token may itself start with a space, so the separator is looked for after the first
        // character.
        let first = merge.chars().next().map_or(0, char::len_utf8);
        match merge[first..].find(' ') {
            Some(at) => Ok((merge[..first + at].to_string(), merge[first + at + 1..].to_string())),
            None => fail("merges", format!("entry {index} is not a pair: {merge:?}")),
        }
    };
    vocab.merges.iter().enumerate().map(pair).collect()
}

fn splitter(patterns: &[&str]) -> Result<Sequence> {
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in patterns {
        let split = Split::new(SplitPattern::Regex((*pattern).into()), SplitDelimiterBehavior::Isolated, false);
        steps.push(split.or_else(|error| fail("pre", error.to_string()))?.into());
    }
    steps.push(ByteLevel::new(false, false, false).into());
    Ok(Sequence::new(steps))
}

/// Control and user-defined tokens are taken whole out of the text; only the former are special.
fn add_tokens(vocab: &GgufVocab, library: &mut tokenizers::Tokenizer) -> Result<()> {
    let chosen = |kind: i32| {
        let tokens = vocab.tokens.iter().enumerate().filter(move |(id, _)| vocab.token_type(*id) == kind);
        tokens.map(move |(_, token)| {
            let added = AddedToken::from(token.clone(), kind == CONTROL).normalized(false);
            added.rstrip(vocab.takes_space_behind(token))
        })
    };
    let added = library.add_special_tokens(chosen(CONTROL)).and_then(|_| library.add_tokens(chosen(USER_DEFINED)));
    added.map(drop).or_else(|error| fail("token_type", error.to_string()))
}
