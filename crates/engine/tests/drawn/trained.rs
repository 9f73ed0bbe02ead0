//! Two hundred prompts to a trained model, Rust code, questions and random bytes, greedy and drawn, sixteen at a time and
//! with preemption: token for token the same with drafts and without.

use std::{collections::HashMap, io::BufReader, path::PathBuf, sync::Arc};

use folio_engine::{
    Background, Engine, EngineConfig, EngineStats, Event, FinishReason, GroupConfig, Runner, SamplingParams,
    speculate::{
        Drafter, Lookahead, LookaheadOptions, Ngram, NgramOptions, OnHost, Speculation, Suffix, SuffixOptions,
    },
};
use folio_model::{
    Decoder, DecoderLimits, OpenModel,
    device::{
        KvFormat,
        cpu::{Cpu, CpuConfig},
    },
};
use lzma_rust2::LzmaReader;

use crate::{
    drafted::options,
    drafters::{Knowing, Manner},
};

const PROMPTS: usize = 200;
const MAX_SEQS: usize = 16;
const BUDGET: usize = 512;
const MAX_LEN: usize = 256;
const BLOCKS: usize = 200;

pub type Request = (Vec<u32>, SamplingParams);
/// Makes a drafter beside the decoder.
pub type Make = Box<dyn FnOnce(&mut Decoder<Cpu>) -> Box<dyn Drafter<Cpu>>>;
type Answer = (Vec<u32>, Option<FinishReason>);

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The model's own tokens, the longest that fits first: not as its tokenizer would cut text, but text all the same.
pub struct Tokens(HashMap<Vec<u8>, u32>);

impl Tokens {
    pub fn read() -> Self {
        // As byte-level vocabularies write bytes: those that cannot be seen are moved up.
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
        Self(tokens.iter().filter_map(of).collect())
    }

    fn cut(&self, text: &[u8], most: usize) -> Vec<u32> {
        let (mut rest, mut tokens) = (text, Vec::new());
        while !rest.is_empty() && tokens.len() < most {
            let fits = (1..=rest.len().min(24)).rev().find_map(|len| self.0.get(&rest[..len]).map(|&id| (len, id)));
            let (len, token) = fits.expect("every byte is a token");
            tokens.push(token);
            rest = &rest[len..];
        }
        tokens
    }
}

pub fn requests(tokens: &Tokens) -> Vec<Request> {
    let sources = ["core.rs", "inputs.rs", "failure.rs", "runner.rs", "speculate/ngram.rs", "tiers/disk.rs"];
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
    let mut prompt = |index: usize| match index % 5 {
        0..3 => {
            let first = random() as usize % (code.len() - 900);
            tokens.cut(&code[first..first + 900], 20 + index % 90)
        }
        3 => {
            let (ask, subject) = (asks[index % asks.len()], subjects[index % subjects.len()]);
            tokens.cut(format!("// {ask} {subject}? Answer {index}.\n").as_bytes(), 64)
        }
        _ => {
            let bytes: Vec<u8> = (0..40).map(|_| random() as u8).collect();
            tokens.cut(&bytes, 40)
        }
    };
    let params = |index: usize| {
        let base = SamplingParams { max_tokens: 24, temperature: 0.0, ..SamplingParams::default() };
        match index % 4 {
            1 => SamplingParams { temperature: 0.7, top_p: 0.95, seed: index as u64, ..base },
            3 => SamplingParams { repetition_penalty: 1.1, frequency_penalty: 0.2, ..base },
            _ => base,
        }
    };
    (0..PROMPTS).map(|index| (prompt(index), params(index))).collect()
}

