//! The scheduler's promises, one by one.

use crate::sim::{Rng, Sim, reference};
use folio_scheduler::{NewRequest, RequestId, Scheduler, SchedulerConfig, SchedulerError};

fn tokens(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = Rng(seed);
    (0..len).map(|_| rng.below(1000) as u32).collect()
}

fn request(id: u64, prompt: Vec<u32>, max_len: usize) -> NewRequest {
    NewRequest { id: RequestId(id), prompt, max_len, wants_prompt_logits: false, cache_salt: 0 }
}

#[test]
fn running_requests_come_first_and_a_long_prompt_is_cut_to_the_budget() {
    let mut config = SchedulerConfig::new(vec![64]);
    config.budget_tokens = 32;
    config.max_chunk = Some(20);
    let mut scheduler = Scheduler::new(config).expect("sound");
    scheduler.add(request(0, tokens(0, 100), 120)).expect("fits");
    scheduler.add(request(1, tokens(1, 30), 40)).expect("fits");
    let shape = |plan: &folio_scheduler::StepPlan| -> Vec<(u64, usize, usize, bool)> {
        plan.assignments.iter().map(|a| (a.id.0, a.first, a.tokens.len(), a.samples)).collect()
    };
    let plan = scheduler.schedule();
    assert_eq!(shape(&plan), [(0, 0, 20, false), (1, 0, 12, false)]);
    scheduler.commit(&[(RequestId(0), None), (RequestId(1), None)]);
    let plan = scheduler.schedule();
    assert_eq!(shape(&plan), [(0, 20, 20, false), (1, 12, 12, false)]);
    scheduler.commit(&[(RequestId(0), None), (RequestId(1), None)]);
    let plan = scheduler.schedule();
    assert_eq!(shape(&plan), [(0, 40, 20, false), (1, 24, 6, true)]);
    scheduler.commit(&[(RequestId(0), None), (RequestId(1), Some(5))]);
    let plan = scheduler.schedule();
    assert_eq!(shape(&plan), [(0, 60, 20, false), (1, 30, 1, true)]);
    assert_eq!(plan.assignments[1].tokens, [5]);
}

#[test]
fn what_can_never_run_is_refused_with_the_figures() {
    let mut scheduler = Scheduler::new(SchedulerConfig::new(vec![8, 4])).expect("sound");
    let too_long = scheduler.add(request(0, tokens(0, 10), 65)).expect_err("65 tokens need 5 blocks");
    assert_eq!(too_long, SchedulerError::NeverFits { max_len: 65, group: 1, needed: 5, total: 4 });
    assert_eq!(scheduler.add(request(0, vec![], 10)), Err(SchedulerError::EmptyPrompt));
    let no_room = scheduler.add(request(0, tokens(0, 10), 10));
    assert_eq!(no_room, Err(SchedulerError::PromptTooLong { prompt: 10, max_len: 10 }));
    scheduler.add(request(0, tokens(0, 10), 64)).expect("fits exactly");
    assert_eq!(scheduler.add(request(0, tokens(0, 10), 64)), Err(SchedulerError::DuplicateId(RequestId(0))));
    let mut config = SchedulerConfig::new(vec![8]);
    config.max_seqs = 0;
    assert_eq!(Scheduler::new(config).err(), Some(SchedulerError::ZeroLimit { field: "max_seqs" }));
}

#[test]
fn a_hit_covers_full_blocks_and_never_the_last_token() {
    for (len, hit) in [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)] {
        let mut sim = Sim::new(SchedulerConfig::new(vec![64]));
        let prompt = tokens(3, len);
        for _ in 0..2 {
            sim.add(prompt.clone(), 3);
            sim.run_to_end();
        }
        assert_eq!(sim.scheduler.stats().hit_tokens, hit, "prompt of {len}");
        sim.check_end();
    }
}

#[test]
fn an_answer_can_be_hit_like_a_prompt() {
    let mut sim = Sim::new(SchedulerConfig::new(vec![64]));
    let prompt = tokens(4, 20);
    sim.add(prompt.clone(), 30);
    sim.run_to_end();
    let longer = [prompt.clone(), reference(&prompt, 30), vec![1, 2, 3]].concat();
    sim.add(longer, 4);
    sim.run_to_end();
    assert_eq!(sim.scheduler.stats().hit_tokens, 48, "49 tokens were computed, so three blocks are full");
    sim.check_end();
}

