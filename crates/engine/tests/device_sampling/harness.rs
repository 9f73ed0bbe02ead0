//! Engines on a device that samples or not, and the results of requests.

use std::sync::Arc;
use std::time::Instant;

use folio_device::{
    KvFormat,
    cpu::{Cpu, CpuConfig},
};
use folio_engine::{
    Background, Engine, EngineConfig, EngineStats, Event, FinishReason, GroupConfig, HostTier, Logprobs, Rebuild,
    RequestStream, Runner, SamplingParams, TierConfig, speculate::Speculation, tiers::HostGroup,
};
use folio_model::{Decoder, DecoderLimits, OpenModel};

use crate::device::{Drawing, Notes, Shared};

pub const MAX_SEQS: usize = 16;
const BUDGET: usize = 96;
const MAX_LEN: usize = 128;
const BLOCKS: usize = 140;
const HOST_SLOTS: usize = 64;
const PROMPT_LOGIT_ROWS: usize = 32;

pub struct Bench<'a> {
    pub model: &'a OpenModel,
    windows: Vec<Option<usize>>,
    host: Arc<HostTier>,
    /// Rows of drafts that a step has room for, each of them possibly a span of its own.
    draft_rows: usize,
}

/// An engine, and its device's notes.
pub struct Started {
    pub engine: Engine,
    pub shared: Shared,
}

/// The result of one sample, bit by bit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<Logprobs>,
    pub prompt_logprobs: Vec<Option<Logprobs>>,
    /// None if its client aborted.
    pub reason: Option<FinishReason>,
}

fn decoder(model: &OpenModel, draws_tokens: bool, shared: &Shared, draft_rows: usize) -> Decoder<Drawing<Cpu>> {
    let groups = model.spec.kv_groups().len();
    let limits = DecoderLimits {
        rows: BUDGET,
        spans: MAX_SEQS + draft_rows,
        outputs: MAX_SEQS + PROMPT_LOGIT_ROWS + draft_rows,
        table_entries: (MAX_SEQS + draft_rows) * MAX_LEN / 16,
        blocks: vec![BLOCKS; groups],
        kv_format: KvFormat::BF16,
    };
    let cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).expect("a CPU");
    let backend = Drawing::new(cpu, draws_tokens, model.spec.vocab_size, shared.clone());
    Decoder::load(backend, model, limits, &mut |_| {}).expect("the model loads")
}

impl<'a> Bench<'a> {
    pub fn new(model: &'a OpenModel) -> Self {
        Self::with_draft_rows(model, 0)
    }

    pub fn with_draft_rows(model: &'a OpenModel, draft_rows: usize) -> Self {
        let windows: Vec<_> = model.spec.kv_groups().iter().map(|group| group.window).collect();
        let decoder = decoder(model, true, &Shared::default(), 0);
        let host_group = |group| HostGroup { slots: HOST_SLOTS, block_bytes: decoder.block_bytes(group) };
        let groups: Vec<_> = (0..windows.len()).map(host_group).collect();
        Self { model, windows, host: Arc::new(HostTier::new(&groups).expect("memory")), draft_rows }
    }

    pub fn config(&self) -> EngineConfig {
        EngineConfig {
            max_seqs: MAX_SEQS,
            max_waiting: 4096,
            budget_tokens: BUDGET,
            max_model_len: MAX_LEN,
            groups: self.groups(BLOCKS),
            prefix_caching: false,
            inter_token_target: None,
            prompt_logit_rows: PROMPT_LOGIT_ROWS,
            logits_width: self.model.spec.vocab_size,
            ..EngineConfig::default()
        }
    }

    pub fn groups(&self, blocks: usize) -> Vec<GroupConfig> {
        self.windows.iter().map(|&window| GroupConfig { window, ..GroupConfig::new(blocks) }).collect()
    }

    /// With a host tier to which copies cost nothing.
    pub fn with_host(&self, config: EngineConfig) -> EngineConfig {
        let with_slots = |group: GroupConfig| GroupConfig { host_slots: HOST_SLOTS, ..group };
        let groups = config.groups.into_iter().map(with_slots).collect();
        let tiers = TierConfig { host: Some(Arc::clone(&self.host)), ..TierConfig::default() };
        EngineConfig { groups, tiers, ..config }
    }

    pub fn start(&self, config: EngineConfig, draws_tokens: bool) -> Started {
        self.start_with(config, draws_tokens, Notes::default())
    }

    pub fn start_with(&self, config: EngineConfig, draws_tokens: bool, notes: Notes) -> Started {
        self.start_drafting(config, draws_tokens, notes, None)
    }

