//! The tokenizers inside GGUF files, against the ids published with llama.cpp's vocabulary files.
//!
//! The files lie in the folder named by FOLIO_LLAMA_CPP: models/ggml-vocab-*.gguf with .inp (texts)
//! and .out (ids).

use std::path::{Path, PathBuf};

use folio_formats::gguf::{Gguf, Metadata};
use folio_text::{GgufVocab, Tokenizer};

const SEPARATOR: &str = "\n__ggml_vocab_test__\n";

/// Kinds of tokenizer that are neither BPE nor SentencePiece, and are refused by name.
const UNSUPPORTED: [&str; 2] = ["ggml-vocab-bert-bge", "ggml-vocab-nomic-bert-moe"];

/// Vocabularies published without expected ids: they must load, and their text must come back.
const WITHOUT_IDS: [&str; 3] = ["ggml-vocab-aquila", "ggml-vocab-baichuan", "ggml-vocab-gpt-neox"];

/// The ids that end an answer: those that llama.cpp prints as its EOG tokens, less `</s>` where the
/// file types it as text (2 of Phi-3, 128247 of Qwen 2).
const ENDS: [(&str, &[u32]); 17] = [
    ("aquila", &[0, 100_007]),
    ("baichuan", &[2]),
    ("command-r", &[0, 255_001]),
    ("deepseek-coder", &[32_014]),
    ("deepseek-llm", &[100_001]),
    ("falcon", &[11]),
    ("gemma-4", &[1, 50, 106]),
    ("gpt-2", &[50_256]),
    ("gpt-neox", &[0]),
    ("llama-bpe", &[128_001, 128_009]),
    ("llama-spm", &[2]),
    ("mpt", &[0]),
    ("phi-3", &[32_000, 32_007]),
    ("qwen2", &[151_643, 151_645]),
    ("qwen35", &[151_643, 151_645]),
    ("refact", &[0, 4, 18]),
    ("starcoder", &[0, 4]),
];

/// Texts with special tokens, and their ids by llama.cpp.
const PHI3: [(&str, &[u32]); 3] = [
    ("<|user|>\nSYS\nHI<|end|>\n<|assistant|>\n", &[32_010, 317, 21_554, 13, 17_628, 32_007, 32_001]),
    ("<s> a<|endoftext|> b</s> \t\r\n c", &[1, 29_871, 263, 32_000, 29_871, 289, 2, 274]),
    ("a <|system|>  <|end|>\u{b}\u{c}x", &[263, 29_871, 32_006, 32_007, 921]),
];

/// llama.cpp's files, by name, if they are there.
fn folder() -> Option<PathBuf> {
    let folder = std::env::var("FOLIO_LLAMA_CPP").ok();
    if folder.is_none() {
        folio_testing::skip!(Download, "FOLIO_LLAMA_CPP names no source folder of llama.cpp");
    }
    Some(Path::new(&folder?).join("models"))
}

fn read(folder: &Path, name: &str) -> GgufVocab {
    let path = folder.join(format!("ggml-vocab-{name}.gguf"));
    vocab(Gguf::open(&path).unwrap_or_else(|error| panic!("{name}: {error}")).metadata())
}

#[test]
fn answers_end_where_llama_cpp_ends_them() {
    let Some(folder) = folder() else { return };
    for (name, expect) in ENDS {
        let vocab = read(&folder, name);
        assert_eq!(vocab.ends(), expect, "{name}");
        let tokenizer = Tokenizer::from_gguf(vocab).unwrap();
        for &id in expect {
            assert!(tokenizer.is_special(id), "{name}: {id} is shown");
            assert_eq!(tokenizer.encode(&tokenizer.decode(&[id], false), false).unwrap(), [id], "{name}");
        }
    }
}

