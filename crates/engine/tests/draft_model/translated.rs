//! A draft model of another vocabulary: its translation, its blocks, and answers equal to those
//! without it.

use std::{fs, io::Read, path::PathBuf, sync::Arc};

use folio_device::{
    cpu::{Cpu, CpuConfig},
    reference::Reference,
};
use folio_engine::speculate::{BeginTranslation, DraftModelOptions, Drafter, TranslatedModel, Translation};
use folio_model::Decoder;
use folio_text::{Tokenizer, Translator};
use lzma_rust2::LzmaReader;

use crate::{
    driver::{Count, Driver, Request},
    follows::{SURE, prompt},
    tiny,
};

/// A translation into the same tokens. Every other time the last few differ, as for a text that
/// ends within a word, and nothing is translated back.
struct Wavering {
    wavers: bool,
    tokens: Vec<u32>,
    calls: usize,
}

impl Translation for Wavering {
    fn follow(&mut self, tokens: &[u32]) -> bool {
        self.tokens = tokens.to_vec();
        self.calls += 1;
        if self.is_off() {
            self.tokens.iter_mut().rev().take(3).for_each(|token| *token = (*token + 1) % 211);
        }
        true
    }

    fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    fn back(&self, drafted: &[u32], most: usize) -> Vec<u32> {
        if self.is_off() { Vec::new() } else { drafted[..most.min(drafted.len())].to_vec() }
    }
}

impl Wavering {
    fn is_off(&self) -> bool {
        self.wavers && self.calls.is_multiple_of(2)
    }
}

/// The target drafts for itself: always right if keys and values are those of the tokens.
fn twins(wavers: bool, options: DraftModelOptions) -> Driver<Reference> {
    let model = tiny::alternating();
    let begin: BeginTranslation = Box::new(move || Box::new(Wavering { wavers, tokens: Vec::new(), calls: 0 }));
    let drafter = |target: &Decoder<Reference>| -> folio_engine::Result<Box<dyn Drafter<Reference>>> {
        Ok(Box::new(TranslatedModel::load(Reference::new(), &model, target, options, begin)?))
    };
    Driver::with(Reference::new(), &model, 60, drafter).expect("twins")
}

#[test]
fn what_it_holds_follows_the_tokens() {
    for wavers in [false, true] {
        let mut driver = twins(wavers, SURE);
        let (mut a, mut b) = (Request::new(&prompt(1, 20), 5), Request::new(&prompt(2, 33), 4));
        for step in 0..12 {
            match step % 3 {
                0 => driver.step(&mut [&mut a, &mut b]),
                1 => driver.step(&mut [&mut b]),
                _ => driver.step(&mut [&mut a]),
            }
        }
        // The decoder's blocks are independent.
        driver.preempt(&mut a);
        driver.free.reverse();
        (0..4).for_each(|_| driver.step(&mut [&mut a, &mut b]));
        let Count { asked, drafted, accepted, .. } = driver.count;
        assert_eq!(accepted, drafted, "{:?}", driver.count);
        let least = if wavers { asked / 2 - 2 } else { asked - 2 };
        assert!(drafted >= least * 4, "{:?}", driver.count);
    }
}

#[test]
fn who_drafts_least_gives_blocks_up() {
    // 60 blocks become 18: room for two of these requests and no third.
    let mut driver = twins(false, DraftModelOptions { stretch: 0.3, most_tokens: 15, most_rows: 256, ..SURE });
    let mut requests: Vec<Request> = (0..3).map(|seed| Request::new(&prompt(seed, 100), 15)).collect();
    for round in 0..6 {
        for request in &mut requests {
            (0..4).for_each(|_| driver.step(&mut [request]));
        }
        if round % 2 == 0 {
            // All at once: one request has no draft.
            let [a, b, c] = &mut requests[..] else { unreachable!() };
            driver.step(&mut [a, b, c]);
        }
    }
    let Count { asked, drafted, accepted, .. } = driver.count;
    assert_eq!(accepted, drafted, "{:?}", driver.count);
    assert!(drafted > asked, "{:?}", driver.count);
    // The blocks of a request that has ended can be used by others.
    for mut request in requests.drain(1..) {
        driver.draft.forget(request.id);
        driver.free.append(&mut request.table);
    }
    let before = driver.count;
    let mut long = Request::new(&prompt(9, 180), 15);
    (0..10).for_each(|_| driver.step(&mut [&mut long, &mut requests[0]]));
    assert!(driver.count.drafted >= before.drafted + 10, "{before:?}, then {:?}", driver.count);
}

