//! Tokens of one vocabulary into those of another, by the text that they stand for.
//!
//! A draft model may have another tokenizer than the model it drafts for, the target. A
//! [`Translator`] is a pair of tokenizers that was found to carry text both ways; a [`Translation`]
//! follows one request: it reads on in the target's tokens, holds the draft model's, and translates
//! drafts back. Special tokens are not text: one that both have under the same name stands for
//! itself, any other ends the text before it and is left out, and ends a draft.
//!
//! Nothing here can make an answer wrong. If a text becomes other tokens than the draft model is
//! used to, only drafts are worse.

mod check;
mod translation;

use std::collections::HashMap;
use std::sync::Arc;

pub use self::translation::Translation;
use crate::{Result, Tokenizer};

/// Two tokenizers that passed the [check](Self::new).
pub struct Translator {
    target: Arc<Tokenizer>,
    draft: Arc<Tokenizer>,
    /// Special tokens that both have.
    to_draft: HashMap<u32, u32>,
    to_target: HashMap<u32, u32>,
    /// Tokens that the draft model needs before any text.
    before: Vec<u32>,
    stretch: f32,
}

impl Translator {
    /// Refused unless both tokenizers give back what they were given: sample texts exactly, and of
    /// each other's vocabulary all but few tokens. The error says what came back as something else.
    pub fn new(target: Arc<Tokenizer>, draft: Arc<Tokenizer>) -> Result<Self> {
        let stretch = check::check(&target, &draft)?;
        let names: HashMap<&[u8], u32> = draft.specials().map(|(id, name)| (name, id)).collect();
        let both = target.specials().filter_map(|(id, name)| Some((id, *names.get(name)?)));
        let to_draft: HashMap<u32, u32> = both.collect();
        let to_target = to_draft.iter().map(|(&target, &draft)| (draft, target)).collect();
        let framed = draft.encode("a", true)?;
        let before = framed.iter().copied().take_while(|&id| !draft.is_text(id)).collect();
        Ok(Self { target, draft, to_draft, to_target, before, stretch })
    }

    /// Tokens of the draft model for one of the target's, over the sample texts.
    pub fn stretch(&self) -> f32 {
        self.stretch
    }

    /// The translation of a new request.
    pub fn begin(self: &Arc<Self>) -> Translation {
        Translation::new(Arc::clone(self))
    }
}

#[cfg(test)]
mod tests;
