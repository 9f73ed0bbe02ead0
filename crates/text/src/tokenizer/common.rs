//! Whether two tokenizers speak of the same tokens by the same ids, as the models of one family do.

use super::gguf::NORMAL;
use super::{GgufVocab, Tokenizer};

impl Tokenizer {
    /// How many ids mean the same here and there: all below the smaller vocabulary's size. Special
    /// tokens may differ, as they are no part of any text. An error names the first id that stands
    /// for other text.
    pub fn ids_shared_with(&self, other: &Tokenizer) -> Result<usize, u32> {
        let both = self.vocab_size().min(other.vocab_size());
        let differs = |&id: &u32| match (self.piece(id), other.piece(id)) {
            (Some(ours), Some(theirs)) => ours.bytes != theirs.bytes && !(ours.special && theirs.special),
            // An id that one of them leaves out is never met in its text.
            _ => false,
        };
        (0..both as u32).find(differs).map_or(Ok(both), Err)
    }

    /// The first word of a GGUF file's vocabulary that has another id here, or none: such a
    /// tokenizer is another model's.
    pub fn differs_from(&self, vocab: &GgufVocab) -> Option<u32> {
        let words = vocab.tokens.iter().enumerate().filter(|(id, _)| vocab.token_type(*id) == NORMAL);
        let mut words = words.map(|(id, word)| (id as u32, word));
        words.find(|(id, word)| self.token_id(word) != Some(*id)).map(|(id, _)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer(words: &[&str], special: &[&str]) -> Tokenizer {
        crate::tokenizer::made::byte_level(words, &[], special, |_| ())
    }

    #[test]
    fn ids_are_shared_up_to_the_smaller_vocabulary() {
        let ours = tokenizer(&["a", "b", "c"], &["<s>", "</s>"]);
        let check = |words: &[&str], special: &[&str], expected| {
            let theirs = tokenizer(words, special);
            assert_eq!(ours.ids_shared_with(&theirs), expected, "{words:?} {special:?}");
            assert_eq!(theirs.ids_shared_with(&ours), expected, "{words:?} {special:?}");
        };
        check(&["a", "b", "c"], &["<s>", "</s>"], Ok(5));
        check(&["a", "b", "c"], &["<pad>"], Ok(4));
        check(&["a", "b", "c"], &[], Ok(3));
        check(&["a", "c", "b"], &["<s>"], Err(1));
        check(&["a", "b", "c", "d"], &[], Err(3));
    }

    #[test]
    fn a_vocabulary_of_another_model_is_told() {
        let ours = tokenizer(&["a", "b", "c"], &["<s>"]);
        let check = |words: &[(&str, i32)], expected| {
            let mut vocab = GgufVocab::default();
            (vocab.tokens, vocab.token_types) = words.iter().map(|&(word, kind)| (word.to_string(), kind)).unzip();
            assert_eq!(ours.differs_from(&vocab), expected, "{words:?}");
        };
        let at = |id: &str| ours.token_id(id).expect("a token") as usize;
        let words = [("a", at("a")), ("b", at("b")), ("c", at("c"))];
        let mut same = vec![("[PAD]", 5); 1 + words.iter().map(|(_, id)| *id).max().expect("words")];
        words.iter().for_each(|&(word, id)| same[id] = (word, 1));
        check(&same, None);
        let mut other = same.clone();
        other[at("b")] = ("x", 1);
        check(&other, Some(at("b") as u32));
        same.push(("y", 1));
        check(&same, Some(same.len() as u32 - 1));
    }
}