fn shipped(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

/// The built-in models' tokenizer, and one without most of its merges: the same text has more
/// tokens in it.
fn tokenizers() -> [Arc<Tokenizer>; 2] {
    let packed = fs::read(shipped("tokenizer.json.lzma")).expect("a tokenizer that ships");
    let mut json = Vec::new();
    let unpacked = LzmaReader::new_mem_limit(&packed[..], 128 << 10, None);
    unpacked.expect("packed").read_to_end(&mut json).expect("a whole file");
    let mut file: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    file["model"]["merges"].as_array_mut().expect("merges").truncate(2000);
    [json, file.to_string().into_bytes()].map(|json| Arc::new(Tokenizer::from_json(&json).expect("a tokenizer")))
}

struct ByText(folio_text::Translation);

impl Translation for ByText {
    fn follow(&mut self, tokens: &[u32]) -> bool {
        self.0.follow(tokens)
    }

    fn tokens(&self) -> &[u32] {
        self.0.tokens()
    }

    fn back(&self, drafted: &[u32], most: usize) -> Vec<u32> {
        self.0.back(drafted, most)
    }
}

#[test]
fn the_small_model_drafts_in_other_words() {
    const PROMPTS: [&str; 3] = [
        "impl Stack {\n    pub fn new() -> Self {\n        Self { items: Vec::new() }\n    }\n\n    pub fn push(&mut self,",
        "// 日本語 and a crab: 🦀, naïve\nuse std::collections::HashMap;\n\nfn count(words: &[&str]) -> HashMap<String",
        "/// Returns the larger of two numbers.\npub fn max(a: u32, b: u32) -> u32 {\n",
    ];
    const ANSWER: usize = 48;
    let [words, letters] = tokenizers();
    let pair = Arc::new(Translator::new(Arc::clone(&words), letters).expect("both carry text"));
    assert!(pair.stretch() > 1.1, "{} of its tokens for one", pair.stretch());
    let [large, small] =
        ["42m", "7m"].map(|size| folio_model::open(&shipped(&format!("folio-rust-{size}.gguf"))).expect("a model"));
    let answers = |most: usize| {
        let cpu = Cpu::new(CpuConfig { threads: 2, isa: None }).expect("a CPU");
        let (beside, pair) = (cpu.beside(), Arc::clone(&pair));
        let options = DraftModelOptions { stretch: pair.stretch(), ..DraftModelOptions::default() };
        let begin: BeginTranslation = Box::new(move || Box::new(ByText(pair.begin())));
        let drafter = |target: &Decoder<Cpu>| -> folio_engine::Result<Box<dyn Drafter<Cpu>>> {
            Ok(Box::new(TranslatedModel::load(beside, &small, target, options, begin)?))
        };
        let mut driver = Driver::with(cpu, &large, 60, drafter).expect("a pair");
        let prompts = PROMPTS.map(|text| words.encode(text, true).expect("tokens"));
        let mut requests: Vec<Request> = prompts.iter().map(|prompt| Request::new(prompt, most)).collect();
        let is_short = |(request, prompt): &(&mut Request, &Vec<u32>)| request.tokens.len() < prompt.len() + ANSWER;
        loop {
            let mut unfinished: Vec<&mut Request> =
                requests.iter_mut().zip(&prompts).filter(is_short).map(|(request, _)| request).collect();
            if unfinished.is_empty() {
                break;
            }
            driver.step(&mut unfinished);
        }
        let whole =
            requests.iter().zip(&prompts).map(|(request, prompt)| request.tokens[..prompt.len() + ANSWER].to_vec());
        (whole.collect::<Vec<_>>(), driver.count)
    };
    let (plain, count) = answers(0);
    assert_eq!(count.drafted, 0);
    let (drafted, count) = answers(5);
    println!("{count:?}, {:.2} tokens for one", pair.stretch());
    for (number, (found, expected)) in drafted.iter().zip(&plain).enumerate() {
        assert_eq!(words.decode(found, false), words.decode(expected, false), "answer {number}");
        assert_eq!(found, expected, "answer {number}");
    }
    assert!(count.accepted > 20, "{count:?}");
    assert!(count.accepted < count.drafted, "some are wrong: {count:?}");
}
