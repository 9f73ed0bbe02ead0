//! The order of requests: priorities, aging, deadlines, tenants, long prompts beside short ones and
//! the inter-token target.

use folio_scheduler::{NewRequest, RequestId, SchedulerConfig, StepPlan};
use folio_simulator::End;

use crate::harness::{Clocked, Sim, tokens};

const SECOND: u64 = 1_000_000_000;

/// One running request at a time, so that requests end in the order of their admission.
fn one_seat() -> SchedulerConfig {
    let mut config = SchedulerConfig::new(vec![64]);
    config.max_seqs = 1;
    config.aging = 10 * SECOND;
    config.prefix_caching = false;
    config
}

struct Line {
    /// Time in seconds, and priority.
    arrivals: &'static [(u64, i32)],
    /// The order in which they run.
    order: &'static [u64],
}

#[test]
fn lower_priorities_run_sooner_and_waiting_makes_up_for_a_level() {
    let cases = [
        Line { arrivals: &[(0, 0), (0, 0), (0, 0)], order: &[0, 1, 2] },
        Line { arrivals: &[(0, 2), (0, 1), (0, 0)], order: &[2, 1, 0] },
        Line { arrivals: &[(0, 1), (9, 0), (11, 0)], order: &[1, 0, 2] },
        Line { arrivals: &[(0, i32::MAX), (1, i32::MIN), (2, 0)], order: &[1, 2, 0] },
    ];
    for Line { arrivals, order } in cases {
        let mut sim = Sim::new(one_seat());
        let busy = sim.add(tokens(50, 10), 10);
        sim.step();
        for (i, &(seconds, priority)) in arrivals.iter().enumerate() {
            sim.driver.now = 100 * SECOND + seconds * SECOND;
            sim.add_with(tokens(i as u64, 10), 2, |request| request.priority = priority);
        }
        sim.run_to_end();
        let expected: Vec<RequestId> = order.iter().map(|&i| RequestId(busy.0 + 1 + i)).collect();
        assert_eq!(sim.finished()[1..], expected, "{arrivals:?}");
    }
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    for depth in [1, 2] {
        let mut sim = Sim::deep(one_seat(), depth);
        let now = sim.driver.now;
        let runs = sim.add_with(tokens(0, 10), 50, |r| r.deadline = Some(now + SECOND));
        let waits = sim.add_with(tokens(1, 10), 2, |r| r.deadline = Some(now + SECOND));
        let later = sim.add_with(tokens(2, 10), 2, |r| r.deadline = Some(now + 100 * SECOND));
        sim.step();
        sim.step();
        assert_eq!(sim.driver.stats().running, 1);
        sim.driver.now = now + SECOND;
        sim.step();
        assert_eq!(sim.driver.stats().expired, 2);
        assert_eq!((sim.departure(runs).end, sim.departure(waits).end), (End::Expired, End::Expired));
        sim.run_to_end();
        assert_eq!(sim.finished(), [later]);
    }
}

#[test]
fn a_near_deadline_counts_as_an_early_arrival() {
    let mut sim = Sim::new(one_seat());
    sim.driver.now = 100 * SECOND;
    sim.add(tokens(50, 10), 10);
    sim.step();
    let relaxed = sim.add(tokens(0, 10), 2);
    let pressed = sim.add_with(tokens(1, 10), 2, |r| r.deadline = Some(105 * SECOND));
    sim.run_to_end();
    assert_eq!(sim.finished()[1..], [pressed, relaxed]);
}

/// Rows computed for two tenants while both always have waiting requests; the first submits ten
/// times as many.
fn rows_of_tenants(weights: [u32; 2]) -> [usize; 2] {
    let mut config = SchedulerConfig::new(vec![512]);
    config.max_seqs = 8;
    config.budget_tokens = 64;
    config.prefix_caching = false;
    let mut clocked = Clocked::new(config);
    let mut rows = [0; 2];
    let mut alive = [0usize; 2];
    let mut tenant_of = Vec::new();
    for _ in 0..6000 {
        for tenant in 0..2 {
            while alive[tenant] < [200, 20][tenant] {
                let id = tenant_of.len() as u64;
                tenant_of.push(tenant);
                alive[tenant] += 1;
                let mut request = NewRequest::new(RequestId(id), tokens(id, 5 + id as usize % 40), 0);
                request.max_len = request.prompt.len() + 4 + id as usize % 9;
                (request.tenant, request.weight) = (tenant as u64, weights[tenant]);
                clocked.add(request);
            }
        }
        let plan = clocked.step(|_| 1_000_000);
        for a in &plan.assignments {
            rows[tenant_of[a.id.0 as usize]] += a.num_rows();
        }
        // A request that has ended is replaced before the next step.
        for id in &clocked.finished {
            alive[tenant_of[id.0 as usize]] -= 1;
        }
    }
    rows
}

