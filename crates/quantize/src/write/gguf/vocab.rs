//! The vocabulary in GGUF's form (`tokenizer.ggml.*`), from the files beside a Hugging Face
//! checkpoint.
//!
//! Only byte-level BPE is supported. GGUF has names for splitting rules; a rule with other patterns
//! than those of a llama.cpp name is refused, since a wrong rule gives wrong tokens and no error.

use std::collections::BTreeSet;
use std::path::Path;

use folio_formats::gguf::{Array, Value};
use serde_json::Value as Json;

use super::Pairs;
use crate::{Error, Result};

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Everything under `tokenizer.`; the token list is filled up to `vocab_size`.
pub fn describe(folder: &Path, vocab_size: usize) -> Result<Pairs> {
    let path = folder.join("tokenizer.json");
    let wrong = |problem: String| Error::File { path: path.clone(), problem };
    let tokenizer = super::super::read_json(&path)?;
    let model = &tokenizer["model"];
    if model["type"] != "BPE" || model["byte_fallback"] == true {
        return Err(wrong("only byte-level BPE can be written to GGUF".to_owned()));
    }
    let (tokens, types) = tokens(&tokenizer, vocab_size).map_err(wrong)?;
    let pre = splitting_rule(&tokenizer).map_err(wrong)?;
    let merges = merges(model).ok_or_else(|| wrong("model.merges is not a list of pairs".to_owned()))?;
    let mut pairs: Pairs = vec![
        ("tokenizer.ggml.model".to_owned(), "gpt2".into()),
        ("tokenizer.ggml.pre".to_owned(), pre.into()),
        ("tokenizer.ggml.tokens".to_owned(), tokens.into()),
        ("tokenizer.ggml.token_type".to_owned(), Value::Array(Array::I32(types))),
        ("tokenizer.ggml.merges".to_owned(), merges.into()),
    ];
    special(folder, &tokenizer, &mut pairs)?;
    Ok(pairs)
}

/// Texts and types by id.
fn tokens(tokenizer: &Json, vocab_size: usize) -> std::result::Result<(Vec<String>, Vec<i32>), String> {
    let vocab = tokenizer["model"]["vocab"].as_object().ok_or("model.vocab is not an object")?;
    let added = tokenizer["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
    let mut tokens: Vec<String> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![UNUSED; vocab_size];
    let known = vocab.iter().map(|(text, id)| (text.as_str(), id, NORMAL));
    let added = added.iter().map(|token| {
        let kind = if token["special"] == true { CONTROL } else { USER_DEFINED };
        (token["content"].as_str().unwrap_or_default(), &token["id"], kind)
    });
    for (text, id, kind) in known.chain(added) {
        let place = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|id| *id < vocab_size);
        let place =
            place.ok_or_else(|| format!("token {text:?} has id {id}, but the model has {vocab_size} tokens"))?;
        tokens[place] = text.to_owned();
        types[place] = kind;
    }
    Ok((tokens, types))
}

/// `"a b"`, from either of the two forms of pairs in such files.
fn merges(model: &Json) -> Option<Vec<String>> {
    let pair = |merge: &Json| match merge {
        Json::String(text) => Some(text.clone()),
        Json::Array(two) => Some(format!("{} {}", two.first()?.as_str()?, two.get(1)?.as_str()?)),
        _ => None,
    };
    model["merges"].as_array()?.iter().map(pair).collect()
}

fn splitting_rule(tokenizer: &Json) -> std::result::Result<&'static str, String> {
    let pre = &tokenizer["pre_tokenizer"];
    let steps = match pre["type"].as_str() {
        Some("Sequence") => pre["pretokenizers"].as_array().cloned().unwrap_or_default(),
        _ => vec![pre.clone()],
    };
    let mut patterns = Vec::new();
    let mut digits = false;
    for step in &steps {
        match step["type"].as_str() {
            Some("Split") if step["pattern"]["Regex"].is_string() => {
                patterns.push(step["pattern"]["Regex"].as_str().unwrap_or_default());
            }
            Some("Digits") if step["individual_digits"] == true => digits = true,
            Some("ByteLevel") if step["add_prefix_space"] == true => {
                return Err("a tokenizer that puts a space before the text cannot be written to GGUF".to_owned());
            }
            Some("ByteLevel") if step["use_regex"] == false => {}
            Some("ByteLevel") => patterns.push("gpt2"),
            other => return Err(format!("pre_tokenizer: llama.cpp has no name for a step of type {other:?}")),
        }
    }
    // The rule that takes words whole if they are tokens has another name than the same rule
    // without.
    let whole_words = tokenizer["model"]["ignore_merges"] == true;
    Ok(match patterns[..] {
        [LLAMA3] if whole_words => "llama-bpe",
        [LLAMA3] => "smaug-bpe",
        [QWEN2] if !whole_words => "qwen2",
        [GPT4O] if !whole_words => "gpt-4o",
        [TEKKEN] if whole_words => "tekken",
        ["gpt2"] if digits && !whole_words => "smollm",
        ["gpt2"] if !whole_words => "gpt-2",
        _ => return Err(format!("pre_tokenizer: llama.cpp has no name for the patterns {patterns:?}")),
    })
}

