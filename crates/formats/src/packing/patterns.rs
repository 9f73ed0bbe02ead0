//! Lists of layers in a configuration: exact names, `re:` patterns, wildcards, and classes of
//! layers.

use regex::{Regex, RegexBuilder};
use serde_json::Value;

use super::{scheme, short};
use crate::Result;

/// Most entries of a list, and bytes of a compiled pattern: a hostile configuration costs little.
const MAX_NAMES: usize = 200_000;
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// One entry of compressed-tensors' `targets` or `ignore`.
#[derive(Clone, Debug)]
pub(super) enum Target {
    Name(String),
    /// Matches from the start of a name, as Python's `re.match` does.
    Pattern(Box<Regex>),
    /// A class of layers: `Linear`.
    Class(Class),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Linear,
    Embedding,
}

impl Target {
    /// `None` for a pattern that cannot be compiled.
    pub fn read(text: &str) -> Option<Self> {
        Some(match text {
            "Linear" | "LinearBase" | "FusedMoE" => Target::Class(Class::Linear),
            "Embedding" => Target::Class(Class::Embedding),
            _ => match text.strip_prefix("re:") {
                None => Target::Name(text.to_owned()),
                Some(pattern) => {
                    let anchored = format!("^(?:{pattern})");
                    let built = RegexBuilder::new(&anchored).size_limit(MAX_PATTERN_BYTES).build();
                    Target::Pattern(Box::new(built.ok()?))
                }
            },
        })
    }

    /// How narrowly it names the layer, 0 being the narrowest; `None` if it does not name it.
    pub fn rank(&self, stem: &str) -> Option<u8> {
        let class = if stem.ends_with("embed_tokens") { Class::Embedding } else { Class::Linear };
        match self {
            Target::Name(name) => (name == stem).then_some(0),
            Target::Pattern(pattern) => pattern.is_match(stem).then_some(1),
            Target::Class(wanted) => (*wanted == class).then_some(2),
        }
    }
}

/// Meaning of plain names in a list.
#[derive(Clone, Copy)]
pub(super) enum Names {
    /// A layer, its inner layers, or any layer with a name that ends so: transformers'
    /// `modules_to_not_convert`.
    Ends,
    /// With `*` for any text: ModelOpt's `exclude_modules`.
    Wildcards,
}

impl Names {
    pub fn matches(self, name: &str, stem: &str) -> bool {
        let inside = stem.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        match self {
            Names::Ends => {
                let ends = stem.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'));
                !name.is_empty() && (inside || ends)
            }
            Names::Wildcards => inside || wildcard(name.as_bytes(), stem.as_bytes()),
        }
    }
}

/// Whether `*` and `?` in `pattern` can be filled so that it equals `text`. Linear in both but for
/// the last `*`.
fn wildcard(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while from < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                retry = Some((at + 1, from));
                at += 1;
            }
            Some(byte) if *byte == b'?' || *byte == text[from] => (at, from) = (at + 1, from + 1),
            _ => match retry {
                Some((after, start)) => {
                    retry = Some((after, start + 1));
                    (at, from) = (after, start + 1);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

/// A list of strings, empty if there is none.
pub(super) fn names(config: &Value, field: &str) -> Result<Vec<String>> {
    let list = match config.get(field) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MAX_NAMES => list,
        Some(Value::Array(list)) => {
            return Err(scheme(field, format!("has {} entries, but at most {MAX_NAMES} are read", list.len())));
        }
        Some(other) => return Err(scheme(field, format!("is {}, but must be a list", short(other)))),
    };
    let text = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        other => Err(scheme(field, format!("holds {}, but must hold names", short(other)))),
    };
    list.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_ranked_by_how_narrow_they_are() {
        let rank = |target: &str, stem: &str| Target::read(target).unwrap().rank(stem);
        assert_eq!(rank("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"), Some(0));
        assert_eq!(rank("model.layers.0.mlp", "model.layers.0.mlp.up_proj"), None);
        assert_eq!(rank("re:.*up_proj", "model.layers.0.mlp.up_proj"), Some(1));
        assert_eq!(
            rank("re:.*up", "model.layers.0.mlp.up_proj"),
            Some(1),
            "a match from the start need not reach the end"
        );
        assert_eq!(rank("re:up_proj", "model.layers.0.mlp.up_proj"), None, "but it starts at the start");
        assert_eq!(rank(r"re:model\.layers\.\d+\.mlp.*", "model.layers.12.mlp.up_proj"), Some(1));
        assert_eq!(rank("Linear", "lm_head"), Some(2));
        assert_eq!(rank("Linear", "model.embed_tokens"), None);
        assert_eq!(rank("Embedding", "model.embed_tokens"), Some(2));
        assert!(Target::read("re:(?!x)").is_none());
        assert!(Target::read(&format!("re:{}", "(a{99}){99}".repeat(9))).is_none());
    }

    #[test]
    fn names_cover_layers() {
        for (how, name, stem, expect) in [
            (Names::Ends, "lm_head", "lm_head", true),
            (Names::Ends, "mlp.gate", "model.layers.0.mlp.gate", true),
            (Names::Ends, "mlp.gate", "model.layers.0.mlp.gate_proj", false),
            (Names::Ends, "model.layers.1", "model.layers.1.mlp.up_proj", true),
            (Names::Ends, "model.layers.1", "model.layers.11.mlp.up_proj", false),
            (Names::Ends, "", "lm_head", false),
            (Names::Wildcards, "lm_head", "lm_head", true),
            (Names::Wildcards, "model.layers.0*", "model.layers.0.mlp.up_proj", true),
            (Names::Wildcards, "*router*", "model.layers.0.mlp.router", true),
            (Names::Wildcards, "model.*.q_pro?", "model.layers.0.self_attn.q_proj", true),
            (Names::Wildcards, "model.*.k_proj", "model.layers.0.self_attn.q_proj", false),
            (Names::Wildcards, "*", "anything", true),
            (Names::Wildcards, "*a*a*a*b", &"a".repeat(200), false),
        ] {
            assert_eq!(how.matches(name, stem), expect, "{name} {stem}");
        }
    }
}
