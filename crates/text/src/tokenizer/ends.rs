//! Which tokens of a GGUF vocabulary end an answer.
//!
//! A file names one or two of them by id, and often not the one that ends a turn: that one is known
//! by its text, from the same list as in llama.cpp. Its names stand here as facts about published
//! vocabularies.

use std::collections::{BTreeSet, HashMap};

use super::Tokenizer;
use super::gguf::{CONTROL, GgufVocab, NORMAL, USER_DEFINED};

/// Texts that end a turn, a call or a document, in whatever vocabulary has them.
const ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "[e~[",
];

/// Texts that stand between the files of a repository or fill a gap: a model that writes one has
/// done its part. They count where the file gives no id of the same kind.
const PADS: &[&str] = &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"];
const REPOSITORIES: &[&str] = &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"];
const SEPARATORS: &[&str] = &["<|file_sep|>"];

/// Closes struck-out text in HTML too, and large vocabularies have it as a word: it ends an answer
/// only where the file says that it steers the model.
const ENDS_OR_HTML: &str = "</s>";

impl GgufVocab {
    /// The ids that end an answer, ascending.
    pub fn ends(&self) -> Vec<u32> {
        let (mut ends, named) = (self.given_ends(), self.named_ends());
        ends.extend(named.values());
        withdraw(&mut ends, |name| named.get(name).copied());
        ends.into_iter().collect()
    }

    /// Types those as control tokens, so that they are found in a text and not shown. One that the
    /// file gives by id alone stays text if it is a word: it may be written without being meant.
    pub(super) fn type_ends(&mut self) {
        let ends: BTreeSet<u32> = self.ends().into_iter().collect();
        let named: BTreeSet<u32> = self.named_ends().into_values().collect();
        for &id in &ends {
            let index = id as usize;
            if named.contains(&id) || self.token_type(index) == USER_DEFINED {
                self.token_types.resize(self.tokens.len(), NORMAL);
                self.token_types[index] = CONTROL;
            }
        }
    }

    /// Those that the file gives by id; an id that is none is left out, as others leave it out.
    fn given_ends(&self) -> BTreeSet<u32> {
        let one = [self.eos, self.eot, self.eom, self.fim_pad, self.fim_rep, self.fim_sep];
        let all = one.into_iter().flatten().chain(self.eos_ids.iter().copied());
        all.filter(|&id| (id as usize) < self.tokens.len()).collect()
    }

    fn named_ends(&self) -> HashMap<&str, u32> {
        let kinds = [(PADS, self.fim_pad), (REPOSITORIES, self.fim_rep), (SEPARATORS, self.fim_sep)];
        let is_end = |index: usize, token: &str| {
            let by_kind = kinds.iter().any(|(names, given)| given.is_none() && names.contains(&token));
            by_kind || ENDS.contains(&token) || token == ENDS_OR_HTML && self.token_type(index) == CONTROL
        };
        let mut found = HashMap::new();
        for (index, token) in self.tokens.iter().enumerate() {
            if token.starts_with(['<', '[', '_']) && is_end(index, token) {
                found.entry(token.as_str()).or_insert(index as u32);
            }
        }
        found
    }
}

impl Tokenizer {
    /// The same of a tokenizer that lies beside a file without a vocabulary: those among its
    /// special tokens.
    pub fn named_ends(&self) -> Vec<u32> {
        let special = |name: &str| self.token_id(name).filter(|&id| self.is_special(id));
        let names = [ENDS, PADS, REPOSITORIES, SEPARATORS, &[ENDS_OR_HTML]].concat();
        let mut ends: BTreeSet<u32> = names.into_iter().filter_map(special).collect();
        withdraw(&mut ends, special);
        ends.into_iter().collect()
    }
}

