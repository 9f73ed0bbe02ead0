//! Drafts: when they are verified, which rows and blocks they may take, and which nodes remain.

use folio_scheduler::{
    Assignment, Draft, DraftStats, GroupConfig, NewRequest, RequestId, RowResult, Scheduler, SchedulerConfig, StepPlan,
};
use folio_simulator::hash::Rng;

use crate::harness::{Sim, tokens};

fn request(id: u64, prompt: Vec<u32>, max_len: usize) -> NewRequest {
    NewRequest::new(RequestId(id), prompt, max_len)
}

fn result(id: u64, token: Option<u32>) -> RowResult {
    RowResult { id: RequestId(id), accepted: Vec::new(), token }
}

#[test]
fn drafts_save_steps_and_never_change_the_answer() {
    let mut steps = Vec::new();
    for wrong_from in [4, 2, 0] {
        let mut sim = Sim::new(SchedulerConfig::new(vec![64]));
        let id = sim.add(tokens(12, 20), 40);
        while sim.driver.clients().contains_key(&id) {
            sim.driver.draft(id, 4, wrong_from);
            sim.step();
        }
        steps.push(sim.driver.coverage.steps);
    }
    assert_eq!(steps, [1 + 8, 1 + 13, 40], "5, 3 and 1 tokens a step behind the first");
}

#[test]
fn drafts_are_refused_where_they_cannot_be_verified() {
    let mut scheduler = Scheduler::new(SchedulerConfig::new(vec![64])).expect("sound");
    assert!(!scheduler.draft(RequestId(0), Draft::chain(vec![1])), "not known");
    scheduler.add(request(0, tokens(0, 10), 14), 0).expect("fits");
    assert!(!scheduler.draft(RequestId(0), Draft::chain(vec![1])), "waits");
    scheduler.schedule(0);
    assert!(!scheduler.draft(RequestId(0), Draft::chain(vec![1])), "in flight");
    scheduler.commit(&[result(0, Some(3))], 1);
    assert!(scheduler.draft(RequestId(0), Draft::chain(vec![1, 2, 3, 4])));
    let plan = scheduler.schedule(0);
    let a = &plan.assignments[0];
    assert_eq!((a.tokens.as_slice(), a.num_drafts), ([3, 1, 2].as_slice(), 2), "11 of 14 tokens: room for two and one");
    scheduler.commit(&[RowResult { id: RequestId(0), accepted: vec![1], token: Some(9) }], 1);
    let plan = scheduler.schedule(0);
    assert_eq!((plan.assignments[0].first, plan.assignments[0].tokens.as_slice()), (12, [9].as_slice()));
}

/// A scheduler in which request 0 decodes.
fn decoding(config: SchedulerConfig, prompt: usize, max_len: usize) -> Scheduler {
    let mut scheduler = Scheduler::new(config).expect("sound");
    scheduler.add(request(0, tokens(0, prompt), max_len), 0).expect("fits");
    commit(&mut scheduler);
    scheduler
}

/// One step that accepts no draft.
fn commit(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.schedule(0);
    let of = |a: &Assignment| result(a.id.0, a.samples.then_some(7));
    scheduler.commit(&plan.assignments.iter().map(of).collect::<Vec<_>>(), 1);
    scheduler.check_integrity().expect("sound");
    plan
}

#[test]
fn drafts_do_not_stop_a_prompt_under_way() {
    let mut config = SchedulerConfig::new(vec![64]);
    config.budget_tokens = 8;
    let mut scheduler = decoding(config, 4, 100);
    scheduler.add(request(1, tokens(1, 60), 70), 0).expect("fits");
    let mut done = 0;
    for _ in 0..9 {
        // No more rows than requests.
        assert!(scheduler.draft(RequestId(0), Draft::chain(vec![1])));
        let plan = commit(&mut scheduler);
        done += plan.assignments.iter().filter(|a| a.id == RequestId(1)).map(Assignment::num_rows).sum::<usize>();
    }
    assert_eq!(done, 60);
}