pub fn answer(
    model: &OpenModel,
    requests: &[Request],
    preempts: bool,
    drafter: Option<(Make, usize)>,
) -> (Vec<Answer>, EngineStats) {
    let limits = DecoderLimits {
        rows: BUDGET,
        spans: BUDGET,
        outputs: BUDGET,
        table_entries: BUDGET * MAX_LEN / 16,
        blocks: vec![BLOCKS],
        kv_format: KvFormat::BF16,
    };
    let cpu = Cpu::new(CpuConfig { threads: 2, isa: None }).expect("a CPU");
    let mut decoder = Decoder::load(cpu, model, limits, &mut |_| {}).expect("the model loads");
    let speculation = drafter.map(|(make, most)| Speculation::new(make(&mut decoder), options(most)));
    let mut runner = Runner::new(decoder, None);
    if let Some(speculation) = speculation {
        runner = runner.with_speculation(speculation);
    }
    let config = EngineConfig {
        max_seqs: MAX_SEQS,
        budget_tokens: BUDGET,
        max_model_len: MAX_LEN,
        groups: vec![GroupConfig::new(BLOCKS)],
        inter_token_target: None,
        logits_width: model.spec.vocab_size,
        eos: vec![0],
        force_preempt_every: preempts.then_some(11),
        ..EngineConfig::default()
    };
    let engine = Engine::start(Box::new(Background::start(runner).expect("a thread")), config).expect("sound");
    let submit = |(prompt, params): &Request| {
        engine.submit(engine.request(prompt.clone(), params.clone()).expect("valid")).expect("room")
    };
    let streams: Vec<_> = requests.iter().map(submit).collect();
    let read = |mut stream: folio_engine::RequestStream| {
        let mut answer = Answer::default();
        while let Some(event) = stream.recv() {
            match event {
                Event::Token { token, .. } => answer.0.push(token),
                Event::Finished { reason, usage, .. } => {
                    assert!(usage.accepted_drafts <= usage.completion_tokens);
                    answer.1 = Some(reason);
                }
                other => panic!("nobody asked for {other:?}"),
            }
        }
        answer
    };
    let answers = streams.into_iter().map(read).collect();
    let stats = engine.stats();
    engine.shutdown();
    (answers, stats)
}

#[test]
fn two_hundred_prompts() {
    let path = root().join("models/folio-rust-7m.gguf");
    let requests = requests(&Tokens::read());
    let model = folio_model::open(&path).expect("a sound model");
    let (expected, plain) = answer(&model, &requests, false, None);
    assert_eq!(plain.speculation.drafts, 0);
    let sequence = |((prompt, _), (tokens, _)): (&Request, &Answer)| [&prompt[..], tokens].concat();
    let sequences = Arc::new(requests.iter().zip(&expected).map(sequence).collect());
    let vocab = model.spec.vocab_size as u32;
    let knowing = Knowing { manner: Manner::Trees, reads_step: true, vocab, sequences, met: Arc::default(), random: 5 };
    let drafters: [(&str, Box<dyn Drafter<Cpu>>, usize); 4] = [
        ("n-grams", Box::new(OnHost(Ngram::new(NgramOptions::default()))), 4),
        ("suffixes", Box::new(OnHost(Suffix::new(SuffixOptions::default()))), 8),
        ("lookahead", Box::new(Lookahead::new(LookaheadOptions::default())), 14),
        ("trees", Box::new(knowing), 10),
    ];
    for (name, drafter, most) in drafters {
        let (found, stats) =
            answer(&model, &requests, true, Some((Box::new(move |_: &mut Decoder<Cpu>| drafter), most)));
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "prompt {index}, {name}");
        }
        let drafts = &stats.speculation;
        assert!(drafts.accepted_tokens > 200 && stats.scheduler.preemptions > 5, "{name}: {drafts:?}");
        assert!(stats.steps_done < plain.steps_done + stats.scheduler.preemptions, "{name}: no step was saved");
        let tokens: u64 = drafts.accepted_per_position.iter().sum();
        assert_eq!(tokens, drafts.accepted_tokens);
        println!("{name}: {} steps in place of {}, {drafts:?}", stats.steps_done, plain.steps_done);
    }
}
