//! One loaded decoder, used by one engine after another, and answers that can be compared bit by
//! bit.

use std::sync::{Arc, Mutex, MutexGuard};

use folio_device::{
    Backend, KvFormat, Pulse,
    cpu::{Cpu, CpuConfig},
};
use folio_engine::{
    Admission, Background, Engine, EngineConfig, Event, Executor, FinishReason, GroupConfig, HostTier, Logprobs,
    RequestId, RequestStream, Result, RowOutput, Runner, SamplingParams, StepPlan, StepRunner, TierConfig,
    tiers::HostGroup,
};
use folio_model::{Decoder, DecoderLimits, OpenModel};

pub const MAX_SEQS: usize = 32;
pub const BUDGET: usize = 512;
pub const MAX_LEN: usize = 256;
/// Slots of the host tier, for engines that have one.
pub const HOST_SLOTS: usize = 64;
const PROMPT_LOGIT_ROWS: usize = 64;

/// Changes a plan on its way to the device.
pub type Tamper = fn(step: u64, plan: &mut StepPlan);

/// Limits of a decoder.
#[derive(Clone, Copy)]
pub struct Room {
    pub seqs: usize,
    pub max_len: usize,
    pub blocks: usize,
}

impl Room {
    pub const USUAL: Room = Room { seqs: MAX_SEQS, max_len: MAX_LEN, blocks: 160 };
}

/// A decoder that outlives engines: each starts with the keys and values that the last one left.
pub struct Bench<B: Backend = Cpu> {
    runner: Arc<Mutex<Runner<B>>>,
    host: Arc<HostTier>,
    vocab: usize,
    windows: Vec<Option<usize>>,
    room: Room,
}

struct Lent<B: Backend> {
    runner: Arc<Mutex<Runner<B>>>,
    tamper: Option<Tamper>,
    step: u64,
}

impl<B: Backend> Lent<B> {
    fn runner(&self) -> MutexGuard<'_, Runner<B>> {
        self.runner.lock().expect("one engine at a time")
    }
}

impl<B: Backend> Drop for Lent<B> {
    /// The next engine must not get copies that this one left in flight.
    fn drop(&mut self) {
        while self.runner().finish().is_ok() {}
    }
}

impl<B: Backend> StepRunner for Lent<B> {
    fn admit(&mut self, id: RequestId, admission: Admission) {
        self.runner().admit(id, admission);
    }

    fn start(&mut self, plan: &StepPlan) -> Result<Option<Vec<RowOutput>>> {
        match self.tamper {
            Some(_) => self.run(plan).map(Some),
            None => self.runner().start(plan),
        }
    }

    fn may_start(&self, plan: &StepPlan) -> bool {
        self.tamper.is_none() && self.runner().may_start(plan)
    }

    fn is_done(&mut self) -> bool {
        self.runner().is_done()
    }

    fn finish(&mut self) -> Result<Vec<RowOutput>> {
        self.runner().finish()
    }

    fn pulse(&self) -> Option<Pulse> {
        self.runner().pulse()
    }

    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>> {
        self.step += 1;
        let mut plan = plan.clone();
        if let Some(tamper) = self.tamper {
            // A panic here must not poison the runner.
            tamper(self.step, &mut plan);
        }
        self.runner().run(&plan)
    }

    fn release(&mut self, id: RequestId) {
        self.runner().release(id);
    }
}

/// Token, logprob, and the best tokens with theirs; floats as bits, for exact comparison.
type LogprobBits = (u32, u32, Vec<(u32, u32)>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<LogprobBits>,
    pub prompt_logprobs: Vec<LogprobBits>,
    pub cached_tokens: usize,
}

fn bits(logprobs: &Logprobs) -> LogprobBits {
    let top = logprobs.top.iter().map(|&(token, value)| (token, value.to_bits()));
    (logprobs.token, logprobs.logprob.to_bits(), top.collect())
}

impl Bench {
    pub fn new(model: &OpenModel, threads: usize) -> Self {
        Self::in_format(model, threads, KvFormat::BF16)
    }

    /// The same with keys and values in the given format.
    pub fn in_format(model: &OpenModel, threads: usize, kv_format: KvFormat) -> Self {
        let cpu = Cpu::new(CpuConfig { threads, isa: None }).expect("a CPU");
        Self::on(cpu, model, kv_format, Room::USUAL)
    }
}

