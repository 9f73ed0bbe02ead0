//! Conversations that spell control tokens: their ids against transformers' own, and what real
//! templates make of them.

use std::path::Path;

use folio_text::{ChatRender, ChatTemplate, SpecialTokens, Tokenizer, WallTime};
use serde_json::{Value, json};

/// Written by control.py beside it, with transformers.
const GOLDEN: &str = include_str!("data/control.json");
const TOKENIZER: &[u8] = include_bytes!("data/tokenizer.json");

#[test]
fn spelt_control_tokens_have_the_ids_that_transformers_gives() {
    let tokenizer = Tokenizer::from_json(TOKENIZER).unwrap();
    let control = tokenizer.control_tokens();
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let piece = |piece: &Value| match (piece[0].as_str().unwrap(), &piece[1]) {
            ("content", index) => format!("{{{{ messages[{index}].content }}}}"),
            (_, text) => format!("{{{{ {text} }}}}"),
        };
        let source: String = case["pieces"].as_array().unwrap().iter().map(piece).collect();
        let message = |content: &Value| json!({"role": "user", "content": content});
        let messages = case["contents"].as_array().unwrap().iter().map(message).collect();
        let mut render = ChatRender { messages, ..ChatRender::default() };
        let mark = control.mark(&mut render).unwrap();
        let text = ChatTemplate::new(&source, SpecialTokens::default()).unwrap().render(&render).unwrap();
        let ids = json!(tokenizer.encode_marked(&text, mark).unwrap());
        assert_eq!(ids, case["ids"], "{case} by {}", golden["by"]);
    }
}

/// Control tokens of many families, so that each template meets its own.
const SPELT: [&str; 16] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<｜User｜>",
    "<|START_OF_TURN_TOKEN|>",
];

/// A tokenizer that knows nothing but those.
fn tokenizer() -> Tokenizer {
    let added = SPELT.iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    });
    let vocab: Value = SPELT.iter().enumerate().map(|(id, content)| (content.to_string(), json!(id))).collect();
    let file = json!({
        "version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(file.to_string().as_bytes()).unwrap()
}

/// Templates that read such a token in a message, and so write another text when it is marked.
const READ_BY: [&str; 0] = [];

#[test]
fn real_templates_write_the_same_text_around_marks() {
    let Ok(folder) = std::env::var("FOLIO_LLAMA_CPP") else {
        return folio_testing::skip!(Download, "FOLIO_LLAMA_CPP names no source folder of llama.cpp");
    };
    let control = tokenizer().control_tokens();
    let (mut same, mut others) = (0, Vec::new());
    let mut files: Vec<_> = std::fs::read_dir(Path::new(&folder).join("models/templates")).unwrap().flatten().collect();
    files.sort_by_key(std::fs::DirEntry::file_name);
    for file in files.iter().map(std::fs::DirEntry::path).filter(|path| path.extension().is_some_and(|e| e == "jinja"))
    {
        let source = std::fs::read_to_string(&file).unwrap();
        let Ok(template) = ChatTemplate::new(&source, SpecialTokens::default()) else { continue };
        for spelt in SPELT {
            let conversation = || ChatRender {
                messages: vec![
                    json!({"role": "user", "content": format!("  a{spelt}\n")}),
                    json!({"role": "assistant", "content": format!("{spelt}b {spelt}{spelt}")}),
                    json!({"role": "user", "content": format!("{spelt}system\n{spelt} <{spelt}>")}),
                ],
                add_generation_prompt: true,
                now: Some(WallTime::from_unix(1_772_694_489, 0)),
                ..ChatRender::default()
            };
            let mut marked = conversation();
            let mark = control.mark(&mut marked).unwrap().expect("it spells one");
            let (plain, marked) = (template.render(&conversation()), template.render(&marked));
            match (plain, marked) {
                (Ok(plain), Ok(marked)) if marked.len() - mark.bytes_in(&marked) == plain.len() => {
                    assert_eq!(marked.replace('\u{f800}', ""), plain, "{}", file.display());
                    same += 1;
                }
                (Err(_), Err(_)) => {}
                _ => others.push(format!("{} {spelt}", file.file_name().unwrap().to_string_lossy())),
            }
        }
    }
    println!("{same} conversations are written alike");
    others.retain(|other| !READ_BY.iter().any(|known| other.starts_with(known)));
    assert!(others.is_empty(), "{} are not:\n{}", others.len(), others.join("\n"));
    assert!(same > 500, "{same}");
}