/// Special ids, whether they are added, and the chat template.
fn special(folder: &Path, tokenizer: &Json, pairs: &mut Pairs) -> Result<()> {
    let optional = |file: &str| {
        let path = folder.join(file);
        if path.is_file() { super::super::read_json(&path) } else { Ok(Json::Null) }
    };
    let (config, generation) = (optional("config.json")?, optional("generation_config.json")?);
    let about = optional("tokenizer_config.json")?;
    let id = |field: &str| {
        let first = |value: &Json| match value {
            Json::Array(ids) => ids.first().and_then(Json::as_u64),
            id => id.as_u64(),
        };
        first(&generation[field]).or_else(|| first(&config[field])).and_then(|id| u32::try_from(id).ok())
    };
    for (field, key) in [("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")] {
        if let Some(id) = id(field) {
            pairs.push((format!("tokenizer.ggml.{key}_token_id"), id.into()));
        }
    }
    let map = optional("special_tokens_map.json")?;
    let ends = ends([&generation, &config, &map, &about], tokenizer);
    if ends.len() > 1 {
        pairs.push(("tokenizer.ggml.eos_token_ids".to_owned(), Value::Array(Array::U32(ends))));
    }
    let adds_bos = about["add_bos_token"].as_bool().unwrap_or_else(|| begins_with_special(tokenizer));
    pairs.push(("tokenizer.ggml.add_bos_token".to_owned(), (adds_bos && id("bos_token_id").is_some()).into()));
    let beside = folder.join("chat_template.jinja");
    let template = match std::fs::read_to_string(&beside) {
        Ok(text) => Some(text),
        Err(_) => about["chat_template"].as_str().map(str::to_owned),
    };
    if let Some(template) = template {
        pairs.push(("tokenizer.chat_template".to_owned(), template.into()));
    }
    if !generation.is_null() {
        pairs.push(("folio.generation_config".to_owned(), generation.to_string().into()));
    }
    Ok(())
}

/// Every id that ends an answer: from the model's files, and from the tokenizer's end token, which
/// is given as text.
fn ends(files: [&Json; 4], tokenizer: &Json) -> Vec<u32> {
    let of_model = files.iter().flat_map(|file| match &file["eos_token_id"] {
        Json::Array(ids) => ids.as_slice(),
        id => std::slice::from_ref(id),
    });
    let text = |file: &&Json| match &file["eos_token"] {
        Json::Object(token) => token.get("content").and_then(Json::as_str).map(str::to_owned),
        token => token.as_str().map(str::to_owned),
    };
    let own = files.iter().rev().find_map(text).and_then(|text| {
        let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
        let mut added = added.filter(|token| token["content"] == text).map(|token| &token["id"]);
        added.next().or_else(|| tokenizer["model"]["vocab"].get(&text))
    });
    let ids = of_model.chain(own).filter_map(|id| u32::try_from(id.as_u64()?).ok());
    ids.collect::<BTreeSet<u32>>().into_iter().collect()
}

/// Whether the post-processor's template for one text starts with a special token.
fn begins_with_special(tokenizer: &Json) -> bool {
    let post = &tokenizer["post_processor"];
    let own = std::slice::from_ref(post);
    let steps = post["processors"].as_array().map_or(own, Vec::as_slice);
    steps.iter().any(|step| step["single"][0].get("SpecialToken").is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tokenizer(pre: Json, ignore_merges: bool) -> Json {
        json!({
            "added_tokens": [{"id": 2, "content": "<s>", "special": true}, {"id": 3, "content": "<t>", "special": false}],
            "pre_tokenizer": pre,
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]], "ignore_merges": ignore_merges},
        })
    }

    #[test]
    fn rules_go_by_their_patterns() {
        let split = |regex: &str| {
            json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}},
                {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
            ]})
        };
        let plain = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true});
        let digits = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true}, plain.clone()]});
        let rule = |pre: &Json, whole| splitting_rule(&tokenizer(pre.clone(), whole));
        assert_eq!(rule(&split(LLAMA3), true), Ok("llama-bpe"));
        assert_eq!(rule(&split(LLAMA3), false), Ok("smaug-bpe"));
        assert_eq!(rule(&split(QWEN2), false), Ok("qwen2"));
        assert_eq!(rule(&plain, false), Ok("gpt-2"));
        assert_eq!(rule(&digits, false), Ok("smollm"));
        assert!(rule(&split("odd"), false).unwrap_err().contains("odd"));
        assert!(rule(&json!({"type": "Metaspace"}), false).unwrap_err().contains("Metaspace"));
    }

    #[test]
    fn all_ends_are_kept() {
        let check = |generation: Json, config: Json, map: Json, about: Json, expect: &[u32]| {
            let found = ends([&generation, &config, &map, &about], &tokenizer(json!(null), false));
            assert_eq!(found, expect, "{generation} {config} {map} {about}");
        };
        let none = || json!(null);
        check(none(), none(), none(), none(), &[]);
        check(json!({"eos_token_id": [1, 0]}), json!({"eos_token_id": 1}), none(), none(), &[0, 1]);
        check(none(), json!({"eos_token_id": 1}), none(), json!({"eos_token": "<s>"}), &[1, 2]);
        check(none(), none(), json!({"eos_token": {"content": "<t>"}}), json!({"eos_token": null}), &[3]);
        check(none(), none(), json!({"eos_token": "<t>"}), json!({"eos_token": "a"}), &[0]);
        check(none(), json!({"eos_token_id": -1}), none(), json!({"eos_token": "<nowhere>"}), &[]);
    }

    #[test]
    fn tokens_have_types_and_holes_are_filled() {
        let (texts, types) = tokens(&tokenizer(json!(null), false), 6).unwrap();
        assert_eq!(texts, ["a", "b", "<s>", "<t>", "[PAD4]", "[PAD5]"]);
        assert_eq!(types, [NORMAL, NORMAL, CONTROL, USER_DEFINED, UNUSED, UNUSED]);
        assert!(tokens(&tokenizer(json!(null), false), 3).unwrap_err().contains("<t>"));
        assert_eq!(merges(&json!({"merges": [["a", "b"], "c d"]})).unwrap(), ["a b", "c d"]);
        assert!(merges(&json!({"merges": [["a"]]})).is_none());
    }
}
