//! Prompts as `/v1/completions` takes them: a string, token ids, or an array of either.

use serde_json::{Value, json};

use crate::fields::{Kind, ListOf, Text, TokenId, Wrong};
use crate::json::Raw;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// One prompt or several, distinguished by the array's first item.
pub struct Prompts {
    pub vocab_size: usize,
    /// Most prompts of one request.
    pub most: usize,
}

impl Prompts {
    fn tokens(&self) -> ListOf<TokenId> {
        ListOf::between(TokenId { vocab_size: self.vocab_size }, 1, usize::MAX)
    }

    fn one(&self, raw: Raw<'_>) -> Result<Prompt, Wrong> {
        match raw.is_list() {
            true => self.tokens().read_raw(raw).map(Prompt::Tokens),
            false if raw.is_text() => Text::any().read_raw(raw).map(Prompt::Text),
            false => Err(Wrong::new("must be a string or an array of token ids")),
        }
    }
}

impl Kind for Prompts {
    type Value = Vec<Prompt>;

    fn read_raw(&self, raw: Raw<'_>) -> Result<Vec<Prompt>, Wrong> {
        match raw.items() {
            Some(items) if items.clone().next().is_some_and(|first| first.is_text() || first.is_list()) => {
                if items.clone().nth(self.most).is_some() {
                    return Err(Wrong::new(format!("must be at most {} strings or arrays of token ids", self.most)));
                }
                let one = |(index, item)| self.one(item).map_err(|wrong: Wrong| wrong.below(&format!("[{index}]")));
                items.enumerate().map(one).collect()
            }
            _ => self.one(raw).map(|prompt| vec![prompt]),
        }
    }

    fn schema(&self) -> Value {
        let mut tokens = self.tokens().schema();
        if let Some(tokens) = tokens.as_object_mut() {
            // The context's length bounds it, and that depends on the rest of the request.
            tokens.remove("maxItems");
        }
        let text = Text::any().schema();
        let either = json!({"anyOf": [text, tokens]});
        json!({"anyOf": [text, tokens, {"type": "array", "items": either, "minItems": 1, "maxItems": self.most}]})
    }

    fn example(&self) -> Vec<Prompt> {
        vec![Prompt::Text("a".into())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_either_are_told_apart() {
        let prompts = |value: Value| Prompts { vocab_size: 9, most: 2 }.read(value);
        assert_eq!(prompts(json!("a")).ok(), Some(vec![Prompt::Text("a".into())]));
        assert_eq!(prompts(json!([1, 8])).ok(), Some(vec![Prompt::Tokens(vec![1, 8])]));
        assert_eq!(prompts(json!(["a", [2]])).ok(), Some(vec![Prompt::Text("a".into()), Prompt::Tokens(vec![2])]));
        for bad in [
            json!([]),
            json!([[]]),
            json!([9]),
            json!([-1]),
            json!(null),
            json!(["a", "b", "c"]),
            json!(["a", 1]),
            json!([1, "a"]),
            json!({}),
        ] {
            assert!(prompts(bad.clone()).is_err(), "{bad}");
        }
    }
}
