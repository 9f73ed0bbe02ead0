//! With drafts, every request gets the tokens, logprobs and end that it gets without, however good
//! the drafts are: every way to sample and to run, with every kind of draft.

use std::sync::{Arc, Mutex};

use folio_device::cpu::Cpu;
use folio_engine::{
    EngineConfig, EngineStats, FinishReason, SamplingParams,
    speculate::{
        AdaptOptions, Drafter, Lookahead, LookaheadOptions, Ngram, NgramOptions, OnHost, Speculation, Suffix,
        SuffixOptions,
    },
};

use crate::{
    device::{Drawing, Notes},
    drafters::{Knowing, Manner, Met},
    harness::{Bench, Outcome, run_on},
    requests, tiny,
};

type Request = (Vec<u32>, SamplingParams);
type BoxedDrafter = Box<dyn Drafter<Drawing<Cpu>>>;

/// Prompts with their answers.
pub fn sequences(requests: &[Request], answers: &[Vec<Outcome>]) -> Arc<Vec<Vec<u32>>> {
    let of = |((prompt, _), outcomes): (&Request, &Vec<Outcome>)| -> Vec<Vec<u32>> {
        outcomes.iter().map(|outcome| [&prompt[..], &outcome.tokens].concat()).collect()
    };
    Arc::new(requests.iter().zip(answers).flat_map(of).collect())
}

/// Requests, and their answers by plain decoding, one by one.
pub struct Expected {
    pub requests: Vec<Request>,
    pub answers: Vec<Vec<Outcome>>,
    pub sequences: Arc<Vec<Vec<u32>>>,
}

impl Expected {
    pub fn new(bench: &Bench<'_>, requests: Vec<Request>) -> Self {
        let answers = bench.run_alone(&requests);
        let sequences = sequences(&requests, &answers);
        Self { requests, answers, sequences }
    }

    pub fn drafter(&self, bench: &Bench<'_>, manner: Manner, reads_step: bool, met: &Arc<Mutex<Met>>) -> BoxedDrafter {
        let (sequences, met) = (Arc::clone(&self.sequences), Arc::clone(met));
        let vocab = bench.model.spec.vocab_size as u32;
        Box::new(Knowing { manner, reads_step, vocab, sequences, met, random: 11 })
    }

    /// All at once with this drafter: the answers are the expected ones.
    pub fn check(
        &self,
        bench: &Bench<'_>,
        how: &str,
        config: EngineConfig,
        draws_tokens: bool,
        drafter: BoxedDrafter,
        most: usize,
    ) -> EngineStats {
        let speculation = Speculation::new(drafter, options(most));
        let started = bench.start_drafting(config, draws_tokens, Notes::default(), Some(speculation));
        let (found, _, stats) = run_on(started, &self.requests);
        for (index, (found, expected)) in found.iter().zip(&self.answers).enumerate() {
            assert_eq!(found, expected, "request {index}, {how}, drawn on the device: {draws_tokens}");
        }
        assert_eq!(stats.steps_failed, 0, "{how}");
        stats
    }
}

fn check_all(bench: &Bench<'_>, how: &str, config: &dyn Fn() -> EngineConfig) {
    let expected = Expected::new(bench, requests(36));
    assert!(expected.answers.iter().flatten().any(|outcome| matches!(outcome.reason, Some(FinishReason::Stop(_)))));
    for draws_tokens in [false, true] {
        for (manner, most) in [(Manner::Perfect, 5), (Manner::Bad, 3), (Manner::Trees, 12)] {
            for reads_step in [false, true] {
                let met = Arc::new(Mutex::new(Met::default()));
                let how = format!("{how}, {manner:?}, reading the step: {reads_step}");
                let drafter = expected.drafter(bench, manner, reads_step, &met);
                let stats = expected.check(bench, &how, config(), draws_tokens, drafter, most);
                let met = met.lock().expect("nothing panics with it");
                assert!(met.faults.is_empty(), "{how}: {:?}", met.faults);
                let drafts = &stats.speculation;
                assert!(drafts.drafts > 20 && met.learned > 30 && met.forgotten >= 36, "{how}: {drafts:?}, {met:?}");
                assert_eq!(drafts.accepted_tokens > 0, manner != Manner::Bad, "{how}: {drafts:?}");
                assert_eq!(met.trees > 0, manner == Manner::Trees);
            }
        }
        let methods: [BoxedDrafter; 3] = [
            Box::new(OnHost(Ngram::new(NgramOptions::default()))),
            Box::new(OnHost(Suffix::new(SuffixOptions::default()))),
            Box::new(Lookahead::new(LookaheadOptions::default())),
        ];
        for drafter in methods {
            expected.check(bench, how, config(), draws_tokens, drafter, 12);
        }
    }
}

pub fn bench(model: &folio_model::OpenModel) -> Bench<'_> {
    Bench::with_draft_rows(model, 200)
}

#[test]
fn every_way_to_sample() {
    let model = tiny::alternating();
    let bench = bench(&model);
    check_all(&bench, "overlapped", &|| bench.config());
    check_all(&bench, "without overlap", &|| EngineConfig { overlap: false, ..bench.config() });
}

#[test]
fn in_chunks_and_with_experts() {
    let model = tiny::experts();
    let bench = bench(&model);
    check_all(&bench, "in chunks", &|| EngineConfig { max_chunk: Some(7), ..bench.config() });
}

#[test]
fn preempted_and_swapped() {
    let model = tiny::alternating();
    let bench = bench(&model);
    check_all(&bench, "after forced preemption", &|| EngineConfig { force_preempt_every: Some(3), ..bench.config() });
    let small = || EngineConfig { groups: bench.groups(16), prefix_caching: true, ..bench.config() };
    check_all(&bench, "in a small pool", &small);
    check_all(&bench, "in a small pool above a host tier", &|| {
        bench.with_host(EngineConfig { force_preempt_every: Some(3), ..small() })
    });
}

/// Always the most nodes.
pub fn options(most: usize) -> AdaptOptions {
    AdaptOptions { most_nodes: most, fixed: Some(most) }
}
