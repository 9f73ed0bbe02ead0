//! One model and its prompts: compares its answers without drafts to those with a method.

use std::{collections::HashMap, sync::Arc};

use folio_device::{
    KvFormat,
    cpu::{Cpu, CpuConfig},
};
use folio_engine::{
    Background, Engine, EngineConfig, EngineStats, Event, FinishReason, GroupConfig, Logprobs, RequestStream, Runner,
    speculate::{AdaptOptions, Drafter, Speculation},
};
use folio_model::{Decoder, DecoderLimits, OpenModel};

use super::prompts::{Prompt, Tokens};

const MAX_SEQS: usize = 16;
const BUDGET: usize = 512;
const MAX_LEN: usize = 256;
const BLOCKS: usize = 200;
/// Steps between preemptions that the test forces.
const PREEMPT_EVERY: u64 = 7;
/// Every this many prompts are also run alone, so that every kind is among them.
const ALONE_EVERY: usize = 11;

/// Makes a drafter beside the decoder.
pub type Make = Box<dyn FnOnce(&mut Decoder<Cpu>) -> Box<dyn Drafter<Cpu>>>;

pub struct Method {
    name: &'static str,
    /// Nodes of its drafts, constant.
    most: usize,
    make: Make,
}

impl Method {
    pub fn new(name: &'static str, most: usize, make: Make) -> Self {
        Self { name, most, make }
    }
}

/// The answer of one client, bit by bit.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    logprobs: Vec<Logprobs>,
    /// None if the client aborted at a stop string.
    reason: Option<FinishReason>,
}

/// The answers to all prompts.
struct Answers {
    alone: Vec<Answer>,
    at_once: Vec<Answer>,
    stats: EngineStats,
}

pub struct Frame {
    pub model: OpenModel,
    prompts: Vec<Prompt>,
    /// Bytes of tokens, by id.
    bytes: HashMap<u32, Vec<u8>>,
    expected: Vec<Answer>,
    /// Steps without drafts.
    plain_steps: u64,
}

impl Frame {
    pub fn new(model: OpenModel, prompts: Vec<Prompt>, tokens: &Tokens) -> Self {
        let mut frame = Self { model, prompts, bytes: tokens.bytes(), expected: Vec::new(), plain_steps: 0 };
        let Answers { alone, at_once, stats } = frame.answers(None);
        assert_eq!(stats.speculation.drafts, 0);
        let left = at_once.iter().filter(|answer| answer.reason.is_none()).count();
        assert!(left >= frame.prompts.len() / 20, "{left} clients met their stop strings");
        (frame.expected, frame.plain_steps) = (at_once, stats.steps_done);
        frame.compare("without drafts", &alone, true);
        frame
    }

    /// Prompts with their answers.
    pub fn sequences(&self) -> Arc<Vec<Vec<u32>>> {
        let of = |(prompt, answer): (&Prompt, &Answer)| [&prompt.tokens[..], &answer.tokens].concat();
        Arc::new(self.prompts.iter().zip(&self.expected).map(of).collect())
    }

    /// The method changes no answer, and its drafts were often enough right and often enough wrong
    /// for the test to mean something.
    pub fn check(&self, method: Method) {
        let name = method.name;
        let Answers { alone, at_once, stats } = self.answers(Some(method));
        self.compare(name, &alone, true);
        self.compare(name, &at_once, false);
        let drafts = &stats.speculation;
        let (accepted, rejected) = (drafts.accepted_tokens, drafts.draft_tokens - drafts.accepted_tokens);
        println!("{name}: {accepted} drafts held and {rejected} did not, {} steps", stats.steps_done);
        let least = self.prompts.len() as u64 / 4;
        assert!(accepted >= least && rejected >= least, "{name}: {drafts:?}");
        assert!(stats.scheduler.preemptions > 3, "{name}: {:?}", stats.scheduler);
        assert!(stats.steps_done < self.plain_steps, "{name}: {} steps, no fewer", stats.steps_done);
        assert_eq!(drafts.accepted_per_position.iter().sum::<u64>(), accepted, "{name}");
        assert_eq!(stats.steps_failed, 0, "{name}");
    }