/// Takes out what the other tokens of its vocabulary show to be no end: `<|end|>` ends a message of
/// several in a vocabulary that ends answers with a return or a call.
fn withdraw(ends: &mut BTreeSet<u32>, id_of: impl Fn(&str) -> Option<u32>) {
    let has = |name| id_of(name).is_some();
    let calls = has("<|call|>") || has("<|calls|>");
    let mut take_out = |name| id_of(name).is_some_and(|id| ends.remove(&id));
    if calls && (has("<|return|>") || has("<|flush|>")) {
        take_out("<|end|>");
    }
    if has("<|tool_response>") {
        take_out(ENDS_OR_HTML);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (text, type) of each token, by id.
    fn vocab(tokens: &[(&str, i32)]) -> GgufVocab {
        GgufVocab {
            model: "llama".into(),
            tokens: tokens.iter().map(|(token, _)| token.to_string()).collect(),
            token_types: tokens.iter().map(|(_, kind)| *kind).collect(),
            ..GgufVocab::default()
        }
    }

    #[test]
    fn ends_are_found_by_id_and_by_text() {
        let check = |vocab: GgufVocab, expect: &[u32]| assert_eq!(vocab.ends(), expect, "{:?}", vocab.tokens);
        for name in [ENDS, PADS, REPOSITORIES, SEPARATORS].concat() {
            check(vocab(&[("a", 1), (name, 1)]), &[1]);
        }
        // As Phi-3, Phi-4-mini, Gemma 2, Gemma 3 and gpt-oss are published: the id ends the text,
        // the name the turn.
        check(GgufVocab { eos: Some(0), ..vocab(&[("<|endoftext|>", 3), ("<|end|>", 4)]) }, &[0, 1]);
        check(GgufVocab { eos: Some(0), ..vocab(&[("<eos>", 3), ("<end_of_turn>", 3), ("</s>", 4)]) }, &[0, 1]);
        let harmony = [("<|endoftext|>", 3), ("<|return|>", 3), ("<|end|>", 3), ("<|call|>", 3), ("<|start|>", 3)];
        check(GgufVocab { eos: Some(1), eot: Some(2), ..vocab(&harmony) }, &[0, 1, 3]);
        check(vocab(&[("<|flush|>", 3), ("<|calls|>", 3), ("<|end|>", 3)]), &[0, 1]);
        check(vocab(&[("<|return|>", 3), ("<|end|>", 3)]), &[0, 1]);
        check(vocab(&[("<|tool_response>", 4), ("</s>", 3), ("<turn|>", 3)]), &[0, 2]);
        // Ids, whichever way they are given.
        let words = [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1), ("f", 1), ("g", 1)];
        check(GgufVocab { eos: Some(2), eot: Some(1), eom: Some(4), ..vocab(&words) }, &[1, 2, 4]);
        check(GgufVocab { eos_ids: vec![5, 3, 3, 99], ..vocab(&words) }, &[3, 5]);
        check(GgufVocab { fim_pad: Some(0), fim_rep: Some(1), fim_sep: Some(2), ..vocab(&words) }, &[0, 1, 2]);
        check(GgufVocab { fim_sep: Some(1), ..vocab(&[("<|file_sep|>", 3), ("<sep>", 3)]) }, &[1]);
        // A tag of HTML, unless the file types it.
        check(vocab(&[("</s>", 1)]), &[]);
        check(vocab(&[("</s>", 3)]), &[0]);
    }

    #[test]
    fn ends_are_taken_whole_and_not_shown() {
        let bytes: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
        let check = |vocab: GgufVocab, expect: &[(&str, bool)]| {
            let count = vocab.tokens.len();
            let bytes = bytes.iter().cloned();
            let types = if vocab.token_types.is_empty() { Vec::new() } else { vec![6; 256] };
            let tokenizer = Tokenizer::from_gguf(GgufVocab {
                tokens: vocab.tokens.iter().cloned().chain(bytes).collect(),
                token_types: vocab.token_types.iter().copied().chain(types).collect(),
                add_bos: Some(false),
                add_space_prefix: Some(false),
                ..vocab
            })
            .expect("a tokenizer");
            for (id, &(token, special)) in expect.iter().enumerate().take(count) {
                let id = id as u32;
                assert_eq!(tokenizer.is_special(id), special, "{token}");
                assert_eq!(tokenizer.encode(token, false).expect("text") == [id], special, "{token}");
                assert_eq!(tokenizer.decode(&[id], true).is_empty(), special, "{token}");
            }
        };
        check(
            GgufVocab {
                eos: Some(0),
                eot: Some(3),
                eom: Some(4),
                ..vocab(&[("<eos>", 3), ("<|im_end|>", 1), ("<EOT>", 4), ("<x>", 4), ("word", 1)])
            },
            &[("<eos>", true), ("<|im_end|>", true), ("<EOT>", true), ("<x>", true), ("word", false)],
        );
        check(GgufVocab { token_types: Vec::new(), ..vocab(&[("<|end|>", 1), ("word", 1)]) }, &[("<|end|>", true)]);
    }
}
