//! The tokenizer of a GGUF file: the one inside, or a tokenizer.json beside it.

use anyhow::{Result, bail};
use folio_formats::gguf::{Gguf, Metadata};
use folio_text::{Error, GgufVocab, Tokenizer};

/// The tokenizer, if there is one, and the tokens that end an answer by it. `beside` reads the
/// tokenizer beside the file.
pub fn of_gguf(
    gguf: &Gguf,
    beside: impl FnOnce() -> Result<Option<Tokenizer>>,
) -> Result<(Option<Tokenizer>, Vec<u32>)> {
    let Some(vocab) = read(gguf.metadata())? else {
        let tokenizer = beside()?;
        let mut ends = given_ends(gguf.metadata())?;
        ends.extend(tokenizer.iter().flat_map(Tokenizer::named_ends));
        return Ok((tokenizer, ends));
    };
    let ends = vocab.ends();
    let tokenizer = match Tokenizer::from_gguf(vocab) {
        Ok(tokenizer) => tokenizer,
        // An unknown kind says nothing about the words.
        Err(error @ Error::TokenizerGguf { field: "model" | "pre", .. }) => {
            let Some(tokenizer) = beside()? else {
                let path = gguf.metadata().path().display();
                bail!("{path}: {error}; put the model's tokenizer.json beside the file, and it is taken instead");
            };
            check(&tokenizer, gguf)?;
            tokenizer
        }
        Err(error) => return Err(error.into()),
    };
    Ok((Some(tokenizer), ends))
}

/// Whether a tokenizer that was found beside a file belongs to it.
fn check(tokenizer: &Tokenizer, gguf: &Gguf) -> Result<()> {
    let vocab = read(gguf.metadata())?.unwrap_or_default();
    if let Some(id) = tokenizer.differs_from(&vocab) {
        let word = &vocab.tokens[id as usize];
        bail!(
            "the tokenizer.json beside the file is another model's: token {id} is {word:?} in the file and not there"
        );
    }
    Ok(())
}

/// The ids that end an answer if the file has no words.
fn given_ends(metadata: &Metadata) -> Result<Vec<u32>> {
    let mut ends = metadata.find::<Vec<u32>>("tokenizer.ggml.eos_token_ids")?.unwrap_or_default();
    for kind in ["eos", "eot", "eom"] {
        ends.extend(metadata.find::<u32>(&format!("tokenizer.ggml.{kind}_token_id"))?);
    }
    Ok(ends)
}

/// The vocabulary inside a file, if it has one.
fn read(metadata: &Metadata) -> Result<Option<GgufVocab>> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    if metadata.value(&key("tokens")).is_none() {
        return Ok(None);
    }
    let id = |name: &str| metadata.find::<u32>(&key(&format!("{name}_token_id")));
    let flag = |name: &str| metadata.find::<bool>(&key(name));
    let strings = |name: &str| metadata.find::<&[String]>(&key(name));
    let text = |key: &str| metadata.find::<&str>(key).map(Option::unwrap_or_default);
    Ok(Some(GgufVocab {
        model: metadata.str(&key("model"))?.to_string(),
        pre: metadata.find::<&str>(&key("pre"))?.unwrap_or("default").to_string(),
        tokens: metadata.strings(&key("tokens"))?.to_vec(),
        token_types: metadata.find::<Vec<i32>>(&key("token_type"))?.unwrap_or_default(),
        scores: metadata.find::<&[f32]>(&key("scores"))?.unwrap_or_default().to_vec(),
        merges: strings("merges")?.unwrap_or_default().to_vec(),
        bos: id("bos")?,
        eos: id("eos")?,
        unk: id("unknown")?,
        pad: id("padding")?,
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
        add_space_prefix: flag("add_space_prefix")?,
        eot: id("eot")?,
        eom: id("eom")?,
        eos_ids: metadata.find::<Vec<u32>>(&key("eos_token_ids"))?.unwrap_or_default(),
        fim_pad: id("fim_pad")?,
        fim_rep: id("fim_rep")?,
        fim_sep: id("fim_sep")?,
        name: text("general.name")?.to_string(),
        architecture: text("general.architecture")?.to_string(),
    }))
}

#[cfg(test)]
mod tests {
    use folio_formats::gguf::Writer;
    use serde_json::json;

    use super::*;

    fn tokenizer(words: &[&str]) -> Tokenizer {
        let vocab: serde_json::Map<String, serde_json::Value> =
            words.iter().enumerate().map(|(id, word)| (word.to_string(), id.into())).collect();
        let end = json!({"id": words.len(), "content": "<|im_end|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true});
        let file = json!({
            "version": "1.0", "added_tokens": [end], "normalizer": null, "post_processor": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        });
        Tokenizer::from_json(file.to_string().as_bytes()).expect("a sound file")
    }

    fn gguf(name: &str, pre: Option<&str>) -> Gguf {
        let mut writer = Writer::new();
        writer.set("general.architecture", "llama").set("tokenizer.ggml.eos_token_id", 1u32);
        if let Some(pre) = pre {
            let text = |words: &[&str]| words.iter().map(|word| word.to_string()).collect::<Vec<String>>();
            writer.set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", pre);
            writer.set("tokenizer.ggml.tokens", text(&["a", "b", "<|im_end|>"]));
            writer.set("tokenizer.ggml.token_type", vec![1i32, 1, 4]).set("tokenizer.ggml.merges", text(&[]));
        }
        let path = std::env::temp_dir().join(format!("folio-vocab-{name}-{}.gguf", std::process::id()));
        std::fs::write(&path, writer.to_vec()).expect("written");
        Gguf::open(&path).expect("sound")
    }

    #[test]
    fn a_tokenizer_beside_the_file_stands_in_for_one_that_cannot_be_read() {
        let check = |name: &str, pre: Option<&str>, beside: Option<&[&str]>, expect: Result<&[u32], &str>| {
            let read = of_gguf(&gguf(name, pre), || Ok(beside.map(tokenizer)));
            match (read, expect) {
                (Ok((tokenizer, mut ends)), Ok(expect)) => {
                    ends.sort_unstable();
                    assert_eq!(ends, expect, "{name}");
                    let tokenizer = tokenizer.expect("a tokenizer");
                    assert_eq!(tokenizer.encode("b<|im_end|>", false).expect("text"), [1, 2], "{name}");
                    assert!(tokenizer.is_special(2), "{name}");
                }
                (Err(error), Err(expect)) => assert!(format!("{error:#}").contains(expect), "{name}: {error:#}"),
                (read, _) => panic!("{name}: {:?}", read.map(|(_, ends)| ends)),
            }
        };
        check("own", Some("gpt-2"), None, Ok(&[1, 2]));
        check("unknown", Some("superbpe"), Some(&["a", "b"]), Ok(&[1, 2]));
        check("none", Some("superbpe"), None, Err("\"superbpe\" is not known; put the model's tokenizer.json beside"));
        check("other", Some("superbpe"), Some(&["b", "a"]), Err("token 0 is \"a\" in the file and not there"));
        check("without-words", None, Some(&["a", "b"]), Ok(&[1, 2]));
        assert!(of_gguf(&gguf("nothing", None), || Ok(None)).expect("sound").0.is_none());
    }
}