#[test]
fn nobody_gives_way_for_drafts() {
    let mut config = SchedulerConfig::new(vec![3]);
    config.block_tokens = 4;
    let mut scheduler = decoding(config, 2, 12);
    scheduler.add(request(1, tokens(1, 2), 4), 0).expect("fits");
    assert_eq!(commit(&mut scheduler).assignments.len(), 2, "both run");
    assert!(scheduler.draft(RequestId(0), Draft::chain(vec![1; 6])), "two blocks more, but one is free");
    let plan = commit(&mut scheduler);
    assert!(plan.preempted.is_empty(), "{plan:?}");
    assert_eq!(plan.num_rows(), 2, "{plan:?}");
}

#[test]
fn drafts_leave_a_row_for_everyone() {
    let mut config = SchedulerConfig::new(vec![64]);
    config.budget_tokens = 4;
    let mut scheduler = decoding(config, 2, 40);
    scheduler.add(request(1, tokens(1, 2), 40), 0).expect("fits");
    assert_eq!(commit(&mut scheduler).assignments.len(), 2, "both run");
    for id in [0, 1] {
        assert!(scheduler.draft(RequestId(id), Draft::chain(vec![1; 5])));
    }
    let plan = commit(&mut scheduler);
    let rows: Vec<usize> = plan.assignments.iter().map(Assignment::num_rows).collect();
    assert_eq!(rows, [3, 1]);
}

/// ```text
/// 3 - 5 - 6
///   \ 7 - 8 - 9
/// 4
/// ```
fn tree() -> Draft {
    Draft::new(&[3, 4, 5, 6, 7, 8, 9], &[None, None, Some(0), Some(2), Some(0), Some(4), Some(5)])
}

#[test]
fn of_a_tree_the_path_is_kept_and_the_rest_given_back() {
    let mut config = SchedulerConfig::new(vec![16]);
    config.block_tokens = 4;
    config.groups.push(GroupConfig { window: Some(3), ..GroupConfig::new(16) });
    let mut scheduler = decoding(config, 6, 40);
    let used = |scheduler: &Scheduler| scheduler.stats().groups.iter().map(|g| g.blocks_used).collect::<Vec<_>>();
    let before = used(&scheduler);
    assert!(scheduler.draft(RequestId(0), tree()));
    let plan = scheduler.schedule(0);
    let a = &plan.assignments[0];
    assert_eq!((a.first, &a.tokens[..], a.num_drafts), (6, &[7, 3, 4, 5, 6, 7, 8, 9][..], 7));
    assert_eq!(a.parents, tree().parents());
    assert_eq!(a.positions().collect::<Vec<_>>(), [6, 7, 7, 8, 9, 8, 9, 10]);
    assert!(a.tables.iter().all(|table| table.len() == 4), "slots for all of them: {:?}", a.tables);
    assert_eq!(used(&scheduler), [before[0] + 2, before[1] + 2]);
    let result = RowResult { id: RequestId(0), accepted: vec![3, 7, 8], token: Some(11) };
    scheduler.commit(&[result], 1);
    scheduler.check_integrity().expect("sound");
    assert_eq!(used(&scheduler), [before[0] + 1, before[1] + 1], "10 tokens are computed");
    let next = commit(&mut scheduler);
    let a = &next.assignments[0];
    assert_eq!((a.first, &a.tokens[..], a.num_drafts), (10, &[11][..], 0));
    let counted = DraftStats { trees: 1, planned: 7, accepted: vec![1, 1, 1] };
    assert_eq!(scheduler.stats().drafts, counted);
}

#[test]
#[should_panic(expected = "is no path of its drafts")]
fn what_is_no_path_is_not_accepted() {
    let mut scheduler = decoding(SchedulerConfig::new(vec![16]), 6, 40);
    assert!(scheduler.draft(RequestId(0), tree()));
    scheduler.schedule(0);
    scheduler.commit(&[RowResult { id: RequestId(0), accepted: vec![3, 4], token: Some(1) }], 1);
}

#[test]
fn drafts_get_what_prompts_leave() {
    let mut config = SchedulerConfig::new(vec![64]);
    config.budget_tokens = 8;
    let mut scheduler = decoding(config, 4, 100);
    scheduler.add(request(1, tokens(1, 17), 30), 0).expect("fits");
    let mut rows = Vec::new();
    for _ in 0..4 {
        assert!(scheduler.draft(RequestId(0), tree()));
        let plan = commit(&mut scheduler);
        rows.push(plan.assignments.iter().map(Assignment::num_rows).collect::<Vec<_>>());
    }
    assert_eq!(rows, [vec![1, 7], vec![1, 7], vec![5, 3], vec![7, 1]]);
}