#[test]
fn phi3_drops_space_behind_special_tokens() {
    let Some(folder) = folder() else { return };
    let file = read(&folder, "phi-3");
    let tokenizer = |name: &str, architecture: &str| {
        Tokenizer::from_gguf(GgufVocab { name: name.into(), architecture: architecture.into(), ..file.clone() })
            .unwrap()
    };
    // The names that llama.cpp knows, and one as newer converters spell it.
    for name in ["Phi3", "My-Phi-3-Tune", "Phi 3.5 Mini Instruct"] {
        let tokenizer = tokenizer(name, "phi3");
        for (text, expect) in PHI3 {
            assert_eq!(tokenizer.encode(text, false).unwrap(), expect, "{name} {text:?}");
        }
    }
    let found = tokenizer("Llama", "llama").encode(PHI3[0].0, false).unwrap();
    assert_eq!(found.len(), 13, "other models of this vocabulary keep it: {found:?}");
}

#[test]
fn gguf_tokenizers_give_the_published_ids() {
    let Some(folder) = folder() else { return };
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    files.sort();
    assert!(files.len() > 10, "{} has no vocabularies", folder.display());
    let mut wrong = Vec::new();
    for path in files {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let gguf = Gguf::open(&path).unwrap();
        let loaded = Tokenizer::from_gguf(vocab(gguf.metadata()));
        if UNSUPPORTED.contains(&name.as_str()) {
            let error = loaded.err().expect("an unsupported kind").to_string();
            assert!(error.contains("tokenizer.ggml.model") && error.contains("not supported"), "{error}");
            println!("{name}: refused: {error}");
            continue;
        }
        let tokenizer = loaded.unwrap_or_else(|error| panic!("{name}: {error}"));
        if WITHOUT_IDS.contains(&name.as_str()) {
            let text = "Hello, world! Grüße 123 🎉\n";
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids, false), text, "{name}");
            continue;
        }
        let texts = std::fs::read_to_string(path.with_extension("gguf.inp")).unwrap();
        let ids = std::fs::read_to_string(path.with_extension("gguf.out")).unwrap();
        let texts: Vec<&str> = texts.split(SEPARATOR).collect();
        let ids: Vec<&str> = ids.lines().collect();
        assert!(texts.len() == ids.len() || texts.len() == ids.len() + 1, "{name}: {} {}", texts.len(), ids.len());
        for (text, expected) in texts.iter().zip(&ids) {
            let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
            let found = tokenizer.encode(text, false).unwrap();
            if found != expected {
                wrong.push(format!("{name} {text:?}\n  expected {expected:?}\n  found    {found:?}"));
            }
            if tokenizer.decode(&found, false) != *text {
                wrong.push(format!("{name} {text:?} comes back as {:?}", tokenizer.decode(&found, false)));
            }
        }
        println!("{name}: {} texts", ids.len());
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

fn vocab(metadata: &Metadata) -> GgufVocab {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let id = |name: &str| metadata.find::<u32>(&key(&format!("{name}_token_id"))).unwrap();
    let flag = |name: &str| metadata.find::<bool>(&key(name)).unwrap();
    let strings = |name: &str| metadata.find::<&[String]>(&key(name)).unwrap().unwrap_or_default().to_vec();
    GgufVocab {
        model: metadata.str(&key("model")).unwrap().to_string(),
        pre: metadata.find::<&str>(&key("pre")).unwrap().unwrap_or("default").to_string(),
        tokens: strings("tokens"),
        token_types: metadata.find::<Vec<i32>>(&key("token_type")).unwrap().unwrap_or_default(),
        scores: metadata.find::<&[f32]>(&key("scores")).unwrap().unwrap_or_default().to_vec(),
        merges: strings("merges"),
        bos: id("bos"),
        eos: id("eos"),
        unk: id("unknown"),
        pad: id("padding"),
        add_bos: flag("add_bos_token"),
        add_eos: flag("add_eos_token"),
        add_space_prefix: flag("add_space_prefix"),
        eot: id("eot"),
        eom: id("eom"),
        eos_ids: metadata.find::<Vec<u32>>(&key("eos_token_ids")).unwrap().unwrap_or_default(),
        fim_pad: id("fim_pad"),
        fim_rep: id("fim_rep"),
        fim_sep: id("fim_sep"),
        name: metadata.find::<&str>("general.name").unwrap().unwrap_or_default().to_string(),
        architecture: metadata.find::<&str>("general.architecture").unwrap().unwrap_or_default().to_string(),
    }
}