    fn compare(&self, name: &str, found: &[Answer], alone: bool) {
        let every = if alone { ALONE_EVERY } else { 1 };
        let indices: Vec<_> = (0..self.prompts.len()).step_by(every).collect();
        assert_eq!(indices.len(), found.len());
        for (index, found) in indices.into_iter().zip(found) {
            assert_eq!(found, &self.expected[index], "prompt {index}, alone: {alone}, {name}");
        }
    }

    /// Runs some prompts one after the other, and then all of them at once.
    fn answers(&self, method: Option<Method>) -> Answers {
        let preempts = method.is_some();
        let engine = self.start(method);
        let ask = |prompt: &Prompt| {
            let request = engine.request(prompt.tokens.clone(), prompt.params.clone()).expect("valid");
            engine.submit(request).expect("room")
        };
        let read = |prompt: &Prompt, stream| self.read(stream, prompt.stop.map(str::as_bytes));
        let alone = self.prompts.iter().step_by(ALONE_EVERY).map(|prompt| read(prompt, ask(prompt))).collect();
        let at_once = std::thread::scope(|scope| {
            let client = |prompt| (prompt, ask(prompt));
            let streams: Vec<_> = self.prompts.iter().map(client).collect();
            // A client that aborts does so while the others are there.
            let clients: Vec<_> =
                streams.into_iter().map(|(prompt, stream)| scope.spawn(move || read(prompt, stream))).collect();
            clients.into_iter().map(|client| client.join().expect("a client")).collect()
        });
        let stats = engine.stats();
        engine.shutdown();
        assert_eq!(stats.scheduler.preemptions > 0, preempts);
        Answers { alone, at_once, stats }
    }

    fn read(&self, mut stream: RequestStream, stop: Option<&[u8]>) -> Answer {
        let (mut answer, mut said) = (Answer::default(), Vec::<u8>::new());
        while let Some(event) = stream.recv() {
            match event {
                Event::Token { token, logprobs, .. } => {
                    answer.tokens.push(token);
                    answer.logprobs.extend(logprobs);
                    said.extend(self.bytes.get(&token).into_iter().flatten());
                    if stop.is_some_and(|stop| said.windows(stop.len()).any(|window| window == stop)) {
                        return answer;
                    }
                }
                Event::StopToken { logprobs, .. } => answer.logprobs.extend(logprobs),
                Event::Finished { reason, usage, .. } => {
                    assert!(usage.accepted_drafts <= usage.completion_tokens);
                    answer.reason = Some(reason);
                }
                other => panic!("nobody asked for {other:?}"),
            }
        }
        answer
    }

    fn start(&self, method: Option<Method>) -> Engine {
        let limits = DecoderLimits {
            rows: BUDGET,
            spans: BUDGET,
            outputs: BUDGET,
            table_entries: BUDGET * MAX_LEN / 16,
            blocks: vec![BLOCKS],
            kv_format: KvFormat::BF16,
        };
        let cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).expect("a CPU");
        let mut decoder = Decoder::load(cpu, &self.model, limits, &mut |_| {}).expect("the model loads");
        let force_preempt_every = method.is_some().then_some(PREEMPT_EVERY);
        let speculation = method.map(|Method { most, make, .. }| {
            let options = AdaptOptions { most_nodes: most, fixed: Some(most) };
            Speculation::new(make(&mut decoder), options)
        });
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
            logits_width: self.model.spec.vocab_size,
            eos: vec![0],
            force_preempt_every,
            ..EngineConfig::default()
        };
        Engine::start(Box::new(Background::start(runner).expect("a thread")), config).expect("sound")
    }
}
