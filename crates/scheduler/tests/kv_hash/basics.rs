//! Chunks, refusals, duplicates, failed steps, prompt logits.

use folio_scheduler::{NewRequest, RequestId, RowResult, Scheduler, SchedulerConfig, SchedulerError, StepPlan};
use folio_simulator::reference;

use crate::harness::{Sim, tokens};

fn request(id: u64, prompt: Vec<u32>, max_len: usize) -> NewRequest {
    NewRequest::new(RequestId(id), prompt, max_len)
}

fn result(id: u64, token: Option<u32>) -> RowResult {
    RowResult { id: RequestId(id), accepted: Vec::new(), token }
}

#[test]
fn a_long_prompt_is_cut_to_the_budget_and_decoding_comes_first() {
    let mut config = SchedulerConfig::new(vec![64]);
    config.budget_tokens = 32;
    config.max_chunk = Some(20);
    let mut scheduler = Scheduler::new(config).expect("sound");
    scheduler.add(request(0, tokens(0, 100), 120), 0).expect("fits");
    scheduler.add(request(1, tokens(1, 30), 40), 0).expect("fits");
    let shape = |plan: &StepPlan| -> Vec<(u64, usize, usize, bool)> {
        plan.assignments.iter().map(|a| (a.id.0, a.first, a.num_rows(), a.samples)).collect()
    };
    let plan = scheduler.schedule(0);
    assert_eq!(shape(&plan), [(0, 0, 20, false), (1, 0, 12, false)]);
    scheduler.commit(&[result(0, None), result(1, None)], 1);
    // The first request in the order gets half of the step, and the shorter one after it the rest.
    let plan = scheduler.schedule(0);
    assert_eq!(shape(&plan), [(0, 20, 16, false), (1, 12, 16, false)]);
    scheduler.commit(&[result(0, None), result(1, None)], 1);
    let plan = scheduler.schedule(0);
    assert_eq!(shape(&plan), [(0, 36, 20, false), (1, 28, 2, true)]);
    scheduler.commit(&[result(0, None), result(1, Some(5))], 1);
    let plan = scheduler.schedule(0);
    assert_eq!(shape(&plan), [(0, 56, 20, false), (1, 30, 1, true)]);
    assert_eq!(plan.assignments[1].tokens, [5]);
}

#[test]
fn a_step_can_be_planned_while_another_is_in_flight() {
    let mut scheduler = Scheduler::new(SchedulerConfig::new(vec![64])).expect("sound");
    scheduler.add(request(0, tokens(0, 10), 13), 0).expect("fits");
    let first = scheduler.schedule(0);
    assert!(first.assignments[0].samples && !first.assignments[0].awaits_token);
    let second = scheduler.schedule(0);
    let a = &second.assignments[0];
    assert_eq!((a.first, a.tokens.len(), a.awaits_token, a.samples), (10, 0, true, true));
    scheduler.commit(&[result(0, Some(1))], 1);
    let third = scheduler.schedule(0);
    assert_eq!((third.assignments[0].first, third.assignments[0].awaits_token), (11, true));
    scheduler.commit(&[result(0, Some(2))], 1);
    assert!(scheduler.schedule(0).is_empty(), "13 tokens are known or on their way");
    scheduler.commit(&[result(0, Some(3))], 1);
    scheduler.finish(RequestId(0)).expect("known");
    assert!(!scheduler.has_work());
}

#[test]
fn what_can_never_run_is_refused_with_the_figures() {
    let mut scheduler = Scheduler::new(SchedulerConfig::new(vec![8, 4])).expect("sound");
    let too_long = scheduler.add(request(0, tokens(0, 10), 65), 0).expect_err("65 tokens need 5 blocks");
    assert_eq!(too_long, SchedulerError::NeverFits { max_len: 65, group: 1, needed: 5, total: 4 });
    assert_eq!(scheduler.add(request(0, vec![], 10), 0), Err(SchedulerError::EmptyPrompt));
    let no_room = scheduler.add(request(0, tokens(0, 10), 10), 0);
    assert_eq!(no_room, Err(SchedulerError::PromptTooLong { prompt: 10, max_len: 10 }));
    scheduler.add(request(0, tokens(0, 10), 64), 0).expect("fits exactly");
    assert_eq!(scheduler.add(request(0, tokens(0, 10), 64), 0), Err(SchedulerError::DuplicateId(RequestId(0))));
    scheduler.drain();
    assert_eq!(scheduler.add(request(1, tokens(0, 10), 64), 0), Err(SchedulerError::Draining));
    let mut config = SchedulerConfig::new(vec![8]);
    config.max_seqs = 0;
    assert_eq!(Scheduler::new(config).err(), Some(SchedulerError::ZeroLimit { field: "max_seqs" }));
    let mut config = SchedulerConfig::new(vec![8]);
    config.disk_chunk_blocks = Some(2);
    assert_eq!(Scheduler::new(config).err(), Some(SchedulerError::DiskWithoutHost));
}