#[test]
fn drafts_leave_a_block_to_everyone() {
    let mut config = SchedulerConfig::new(vec![5]);
    config.block_tokens = 4;
    let mut scheduler = decoding(config, 2, 20);
    scheduler.add(request(1, tokens(1, 2), 8), 0).expect("fits");
    commit(&mut scheduler);
    assert!(scheduler.draft(RequestId(0), Draft::chain(vec![1; 16])));
    let plan = commit(&mut scheduler);
    let rows: Vec<usize> = plan.assignments.iter().map(Assignment::num_rows).collect();
    assert_eq!(rows, [9, 1], "two of three free blocks, with the one it holds");
}

#[test]
fn who_expects_drafts_is_not_planned_ahead() {
    let mut scheduler = decoding(SchedulerConfig::new(vec![64]), 4, 40);
    let ids = |plan: &StepPlan| plan.assignments.iter().map(|a| a.id.0).collect::<Vec<_>>();
    scheduler.add(request(1, tokens(1, 4), 40), 0).expect("fits");
    scheduler.expect_drafts(RequestId(1), true);
    assert_eq!(ids(&scheduler.schedule(0)), [0, 1]);
    assert_eq!(ids(&scheduler.schedule(0)), [0], "the other's token is not known yet");
    scheduler.commit(&[result(0, Some(1)), result(1, Some(1))], 1);
    assert!(scheduler.draft(RequestId(1), tree()) && !scheduler.draft(RequestId(0), tree()));
    assert_eq!(scheduler.schedule(0).assignments[1].num_drafts, 7);
    scheduler.commit(&[result(0, Some(1))], 1);
    assert_eq!(ids(&scheduler.schedule(0)), [0], "nobody knows where it goes on");
    scheduler.check_integrity().expect("sound");
}

#[test]
fn who_gives_way_keeps_the_path_that_was_under_way() {
    let mut config = SchedulerConfig::new(vec![64]);
    config.force_preempt_every = Some(3);
    let mut scheduler = decoding(config, 6, 40);
    assert!(scheduler.draft(RequestId(0), tree()));
    scheduler.schedule(0);
    let plan = scheduler.schedule(0);
    assert!(plan.is_empty() && plan.preempted.len() == 1, "{plan:?}");
    scheduler.commit(&[RowResult { id: RequestId(0), accepted: vec![3, 7], token: Some(11) }], 1);
    scheduler.check_integrity().expect("sound");
    let plan = scheduler.schedule(0);
    assert_eq!((plan.assignments[0].first, &plan.assignments[0].tokens[6..]), (0, &[7, 3, 7, 11][..]));
}

/// A fork copies the block in which its source drafts. Windows, steps in flight and the prefix
/// cache vary.
#[test]
fn trees_never_change_the_answer() {
    for (right, depth) in [(0, 1), (3, 1), (5, 2)] {
        let mut config = SchedulerConfig::new(vec![24]);
        config.block_tokens = 4;
        config.groups.push(GroupConfig { window: Some(6), ..GroupConfig::new(24) });
        let mut sim = Sim::deep(config, depth);
        let source = sim.add(tokens(12, 10), 30);
        sim.driver.expect_drafts(source, true);
        let mut rng = Rng(right as u64);
        for _ in 0..3 {
            sim.step();
        }
        let prompt = sim.driver.clients()[&source].truth.tokens().to_vec();
        sim.add_with(prompt, 20, |request| request.fork_of = Some(source));
        while !sim.driver.is_idle() {
            let ids: Vec<RequestId> = sim.driver.clients().keys().copied().collect();
            for id in ids {
                sim.driver.draft_tree(id, 9, right, &mut rng);
            }
            sim.step();
        }
        let coverage = &sim.driver.coverage;
        assert!(coverage.draft_trees > 4 && (coverage.kv_moves > 0) == (right > 0), "{coverage:?}");
        assert!(right == 0 || coverage.steps < 40, "{} steps", coverage.steps);
    }
}
