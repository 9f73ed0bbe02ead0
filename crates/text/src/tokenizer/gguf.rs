//! Tokenizers as GGUF stores them: the token list with types and scores or merges, and the name of
//! a splitting rule.

use std::collections::HashMap;

use super::spm::{Literal, Literals, SentencePiece};
use super::{DecodeStyle, Engine, Frame, MAX_VOCAB, Piece, Tokenizer, bpe, bytes};
use crate::{Error, Result};

/// The `tokenizer.ggml.*` metadata, each field under its name there; what the file leaves out stays
/// empty or `None`.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab {
    /// "llama" (SentencePiece), "gpt2" or "gemma4" (BPE); others are refused.
    pub model: String,
    pub pre: String,
    pub tokens: Vec<String>,
    pub token_types: Vec<i32>,
    pub scores: Vec<f32>,
    pub merges: Vec<String>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
    /// Further ids that end an answer: of a turn, of a message, and all of them.
    pub eot: Option<u32>,
    pub eom: Option<u32>,
    pub eos_ids: Vec<u32>,
    pub fim_pad: Option<u32>,
    pub fim_rep: Option<u32>,
    pub fim_sep: Option<u32>,
    /// `general.name` and `general.architecture`: some rules of a tokenizer are known by these
    /// alone.
    pub name: String,
    pub architecture: String,
}

/// The values of `token_type` that matter here.
pub const NORMAL: i32 = 1;
pub const UNKNOWN: i32 = 2;
pub const CONTROL: i32 = 3;
pub const USER_DEFINED: i32 = 4;
pub const BYTE: i32 = 6;

impl GgufVocab {
    pub fn token_type(&self, id: usize) -> i32 {
        self.token_types.get(id).copied().unwrap_or(NORMAL)
    }

    /// Whether white space behind a special token belongs to the token. Files do not say; it is so
    /// in Phi-3's vocabulary, which llama.cpp knows by the model's name. Newer files spell that in
    /// other ways, so the architecture counts as well where the vocabulary is the one Phi-3 shares
    /// with Llama 2.
    pub(super) fn takes_space_behind(&self, token: &str) -> bool {
        let name = self.name.to_lowercase();
        let is_phi3 = name.contains("phi-3")
            || name.contains("phi3")
            || self.model == "llama" && ["phi3", "phimoe"].contains(&self.architecture.as_str());
        is_phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&token)
    }
}

pub fn load(mut vocab: GgufVocab) -> Result<Tokenizer> {
    check(&vocab)?;
    vocab.type_ends();
    match vocab.model.as_str() {
        "llama" => Ok(sentence_piece(vocab)),
        "gpt2" | "gemma4" => bpe::load(vocab),
        other => {
            let known = "llama (SentencePiece), gpt2 and gemma4 (BPE)";
            fail("model", format!("the kind {other:?} is not supported; known are {known}"))
        }
    }
}

fn fail<T>(field: &'static str, reason: String) -> Result<T> {
    Err(Error::TokenizerGguf { field, reason })
}

fn check(vocab: &GgufVocab) -> Result<()> {
    let count = vocab.tokens.len();
    if count == 0 || count > MAX_VOCAB {
        return fail("tokens", format!("expected 1 to {MAX_VOCAB} tokens, found {count}"));
    }
    for (field, found) in [("token_type", vocab.token_types.len()), ("scores", vocab.scores.len())] {
        if found != 0 && found != count {
            return fail(field, format!("expected one for each of {count} tokens, found {found}"));
        }
    }
    let ids = [
        ("bos_token_id", vocab.bos),
        ("eos_token_id", vocab.eos),
        ("unknown_token_id", vocab.unk),
        ("padding_token_id", vocab.pad),
    ];
    for (field, id) in ids {
        if let Some(id) = id.filter(|id| *id as usize >= count) {
            return fail(field, format!("{id} is not below the number of tokens, {count}"));
        }
    }
    for (field, wanted, id) in [("bos_token_id", vocab.add_bos, vocab.bos), ("eos_token_id", vocab.add_eos, vocab.eos)]
    {
        if wanted == Some(true) && id.is_none() {
            return fail(field, "it is to be added, but is not given".into());
        }
    }
    Ok(())
}

fn sentence_piece(vocab: GgufVocab) -> Tokenizer {
    let mut pieces = HashMap::with_capacity(vocab.tokens.len());
    let mut ids = HashMap::with_capacity(vocab.tokens.len());
    let mut byte_ids = [None; 256];
    let mut literal = Literals::default();
    let mut table = Vec::with_capacity(vocab.tokens.len());
    for (index, token) in vocab.tokens.iter().enumerate() {
        let (id, kind) = (index as u32, vocab.token_type(index));
        let score = vocab.scores.get(index).copied().unwrap_or(0.0);
        ids.insert(token.clone(), id);
        match kind {
            BYTE => {
                if let Some(byte) = bytes::of_fallback(token) {
                    byte_ids[usize::from(byte)] = Some(id);
                }
            }
            CONTROL | USER_DEFINED => {
                literal.add(token, Literal { id, takes_space_behind: vocab.takes_space_behind(token) });
            }
            UNKNOWN => {}
            _ => {
                pieces.insert(token.clone(), (id, score));
            }
        }
        let special = kind == CONTROL || kind == UNKNOWN;
        let text = if special { token.as_bytes().to_vec() } else { bytes::of_sentence_piece(token) };
        table.push(Some(Piece { bytes: text.into(), special }));
    }
    let space_prefix = vocab.add_space_prefix.unwrap_or(true);
    Tokenizer {
        frame: frame(&vocab, true),
        engine: Engine::SentencePiece {
            model: Box::new(SentencePiece { pieces, byte_ids, unknown: vocab.unk, literal, space_prefix }),
            ids,
        },
        pieces: table,
        style: DecodeStyle::Bytes { drop_leading_space: space_prefix },
    }
}

/// The tokens that `add_special` adds; `bos_by_default` applies if the file does not say.
pub fn frame(vocab: &GgufVocab, bos_by_default: bool) -> Frame {
    Frame {
        before: vocab.bos.filter(|_| vocab.add_bos.unwrap_or(bos_by_default)),
        after: vocab.eos.filter(|_| vocab.add_eos.unwrap_or(false)),
    }
}