impl<B: Backend> Bench<B> {
    pub fn on(backend: B, model: &OpenModel, kv_format: KvFormat, room: Room) -> Self {
        let windows: Vec<_> = model.spec.kv_groups().iter().map(|group| group.window).collect();
        let limits = DecoderLimits {
            rows: BUDGET,
            spans: room.seqs,
            outputs: room.seqs + PROMPT_LOGIT_ROWS,
            table_entries: room.seqs * room.max_len / 16,
            blocks: vec![room.blocks; windows.len()],
            kv_format,
        };
        let decoder = Decoder::load(backend, model, limits, &mut |_| {}).expect("the model loads");
        let host_group = |group| HostGroup { slots: HOST_SLOTS, block_bytes: decoder.block_bytes(group) };
        let groups: Vec<_> = (0..windows.len()).map(host_group).collect();
        let host = Arc::new(HostTier::new(&groups).expect("memory"));
        let runner = Arc::new(Mutex::new(Runner::new(decoder, Some(Arc::clone(&host)))));
        Self { runner, host, vocab: model.spec.vocab_size, windows, room }
    }

    pub fn config(&self) -> EngineConfig {
        EngineConfig {
            max_seqs: self.room.seqs,
            budget_tokens: BUDGET,
            max_model_len: self.room.max_len,
            groups: self.groups(self.room.blocks),
            prefix_caching: false,
            inter_token_target: None,
            prompt_logit_rows: PROMPT_LOGIT_ROWS,
            logits_width: self.vocab,
            ..EngineConfig::default()
        }
    }

    pub fn max_seqs(&self) -> usize {
        self.room.seqs
    }

    /// Groups with the model's windows and pools of this size.
    pub fn groups(&self, blocks: usize) -> Vec<GroupConfig> {
        self.windows.iter().map(|&window| GroupConfig { window, ..GroupConfig::new(blocks) }).collect()
    }

    /// The same with a host tier, to which copies cost nothing.
    pub fn with_host(&self, config: EngineConfig) -> EngineConfig {
        let with_slots = |group: GroupConfig| GroupConfig { host_slots: HOST_SLOTS, ..group };
        let groups = config.groups.into_iter().map(with_slots).collect();
        let tiers = TierConfig { host: Some(Arc::clone(&self.host)), ..TierConfig::default() };
        EngineConfig { groups, tiers, ..config }
    }

    pub fn start(&self, config: EngineConfig) -> Engine {
        self.start_tampered(config, None)
    }

    /// The executor's pulse while a step runs.
    pub fn pulse(&self) -> Option<Pulse> {
        let lent = Lent { runner: Arc::clone(&self.runner), tamper: None, step: 0 };
        Background::start(lent).expect("a thread").pulse()
    }

    pub fn start_tampered(&self, config: EngineConfig, tamper: Option<Tamper>) -> Engine {
        let lent = Lent { runner: Arc::clone(&self.runner), tamper, step: 0 };
        let executor = Background::start(lent).expect("a thread");
        Engine::start(Box::new(executor), config).expect("a sound configuration")
    }

    pub fn prompt(&self, seed: u64, len: usize) -> Vec<u32> {
        let mix = |i: u64| (seed * 1000 + i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        (0..len as u64).map(|i| (mix(i) % self.vocab as u64) as u32).collect()
    }
}

pub fn submit(engine: &Engine, prompt: Vec<u32>, params: SamplingParams) -> RequestStream {
    engine.submit(engine.request(prompt, params).expect("valid")).expect("room")
}

pub fn read(stream: RequestStream) -> Answer {
    read_samples(stream, 1).remove(0)
}

pub fn read_samples(mut stream: RequestStream, num_samples: usize) -> Vec<Answer> {
    let mut answers = vec![Answer::default(); num_samples];
    while let Some(event) = stream.recv() {
        match event {
            Event::PromptLogprobs(all) => answers[0].prompt_logprobs = all.iter().flatten().map(bits).collect(),
            Event::StopToken { .. } | Event::Embedding(_) => panic!("nobody asked"),
            Event::Token { sample, token, logprobs } => {
                answers[sample].tokens.push(token);
                answers[sample].logprobs.extend(logprobs.as_ref().map(bits));
            }
            Event::Finished { sample, reason, usage } => {
                assert_eq!(reason, FinishReason::Length);
                answers[sample].cached_tokens = usage.cached_tokens;
            }
        }
    }
    answers
}