#[test]
fn other_salts_never_share() {
    let mut sim = Sim::new(SchedulerConfig::new(vec![64]));
    for salt in 0..3 {
        sim.add_salted(tokens(5, 40), 2, salt);
        sim.run_to_end();
    }
    assert_eq!(sim.scheduler.stats().hit_tokens, 0);
    sim.check_end();
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
        sim.add(tokens(7, 10), 1);
        sim.step();
        assert_eq!(
            sim.scheduler.stats().running + sim.clients.values().filter(|c| c.done).count(),
            2,
            "no waiting in line"
        );
        sim.run_to_end();
        assert_eq!(sim.model.tokens_computed, 100 + 4 * 4 + 10, "chunk {chunk:?}");
        sim.check_end();
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
    assert_eq!(sim.scheduler.stats().running, 1);
    sim.abort(first);
    sim.step();
    assert_eq!(sim.scheduler.stats().running, 1);
    assert_eq!(sim.scheduler.stats().hit_tokens, 16, "what the first had computed is used");
    sim.run_to_end();
    sim.check_end();
}

#[test]
fn a_pool_of_one_maximal_request_and_a_block_serves_all() {
    let mut config = SchedulerConfig::new(vec![17]);
    config.prefix_caching = false;
    let mut sim = Sim::new(config);
    for i in 0..32 {
        let len = 16 + 7 * (i as usize % 20);
        sim.add(tokens(i, len), 256 - len);
    }
    sim.run_to_end();
    sim.check_end();
    assert!(sim.scheduler.stats().preemptions > 0);
    assert!(sim.max_preemptions <= 3, "one was preempted {} times", sim.max_preemptions);
}

#[test]
fn the_newest_gives_way_and_comes_back_in_its_old_place() {
    let mut config = SchedulerConfig::new(vec![6]);
    config.prefix_caching = false;
    let mut sim = Sim::new(config);
    let ids: Vec<RequestId> = (0..3).map(|i| sim.add(tokens(i, 15), 60)).collect();
    let mut preempted = Vec::new();
    let mut finished = Vec::new();
    while sim.scheduler.has_work() {
        sim.step_with(|plan| preempted.extend(plan.preempted.clone()));
        for &id in &ids {
            if sim.clients[&id].done && !finished.contains(&id) {
                finished.push(id);
            }
        }
    }
    assert_eq!(finished, ids);
    assert_eq!(preempted.first(), ids.last());
    assert!(!preempted.contains(&ids[0]));
    sim.check_end();
}

#[test]
fn freed_tails_go_before_heads() {
    let mut sim = Sim::new(SchedulerConfig::new(vec![8]));
    let prompt = tokens(9, 65);
    sim.add(prompt.clone(), 1);
    sim.run_to_end();
    sim.add(tokens(10, 90), 1);
    sim.run_to_end();
    // Eight blocks, six of them taken since: the old prompt's first two are left.
    sim.add(prompt, 1);
    sim.run_to_end();
    assert_eq!(sim.scheduler.stats().hit_tokens, 32);
    sim.check_end();
}

#[test]
fn a_failed_step_ends_its_requests_and_no_others() {
    let mut config = SchedulerConfig::new(vec![16]);
    config.budget_tokens = 20;
    let mut scheduler = Scheduler::new(config).expect("sound");
    for id in 0..3 {
        scheduler.add(request(id, tokens(id, 20), 40)).expect("fits");
    }
    let plan = scheduler.schedule();
    assert_eq!(plan.assignments.len(), 1);
    assert_eq!(scheduler.fail_step(), [RequestId(0)]);
    scheduler.check_integrity().expect("sound");
    let stats = scheduler.stats();
    assert_eq!((stats.running, stats.waiting, stats.groups[0].blocks_cached), (0, 2, 0));
    assert_eq!(scheduler.schedule().assignments[0].id, RequestId(1));
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
        scheduler.add(new).expect("fits");
        let mut targets = Vec::new();
        for _ in 0..40 {
            let plan = scheduler.schedule();
            let a = &plan.assignments[0];
            assert!(a.prompt_targets.tokens.len() <= 10);
            if !a.prompt_targets.tokens.is_empty() {
                assert_eq!(a.prompt_targets.first, targets.len());
                targets.extend(a.prompt_targets.tokens.clone());
            }
            scheduler.commit(&[(RequestId(id), a.samples.then_some(1))]);
            scheduler.check_integrity().expect("sound");
            if a.samples {
                break;
            }
        }
        scheduler.finish(RequestId(id)).expect("runs");
        assert_eq!(targets, if wants_prompt_logits { &prompt[1..] } else { &[] });
    }
}