#[test]
fn what_was_taken_on_before_a_drain_is_finished() {
    let mut sim = Sim::new(SchedulerConfig::new(vec![64]));
    let ids: Vec<RequestId> = (0..3).map(|i| sim.add(tokens(i, 20), 5)).collect();
    sim.step();
    sim.driver.drain();
    sim.run_to_end();
    assert_eq!(sim.finished(), ids);
}

#[test]
fn duplicates_in_one_step_compute_once() {
    for chunk in [None, Some(7), Some(16)] {
        let mut config = SchedulerConfig::new(vec![64]);
        config.max_chunk = chunk;
        let mut sim = Sim::new(config);
        for _ in 0..5 {
            sim.add(tokens(6, 100), 1);
        }
        let other = sim.add(tokens(7, 10), 1);
        sim.step();
        assert!(sim.finished().contains(&other) || sim.driver.stats().running == 2, "no waiting in line");
        sim.run_to_end();
        assert_eq!(sim.computed(), 100 + 4 * 4 + 10, "chunk {chunk:?}");
    }
}

#[test]
fn a_waiting_duplicate_goes_on_when_the_first_is_gone() {
    let mut config = SchedulerConfig::new(vec![64]);
    config.max_chunk = Some(8);
    let mut sim = Sim::new(config);
    let first = sim.add(tokens(8, 100), 3);
    sim.add(tokens(8, 100), 3);
    sim.step();
    sim.step();
    assert_eq!(sim.driver.stats().running, 1);
    sim.abort(first);
    sim.step();
    assert_eq!(sim.driver.stats().running, 1);
    assert_eq!(sim.hit_tokens(), 16, "what the first had computed is used");
    sim.run_to_end();
}

#[test]
fn a_failed_step_ends_its_requests_and_no_others() {
    let mut config = SchedulerConfig::new(vec![16]);
    config.budget_tokens = 20;
    let mut scheduler = Scheduler::new(config).expect("sound");
    for id in 0..3 {
        scheduler.add(request(id, tokens(id, 20), 40), 0).expect("fits");
    }
    let plan = scheduler.schedule(0);
    assert_eq!(plan.assignments.len(), 1);
    assert_eq!(scheduler.fail_steps(), [RequestId(0)]);
    scheduler.check_integrity().expect("sound");
    let stats = scheduler.stats();
    assert_eq!((stats.running, stats.waiting, stats.groups[0].blocks_cached), (0, 2, 0));
    assert_eq!(scheduler.schedule(0).assignments[0].id, RequestId(1));
}

#[test]
fn prompt_logits_are_owed_once_and_never_skipped() {
    let mut config = SchedulerConfig::new(vec![16]);
    config.prompt_logit_rows = 10;
    config.force_preempt_every = Some(2);
    let mut scheduler = Scheduler::new(config).expect("sound");
    let prompt = tokens(11, 50);
    for id in 0..2 {
        let wants_prompt_logits = id == 1;
        let new = NewRequest { wants_prompt_logits, ..request(id, prompt.clone(), 60) };
        scheduler.add(new, 0).expect("fits");
        let mut targets = Vec::new();
        for _ in 0..40 {
            let plan = scheduler.schedule(0);
            let a = &plan.assignments[0];
            assert!(a.prompt_targets.tokens.len() <= 10);
            if !a.prompt_targets.tokens.is_empty() {
                assert_eq!(a.prompt_targets.first, targets.len());
                targets.extend(a.prompt_targets.tokens.clone());
            }
            scheduler.commit(&[result(id, a.samples.then_some(1))], 1);
            scheduler.check_integrity().expect("sound");
            if a.samples {
                break;
            }
        }
        scheduler.finish(RequestId(id)).expect("runs");
        assert_eq!(targets, if wants_prompt_logits { &prompt[1..] } else { &[] });
    }
}

#[test]
fn an_answer_is_the_reference_whatever_the_depth() {
    for depth in [1, 2] {
        let mut sim = Sim::deep(SchedulerConfig::new(vec![64]), depth);
        let prompt = tokens(13, 20);
        let id = sim.add(prompt.clone(), 12);
        let mut heard = Vec::new();
        while let Some(client) = sim.driver.clients().get(&id) {
            heard = client.answer().to_vec();
            sim.step();
        }
        let alone = reference(&[None], &prompt, 12, Default::default());
        assert_eq!(heard, alone[..heard.len()]);
        assert!(heard.len() >= 10);
    }
}
