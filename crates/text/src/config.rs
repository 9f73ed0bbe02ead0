//! tokenizer_config.json: the chat template and the special tokens by name.

use serde_json::Value;

use crate::{Error, Result, SpecialTokens};

const FILE: &str = "tokenizer_config.json";
/// File in which older tokenizers keep their special tokens.
const MAP_FILE: &str = "special_tokens_map.json";

/// Templates and special tokens of the file; everything else in it is ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// (name, source), "default" where the file has one template without a name.
    templates: Vec<(String, String)>,
    special: SpecialTokens,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
}

impl TokenizerConfig {
    pub fn parse(text: &str) -> Result<Self> {
        let json = object(text)?;
        Ok(TokenizerConfig {
            templates: templates(&json["chat_template"])?,
            special: special(&json)?,
            add_bos_token: flag(&json, "add_bos_token")?,
            add_eos_token: flag(&json, "add_eos_token")?,
        })
    }

    /// Takes from special_tokens_map.json the special tokens that this file leaves out.
    pub fn complete(&mut self, map: &str) -> Result<()> {
        let theirs = object(map).and_then(|json| special(&json)).map_err(|error| match error {
            Error::Config { field, expected, found, .. } => Error::Config { file: MAP_FILE, field, expected, found },
            error => error,
        })?;
        let own = &mut self.special;
        for (own, theirs) in [
            (&mut own.bos, theirs.bos),
            (&mut own.eos, theirs.eos),
            (&mut own.pad, theirs.pad),
            (&mut own.unk, theirs.unk),
        ] {
            *own = own.take().or(theirs);
        }
        Ok(())
    }

    /// The template to use when none is asked for by name.
    pub fn chat_template(&self) -> Option<&str> {
        self.named_template("default")
    }

    /// One of several templates, such as "tool_use".
    pub fn named_template(&self, name: &str) -> Option<&str> {
        self.templates.iter().find(|(other, _)| other == name).map(|(_, source)| source.as_str())
    }

    pub fn special_tokens(&self) -> SpecialTokens {
        self.special.clone()
    }

    /// Whether text starts with the BOS token, where the file says so.
    pub fn add_bos_token(&self) -> Option<bool> {
        self.add_bos_token
    }

    /// Whether text ends with the EOS token, where the file says so.
    pub fn add_eos_token(&self) -> Option<bool> {
        self.add_eos_token
    }
}

fn object(text: &str) -> Result<Value> {
    let json: Value = serde_json::from_str(text).map_err(|error| wrong("file", "a JSON object", error.to_string()))?;
    if json.is_object() { Ok(json) } else { Err(wrong("file", "a JSON object", kind(&json).into())) }
}

fn special(json: &Value) -> Result<SpecialTokens> {
    Ok(SpecialTokens {
        bos: token(json, "bos_token")?,
        eos: token(json, "eos_token")?,
        pad: token(json, "pad_token")?,
        unk: token(json, "unk_token")?,
    })
}

fn templates(value: &Value) -> Result<Vec<(String, String)>> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::String(source) => Ok(vec![("default".into(), source.clone())]),
        Value::Array(list) => {
            let part = |index: usize, entry: &Value, key: &str| {
                let field = format!("chat_template[{index}].{key}");
                let text = entry[key].as_str().map(str::to_string);
                text.ok_or_else(|| wrong(&field, "a string", kind(&entry[key]).into()))
            };
            let pair = |(index, entry)| Ok((part(index, entry, "name")?, part(index, entry, "template")?));
            list.iter().enumerate().map(pair).collect()
        }
        Value::Object(map) => {
            let pair = |(name, source): (&String, &Value)| match source {
                Value::String(source) => Ok((name.clone(), source.clone())),
                other => Err(wrong(&format!("chat_template.{name}"), "a string", kind(other).into())),
            };
            map.iter().map(pair).collect()
        }
        other => Err(wrong("chat_template", "a string or a list of named ones", kind(other).into())),
    }
}

/// A token is a string or an object with its content.
fn token(json: &Value, field: &str) -> Result<Option<String>> {
    match &json[field] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        Value::Object(map) => match map.get("content") {
            Some(Value::String(text)) => Ok(Some(text.clone())),
            other => {
                let found = other.map_or("nothing", kind);
                Err(wrong(&format!("{field}.content"), "a string", found.into()))
            }
        },
        other => Err(wrong(field, "a string or an object with content", kind(other).into())),
    }
}

fn flag(json: &Value, field: &str) -> Result<Option<bool>> {
    match &json[field] {
        Value::Null => Ok(None),
        Value::Bool(flag) => Ok(Some(*flag)),
        other => Err(wrong(field, "true or false", kind(other).into())),
    }
}

fn wrong(field: &str, expected: &'static str, found: String) -> Error {
    Error::Config { file: FILE, field: field.into(), expected, found }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_tokens_and_templates_are_read() {
        let config = TokenizerConfig::parse(
            r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null,
                "add_bos_token": true, "other": [1],
                "chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}"#,
        )
        .unwrap();
        let special = config.special_tokens();
        assert_eq!((special.bos.as_deref(), special.eos.as_deref(), special.pad), (Some("<s>"), Some("</s>"), None));
        assert_eq!((config.chat_template(), config.named_template("tool_use")), (Some("A"), Some("B")));
        assert_eq!((config.add_bos_token(), config.add_eos_token()), (Some(true), None));
        assert_eq!(TokenizerConfig::parse(r#"{"chat_template": "X"}"#).unwrap().chat_template(), Some("X"));
        assert_eq!(TokenizerConfig::parse("{}").unwrap(), TokenizerConfig::default());
    }

    #[test]
    fn a_map_fills_in_what_is_left_out() {
        let check = |config: &str, map: &str, expect: [Option<&str>; 2]| {
            let mut config = TokenizerConfig::parse(config).unwrap();
            config.complete(map).unwrap();
            let special = config.special_tokens();
            assert_eq!([special.bos.as_deref(), special.eos.as_deref()], expect, "{map}");
        };
        let map = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "rstrip": false},
            "additional_special_tokens": ["<x>"]}"#;
        check("{}", map, [Some("<s>"), Some("</s>")]);
        check(r#"{"eos_token": "<|im_end|>", "bos_token": null}"#, map, [Some("<s>"), Some("<|im_end|>")]);
        check(r#"{"eos_token": "<|im_end|>"}"#, "{}", [None, Some("<|im_end|>")]);
        let error = TokenizerConfig::default().complete(r#"{"eos_token": 5}"#).unwrap_err().to_string();
        assert!(error.starts_with("special_tokens_map.json: eos_token: expected a string"), "{error}");
    }

    #[test]
    fn errors_name_the_field() {
        let check = |text: &str, expect: &str| {
            assert_eq!(
                TokenizerConfig::parse(text).unwrap_err().to_string(),
                format!("tokenizer_config.json: {expect}")
            );
        };
        check("[]", "file: expected a JSON object, found a list");
        check(r#"{"eos_token": 5}"#, "eos_token: expected a string or an object with content, found a number");
        check(r#"{"eos_token": {}}"#, "eos_token.content: expected a string, found nothing");
        check(r#"{"chat_template": [{"name": 1}]}"#, "chat_template[0].name: expected a string, found a number");
        check(r#"{"add_bos_token": "yes"}"#, "add_bos_token: expected true or false, found a string");
    }
}