#[test]
fn a_flood_gets_no_more_than_its_weight() {
    for weights in [[1, 1], [3, 1], [1, 3]] {
        let rows = rows_of_tenants(weights);
        let share = rows[0] as f64 / (rows[0] + rows[1]) as f64;
        let fair = f64::from(weights[0]) / f64::from(weights[0] + weights[1]);
        assert!((share - fair).abs() < 0.05 * fair, "weights {weights:?}: {rows:?}, a share of {share:.3}");
    }
}

/// Tokens that two tenants with the same traffic get, both with more requests than fit, if the
/// first one's requests have `priority`; and the number of preemptions of each.
fn answers_of_tenants(
    priority: i32,
    weights: [u32; 2],
    change: impl FnOnce(&mut SchedulerConfig),
) -> ([usize; 2], usize) {
    let mut config = SchedulerConfig::new(vec![96]);
    config.max_seqs = 16;
    config.budget_tokens = 64;
    config.prefix_caching = false;
    change(&mut config);
    let mut clocked = Clocked::new(config);
    let (mut answers, mut alive, mut preempted) = ([0; 2], [0; 2], 0);
    let mut tenant_of = Vec::new();
    for _ in 0..8_000 {
        for tenant in 0..2 {
            while alive[tenant] < 24 {
                let id = tenant_of.len() as u64;
                tenant_of.push(tenant);
                alive[tenant] += 1;
                let mut request = NewRequest::new(RequestId(id), tokens(id, 20 + id as usize % 80), 0);
                request.max_len = request.prompt.len() + 60 + id as usize % 131;
                (request.tenant, request.weight) = (tenant as u64, weights[tenant]);
                request.priority = if tenant == 0 { priority } else { 0 };
                clocked.add(request);
            }
        }
        let plan = clocked.step(|plan| 4_000_000 + 100_000 * plan.num_rows() as u64);
        preempted += plan.preempted.len();
        for a in plan.assignments.iter().filter(|a| a.samples) {
            answers[tenant_of[a.id.0 as usize]] += 1;
        }
        for id in &clocked.finished {
            alive[tenant_of[id.0 as usize]] -= 1;
        }
    }
    (answers, preempted)
}

#[test]
fn a_priority_takes_nothing_from_another_tenant() {
    type Change = fn(&mut SchedulerConfig);
    let setups: [(&str, Change, bool); 4] = [
        ("seats for all, but too few blocks", |config| config.max_seqs = 64, true),
        ("too few blocks", |_| (), true),
        ("too small a budget", |config| (config.budget_tokens, config.groups[0].blocks) = (10, 1024), false),
        ("an inter-token target", |config| config.inter_token_target = Some(6_000_000), true),
    ];
    for ((name, change, preempts), weights) in setups.into_iter().flat_map(|setup| [(setup, [1, 1]), (setup, [3, 1])]) {
        let (plain, preempted) = answers_of_tenants(0, weights, change);
        println!("{name}, weights {weights:?}: {plain:?}, {preempted} preempted");
        assert_eq!(preempted > 20, preempts, "{name}: {preempted} preempted");
        let share = plain[0] as f64 / (plain[0] + plain[1]) as f64;
        let fair = f64::from(weights[0]) / f64::from(weights[0] + weights[1]);
        assert!((share - fair).abs() < 0.03 * fair, "{name}, weights {weights:?}: {plain:?}, a share of {share:.3}");
        for priority in [-1_000_000, i32::MAX] {
            let (answers, _) = answers_of_tenants(priority, weights, change);
            println!("priority {priority}: {answers:?}");
            assert_eq!(answers, plain, "{name}, weights {weights:?}, priority {priority}");
        }
    }
}

#[test]
fn a_short_prompt_is_not_stuck_behind_a_long_one() {
    for under_way in [0, 3] {
        let mut config = SchedulerConfig::new(vec![256]);
        config.budget_tokens = 64;
        let mut sim = Sim::new(config);
        let long = sim.add(tokens(0, 2000), 4);
        for _ in 0..under_way {
            sim.step();
        }
        let short = sim.add(tokens(1, 20), 1);
        sim.step();
        sim.step();
        assert_eq!(sim.finished(), [short], "its answer is one token, {under_way} steps later");
        sim.run_to_end();
        assert_eq!(sim.finished(), [short, long]);
        let steps = sim.driver.coverage.steps;
        assert!(steps <= 2020u64.div_ceil(64) + 4, "nothing of the budget is lost: {steps} steps");
    }
}

/// A step takes 4 ms, 0.25 ms for each decoding row, and 0.1 ms for each prompt token, more with
/// its context.
fn step_time(plan: &StepPlan) -> u64 {
    let row = |a: &folio_scheduler::Assignment| match a.num_rows() {
        1 => 250_000,
        rows => rows as u64 * (100_000 + 20 * a.first as u64),
    };
    4_000_000 + plan.assignments.iter().map(row).sum::<u64>()
}