    pub fn start_drafting(
        &self,
        config: EngineConfig,
        draws_tokens: bool,
        notes: Notes,
        speculation: Option<Speculation<Drawing<Cpu>>>,
    ) -> Started {
        let shared = Shared::default();
        *shared.notes() = notes;
        let decoder = decoder(self.model, draws_tokens, &shared, self.draft_rows);
        let mut runner = Runner::new(decoder, Some(Arc::clone(&self.host)));
        if let Some(speculation) = speculation {
            runner = runner.with_speculation(speculation);
        }
        let executor = Background::start(runner).expect("a thread");
        let engine = Engine::start(Box::new(executor), config).expect("a sound configuration");
        Started { engine, shared }
    }

    /// All at once.
    pub fn run(
        &self,
        config: EngineConfig,
        draws_tokens: bool,
        requests: &[(Vec<u32>, SamplingParams)],
    ) -> (Vec<Vec<Outcome>>, Notes, EngineStats) {
        self.run_with(config, draws_tokens, Notes::default(), requests)
    }

    pub fn run_with(
        &self,
        config: EngineConfig,
        draws_tokens: bool,
        notes: Notes,
        requests: &[(Vec<u32>, SamplingParams)],
    ) -> (Vec<Vec<Outcome>>, Notes, EngineStats) {
        run_on(self.start_with(config, draws_tokens, notes), requests)
    }

    /// One after the other, sampled on the host.
    pub fn run_alone(&self, requests: &[(Vec<u32>, SamplingParams)]) -> Vec<Vec<Outcome>> {
        let engine = self.start(EngineConfig { overlap: false, ..self.config() }, false).engine;
        let run =
            |(prompt, params): &(Vec<u32>, SamplingParams)| read(submit(&engine, prompt, params), params.n, usize::MAX);
        let outcomes = requests.iter().map(run).collect();
        engine.shutdown();
        outcomes
    }
}

/// All at once, on an engine that is dropped after them.
pub fn run_on(started: Started, requests: &[(Vec<u32>, SamplingParams)]) -> (Vec<Vec<Outcome>>, Notes, EngineStats) {
    let Started { engine, shared } = started;
    let streams: Vec<_> = requests.iter().map(|(prompt, params)| submit(&engine, prompt, params)).collect();
    let streams = streams.into_iter().zip(requests);
    let outcomes = streams.map(|(stream, (_, params))| read(stream, params.n, usize::MAX)).collect();
    let stats = wait_until_idle(&engine);
    engine.shutdown();
    let notes = std::mem::take(&mut *shared.notes());
    (outcomes, notes, stats)
}

/// Builds a working device in place of a lost one.
pub fn rebuild(model: OpenModel, shared: Shared) -> Rebuild {
    Rebuild::new(move || {
        shared.notes().is_broken = false;
        Ok(Box::new(Background::start(Runner::new(decoder(&model, true, &shared, 0), None))?))
    })
}

pub fn prompt(seed: usize, len: usize) -> Vec<u32> {
    let mix = |i: usize| ((seed * 1000 + i + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
    // All tokens but the poisonous ones.
    (0..len).map(|i| 14 + (mix(i) % 190) as u32).collect()
}

pub fn submit(engine: &Engine, prompt: &[u32], params: &SamplingParams) -> RequestStream {
    engine.submit(engine.request(prompt.to_vec(), params.clone()).expect("valid")).expect("room")
}

/// The answers, until the client aborts after this number of tokens.
pub fn read(mut stream: RequestStream, samples: usize, most: usize) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::default(); samples];
    while outcomes[0].tokens.len() < most {
        let Some(event) = stream.recv() else { break };
        match event {
            Event::PromptLogprobs(all) => outcomes[0].prompt_logprobs = all,
            Event::Token { sample, token, logprobs } => {
                outcomes[sample].tokens.push(token);
                outcomes[sample].logprobs.extend(logprobs);
            }
            Event::StopToken { sample, logprobs, .. } => outcomes[sample].logprobs.extend(logprobs),
            Event::Finished { sample, reason, .. } => outcomes[sample].reason = Some(reason),
            Event::Embedding(_) => panic!("nobody asked"),
        }
    }
    outcomes
}

pub fn wait_until_idle(engine: &Engine) -> EngineStats {
    let start = Instant::now();
    loop {
        let stats = engine.stats();
        let is_idle = stats.scheduler.running + stats.scheduler.waiting == 0 && engine.num_live() == 0;
        if is_idle && stats.scheduler.groups.iter().all(|group| group.blocks_used == 0) {
            return stats;
        }
        assert!(start.elapsed().as_secs() < 60, "never idle: {:?}", stats.scheduler);
        std::thread::yield_now();
    }
}
