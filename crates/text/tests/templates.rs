//! Real chat templates, rendered as transformers renders them.
//!
//! The templates come from the llama.cpp sources in the folder named by FOLIO_LLAMA_CPP; what
//! transformers made of them is in tests/golden/templates/expected.json.lzma, written by render.py
//! beside it.

use std::path::Path;

use folio_testing::fnv1a;
use folio_text::{ChatRender, ChatTemplate, Error, SpecialTokens, WallTime};
use lzma_rust2::LzmaReader;
use serde_json::Value;

/// Templates whose text differs in some cases: (file, number of cases, why).
const KNOWN_GAPS: [(&str, usize, &str); 1] = [(
    "meetkai-functionary-medium-v3.1.jinja",
    10,
    "adds tool schemas to a string marked |safe: Jinja then HTML-escapes the schemas, Folio writes them plain",
)];

/// Templates that Folio renders in cases where transformers raises, and the operation Python
/// refuses.
const KNOWN_LENIENT: [(&str, &str); 5] = [
    ("CohereForAI-c4ai-command-r-plus-tool_use.jinja", "a loop over none"),
    ("LFM2.5-8B-A1B.jinja", "a loop over none"),
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja", "a loop over none"),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja", "a loop over none"),
    ("llama-cpp-deepseek-r1.jinja", "tojson of the iterator that map gives"),
];

#[test]
fn templates_render_as_in_transformers() {
    let Ok(folder) = std::env::var("FOLIO_LLAMA_CPP") else {
        return folio_testing::skip!(Download, "FOLIO_LLAMA_CPP names no source folder of llama.cpp");
    };
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/templates/expected.json.lzma");
    let golden = LzmaReader::new_mem_limit(std::fs::File::open(golden).unwrap(), 128 << 10, None).unwrap();
    let golden: Value = serde_json::from_reader(std::io::BufReader::new(golden)).unwrap();
    let cases = golden["cases"].as_object().unwrap();
    let (mut equal, mut refused, mut lenient, mut wrong) = (0, 0, 0, Vec::new());
    let mut gaps = 0;
    for (file, expected) in golden["templates"].as_object().unwrap() {
        let path = Path::new(&folder).join("models/templates").join(file);
        let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(digest(&source), expected["source"].as_str().unwrap(), "{file} is not the one that was rendered");
        let template = ChatTemplate::new(&source, special(&golden["special_tokens"]));
        for ((name, case), result) in cases.iter().zip(expected["results"].as_array().unwrap()) {
            let rendered = match &template {
                Ok(template) => template.render(&request(case)),
                Err(error) => Err(Error::TemplateSyntax(error.to_string())),
            };
            match (rendered, result.as_str()) {
                (Ok(text), Some(expected)) if digest(&text) == expected => equal += 1,
                (Ok(_), Some(_)) if KNOWN_GAPS.iter().any(|(gap, ..)| gap == file) => gaps += 1,
                (Ok(_), Some(_)) => wrong.push(format!("{file} {name}: other text")),
                (Ok(_), None) if KNOWN_LENIENT.iter().any(|(known, _)| known == file) => lenient += 1,
                (Ok(_), None) => wrong.push(format!("{file} {name}: rendered, but transformers raises")),
                (Err(error), Some(_)) => wrong.push(format!("{file} {name}: {error}")),
                (Err(_), None) => refused += 1,
            }
        }
    }
    println!("{equal} equal, {gaps} known gaps, {refused} refused by both, {lenient} refused by transformers alone");
    let expected_gaps: usize = KNOWN_GAPS.iter().map(|(_, cases, _)| cases).sum();
    assert_eq!(gaps, expected_gaps, "known gaps");
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

fn request(case: &Value) -> ChatRender {
    ChatRender {
        messages: case["messages"].as_array().unwrap().clone(),
        tools: case.get("tools").cloned(),
        add_generation_prompt: case.get("add_generation_prompt").is_none_or(|flag| flag.as_bool().unwrap()),
        extra: case.get("extra").map(|extra| extra.as_object().unwrap().clone()).unwrap_or_default(),
        // 2026-03-05 07:08:09, as in the golden file.
        now: Some(WallTime::from_unix(1_772_694_489, 0)),
        ..Default::default()
    }
}

fn special(tokens: &Value) -> SpecialTokens {
    let token = |name: &str| tokens[name].as_str().map(str::to_string);
    SpecialTokens { bos: token("bos_token"), eos: token("eos_token"), pad: token("pad_token"), unk: token("unk_token") }
}

/// FNV-1a 64 and the length in bytes.
fn digest(text: &str) -> String {
    format!("{:016x}:{}", fnv1a(text.bytes()), text.len())
}
