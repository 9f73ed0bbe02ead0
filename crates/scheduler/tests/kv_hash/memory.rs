//! Preemption when blocks run out: its order, its number, and the blocks that stay in the prefix
//! cache.

use folio_scheduler::{RequestId, SchedulerConfig};

use crate::harness::{Sim, tokens};

#[test]
fn a_pool_of_one_maximal_request_and_a_block_serves_all() {
    for (depth, caching) in [(1, false), (1, true), (2, false), (2, true)] {
        let mut config = SchedulerConfig::new(vec![17]);
        config.prefix_caching = caching;
        let mut sim = Sim::deep(config, depth);
        for i in 0..32 {
            let len = 16 + 7 * (i as usize % 20);
            sim.add(tokens(i, len), 256 - len);
        }
        sim.run_to_end();
        assert_eq!(sim.finished().len(), 32);
        let preemptions = sim.driver.departures.iter().filter_map(|d| d.departed).map(|d| d.preemptions);
        let most = preemptions.max().expect("32 have ended");
        assert!(sim.driver.stats().preemptions > 0, "the pool was large enough for all");
        assert!(most <= 3, "one was preempted {most} times, {depth} in flight");
    }
}

#[test]
fn the_newest_gives_way_and_comes_back_in_its_old_place() {
    for depth in [1, 2] {
        let mut config = SchedulerConfig::new(vec![6]);
        config.prefix_caching = false;
        let mut sim = Sim::deep(config, depth);
        let ids: Vec<RequestId> = (0..3).map(|i| sim.add(tokens(i, 15), 60)).collect();
        let mut preempted = Vec::new();
        while !sim.driver.is_idle() {
            sim.driver.begin_turn().expect("sound");
            preempted.extend(sim.driver.newest_plan().iter().flat_map(|plan| plan.preempted.iter().map(|p| p.id)));
            sim.driver.end_turn().expect("sound");
        }
        assert_eq!(sim.finished(), ids);
        assert_eq!(preempted.first(), ids.last());
        assert!(!preempted.contains(&ids[0]));
    }
}

#[test]
fn freed_tails_go_before_heads() {
    let mut sim = Sim::new(SchedulerConfig::new(vec![8]));
    let prompt = tokens(9, 65);
    sim.add(prompt.clone(), 1);
    sim.run_to_end();
    sim.add(tokens(10, 90), 1);
    sim.run_to_end();
    // Six of eight blocks were taken since: the first two of the old prompt remain.
    sim.add(prompt, 1);
    sim.run_to_end();
    assert_eq!(sim.hit_tokens(), 32);
}

#[test]
fn an_abort_frees_everything_at_once() {
    for depth in [1, 2] {
        let mut sim = Sim::deep(SchedulerConfig::new(vec![16]), depth);
        let id = sim.add(tokens(1, 60), 30);
        sim.step();
        sim.driver.begin_turn().expect("sound");
        assert!(sim.driver.num_in_flight() > 0 && sim.driver.stats().groups[0].blocks_used > 0);
        sim.abort(id);
        assert_eq!(sim.driver.stats().groups[0].blocks_used, 0, "with a step under way");
        sim.driver.end_turn().expect("sound");
        sim.run_to_end();
    }
}

#[test]
fn a_shortage_anywhere_costs_time_and_no_answer() {
    for nth in 0..12 {
        let mut sim = Sim::deep(SchedulerConfig::new(vec![24]), 2);
        for i in 0..6 {
            sim.add(tokens(i % 4, 40), 20);
        }
        sim.driver.inject_shortage(nth);
        sim.run_to_end();
        assert_eq!(sim.finished().len(), 6);
    }
}