/// Times of the steps from the arrival of a long prompt to its first token, beside eight decoding
/// requests.
fn times_beside_a_long_prompt(target: Option<u64>) -> Vec<u64> {
    let mut config = SchedulerConfig::new(vec![1024]);
    config.inter_token_target = target;
    let mut clocked = Clocked::new(config);
    for id in 0..8 {
        clocked.add(NewRequest::new(RequestId(id), tokens(id, 32), 2000));
    }
    for _ in 0..20 {
        clocked.step(step_time);
    }
    clocked.add(NewRequest::new(RequestId(100), tokens(100, 3500), 3600));
    let mut times = Vec::new();
    loop {
        let start = clocked.now;
        let plan = clocked.step(step_time);
        times.push(clocked.now - start);
        assert_eq!(plan.assignments.iter().filter(|a| a.id.0 < 8).count(), 8, "all who decode get their row");
        if plan.assignments.iter().any(|a| a.id.0 == 100 && a.samples) {
            return times;
        }
        assert!(times.len() < 3500, "the long prompt gets nowhere");
    }
}

#[test]
fn the_inter_token_target_holds_beside_a_long_prompt_which_still_comes_through() {
    let target = 12_000_000;
    let times = times_beside_a_long_prompt(Some(target));
    let late = times.iter().skip(2).filter(|&&time| time > target).count();
    assert_eq!(late, 0, "{times:?}");
    let used: u64 = times.iter().sum::<u64>() / times.len() as u64;
    assert!(used > target * 6 / 10, "on average {used} ns of a step are used");
    let without = times_beside_a_long_prompt(None);
    assert!(without.iter().max() > Some(&(10 * target)), "{without:?}");
    assert!(times.iter().sum::<u64>() < 4 * without.iter().sum::<u64>());
}

#[test]
fn the_expected_wait_grows_with_the_line() {
    let mut config = one_seat();
    config.budget_tokens = 64;
    let mut clocked = Clocked::new(config);
    assert_eq!(clocked.scheduler.expected_wait(), 0);
    let mut waits = Vec::new();
    for id in 0..6 {
        clocked.add(NewRequest::new(RequestId(id), tokens(id, 50), 60));
        clocked.step(|_| 1_000_000);
        waits.push(clocked.scheduler.expected_wait());
    }
    assert!(waits.is_sorted() && waits[5] > waits[1], "{waits:?}");
}

/// Order of admission with room for one request at a time: `veteran` of tenant 0 runs all along,
/// and tenant 1 has been served much.
fn starts_beside_a_veteran(late: u64) -> Vec<u64> {
    let mut config = SchedulerConfig::new(vec![4096]);
    config.max_seqs = 2;
    config.prefix_caching = false;
    let mut clocked = Clocked::new(config);
    let tenant_of = |id: u64| if id == 0 { 0 } else { 1 + id / 1000 };
    let request = |id: u64, tenant: u64, prompt: usize, answer: usize| NewRequest {
        tenant,
        ..NewRequest::new(RequestId(id), tokens(id, prompt), prompt + answer)
    };
    clocked.add(request(0, 0, 4, 2000));
    for id in 1..100 {
        clocked.add(request(id, 1, 500, 1));
    }
    for _ in 0..50 {
        clocked.step(|_| 1_000_000);
    }
    for id in 0..40 {
        clocked.add(request(1000 + id, late, 500, 1));
    }
    let mut starts = Vec::new();
    while starts.len() < 20 {
        let plan = clocked.step(|_| 1_000_000);
        starts.extend(plan.assignments.iter().filter(|a| a.id.0 > 0 && a.first == 0).map(|a| tenant_of(a.id.0)));
    }
    starts
}

#[test]
fn nobody_saves_up_while_others_wait() {
    for late in [0, 2] {
        let starts = starts_beside_a_veteran(late);
        let of_flood = starts.iter().filter(|&&tenant| tenant == 1).count();
        assert!((8..=12).contains(&of_flood), "tenant {late} comes late: {starts:?}");
    }
}

#[test]
fn many_who_wait_for_one_prompt_hide_nobody() {
    for (forks, steps) in [(true, 3), (false, 5)] {
        let mut config = SchedulerConfig::new(vec![1024]);
        config.budget_tokens = 64;
        let mut clocked = Clocked::new(config);
        for id in 0..128 {
            let fork_of = (forks && id > 0).then_some(RequestId(0));
            clocked.add(NewRequest { fork_of, ..NewRequest::new(RequestId(id), tokens(0, 2000), 2010) });
        }
        clocked.add(NewRequest { tenant: 1, ..NewRequest::new(RequestId(200), tokens(1, 20), 21) });
        clocked.add(NewRequest::new(RequestId(201), tokens(2, 20), 21));
        let mut finished = Vec::new();
        for _ in 0..steps {
            clocked.step(|_| 1_000_000);
            finished.append(&mut clocked.finished);
        }
        assert_eq!(finished, [RequestId(200), RequestId(201)], "forks: {forks}");
    }
}
