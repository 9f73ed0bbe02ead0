//! The prompts: Rust code, questions and random bytes, with all options that drafts could get
//! wrong.

use std::{collections::HashMap, io::BufReader, path::PathBuf};

use folio_engine::SamplingParams;
use lzma_rust2::LzmaReader;

pub struct Prompt {
    pub tokens: Vec<u32>,
    pub params: SamplingParams,
    /// Its client aborts when the answer contains this string.
    pub stop: Option<&'static str>,
}

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The models' own tokens.
pub struct Tokens {
    ids: HashMap<Vec<u8>, u32>,
}

impl Tokens {
    pub fn read() -> Self {
        // Byte-level vocabularies map bytes that are not printable to other characters.
        let is_plain = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let hidden = (0..=255).filter(|byte| !is_plain(byte)).enumerate().map(|(i, byte)| (256 + i as u32, byte));
        let plain = (0..=255).filter(is_plain).map(|byte| (u32::from(byte), byte));
        let bytes: HashMap<u32, u8> = plain.chain(hidden).collect();
        let file = std::fs::File::open(root().join("models/tokenizer.json.lzma")).expect("a tokenizer");
        let file = LzmaReader::new_mem_limit(file, u32::MAX, None).expect("a compressed file");
        let file: serde_json::Value = serde_json::from_reader(BufReader::new(file)).expect("JSON");
        let tokens = file["model"]["vocab"].as_object().expect("a vocabulary");
        let of = |(token, id): (&String, &serde_json::Value)| {
            let token: Option<Vec<u8>> = token.chars().map(|c| bytes.get(&u32::from(c)).copied()).collect();
            Some((token?, id.as_u64()? as u32))
        };
        Self { ids: tokens.iter().filter_map(of).collect() }
    }

    /// The longest matching token first: not the model's tokenization, but text all the same.
    fn cut(&self, text: &[u8], most: usize) -> Vec<u32> {
        let (mut rest, mut tokens) = (text, Vec::new());
        while !rest.is_empty() && tokens.len() < most {
            let fits = (1..=rest.len().min(24)).rev().find_map(|len| self.ids.get(&rest[..len]).map(|&id| (len, id)));
            let (len, token) = fits.expect("every byte is a token");
            tokens.push(token);
            rest = &rest[len..];
        }
        tokens
    }

    /// Bytes of the tokens, by id.
    pub fn bytes(&self) -> HashMap<u32, Vec<u8>> {
        self.ids.iter().map(|(bytes, &id)| (id, bytes.clone())).collect()
    }
}

pub fn prompts(tokens: &Tokens, count: usize) -> Vec<Prompt> {
    let sources = [
        "event_loop/mod.rs",
        "inputs.rs",
        "event_loop/failure.rs",
        "runner/mod.rs",
        "speculate/ngram.rs",
        "tiers/disk.rs",
    ];
    let code: Vec<u8> = sources
        .iter()
        .flat_map(|path| std::fs::read(root().join("crates/engine/src").join(path)).expect("a source"))
        .collect();
    let subjects = ["a lifetime", "the borrow checker", "an iterator", "a trait object", "Result", "a mutex", "drop"];
    let asks = ["What is", "How do I explain", "Why does my program not compile with", "When should I avoid"];
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut text = |index: usize| match index % 5 {
        0..3 => {
            let first = random() as usize % (code.len() - 900);
            tokens.cut(&code[first..first + 900], 12 + index % 50)
        }
        3 => {
            let (ask, subject) = (asks[index % asks.len()], subjects[index % subjects.len()]);
            tokens.cut(format!("// {ask} {subject}? Answer {index}.\n").as_bytes(), 64)
        }
        _ => {
            let bytes: Vec<u8> = (0..30).map(|_| random() as u8).collect();
            tokens.cut(&bytes, 30)
        }
    };
    let prompt = |index: usize| Prompt { tokens: text(index), params: params(index), stop: stop(index) };
    (0..count).map(prompt).collect()
}

/// A quarter is sampled, and a quarter has penalties; some of each ask for logprobs.
fn params(index: usize) -> SamplingParams {
    let logprobs = index.is_multiple_of(6).then_some(2);
    let base = SamplingParams { max_tokens: 14, temperature: 0.0, logprobs, ..SamplingParams::default() };
    match index % 4 {
        1 => SamplingParams { temperature: 0.7, top_p: 0.95, seed: index as u64, ..base },
        3 => SamplingParams { repetition_penalty: 1.1, frequency_penalty: 0.2, ..base },
        _ => base,
    }
}

/// For a third of all prompts; code soon contains one of these.
fn stop(index: usize) -> Option<&'static str> {
    index.is_multiple_of(3).then_some([";\n", "self", "()", "  "][index / 3 % 4])
}
