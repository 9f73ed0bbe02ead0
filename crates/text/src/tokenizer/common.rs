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
        let vocab: Vec<String> =
            words.iter().chain(special).enumerate().map(|(id, word)| format!("\"{word}\": {id}")).collect();
        let added = special.iter().enumerate().map(|(index, word)| {
            let id = words.len() + index;
            format!(
                r#"{{"id": {id}, "content": "{word}", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}}"#
            )
        });
        let added: Vec<String> = added.collect();
        let json = format!(
            r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [{}], "normalizer": null,
            "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}},
            "post_processor": null,
            "decoder": {{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}},
            "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {{{}}}, "merges": []}}}}"#,
            added.join(","),
            vocab.join(",")
        );
        Tokenizer::from_json(json.as_bytes()).expect("a tokenizer")
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
