//! Whether two tokenizers speak of the same tokens by the same ids, as the models of one family do.

use super::Tokenizer;

impl Tokenizer {
    /// How many ids mean the same here and there: all below the smaller vocabulary's size. Special tokens may differ, as
    /// they are no part of any text. An error names the first id that stands for other text.
    pub fn ids_shared_with(&self, other: &Tokenizer) -> Result<usize, u32> {
        let both = self.vocab_size().min(other.vocab_size());
        let differs = |&id: &u32| match (self.piece(id), other.piece(id)) {
            (Some(ours), Some(theirs)) => ours.bytes != theirs.bytes && !(ours.special && theirs.special),
            // An id that one of them leaves out is never met in its text.
            _ => false,
        };
        (0..both as u32).find(differs).map_or(Ok(both), Err)
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
}
