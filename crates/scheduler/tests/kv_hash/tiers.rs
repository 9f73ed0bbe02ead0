//! The lower tiers: blocks that are loaded from the host tier, and from disk after a restart.

use folio_scheduler::{GroupConfig, SchedulerConfig};
use folio_simulator::{Manners, disk::DiskManners};

use crate::harness::{Sim, tokens};

/// Two groups, one of them with a window, with small pools.
fn config(host_slots: usize, disk: Option<usize>) -> SchedulerConfig {
    let mut config = SchedulerConfig::new(vec![10]);
    config.groups[0].host_slots = host_slots;
    config.groups.push(GroupConfig { blocks: 10, window: Some(40), host_slots });
    config.disk_chunk_blocks = disk;
    config
}

/// Runs a prompt, others that evict it, and the same prompt again. Returns the tokens computed and
/// the tokens loaded for the last.
fn come_back(host_slots: usize, copy_cost: u64, depth: usize) -> (u64, u64) {
    let mut config = config(host_slots, None);
    config.copy_cost = copy_cost;
    let mut sim = Sim::deep(config, depth);
    sim.add(tokens(1, 100), 2);
    sim.run_to_end();
    for seed in 2..4 {
        sim.add(tokens(seed, 120), 2);
        sim.run_to_end();
    }
    let before = sim.computed();
    sim.add(tokens(1, 100), 2);
    sim.run_to_end();
    (sim.computed() - before, sim.driver.stats().host_hit_tokens)
}

#[test]
fn what_left_the_device_comes_back_from_the_host_tier() {
    for depth in [1, 2] {
        assert_eq!(come_back(0, 0, depth), (101, 0), "without a host tier all of it is computed again");
        assert_eq!(come_back(32, 0, depth), (5, 96), "six full blocks are loaded");
    }
}

#[test]
fn what_is_dearer_to_copy_than_to_compute_is_computed() {
    let hour = 3_600_000_000_000;
    assert_eq!(come_back(32, hour, 1), (101, 0));
}

#[test]
fn a_restart_finds_a_prompt_on_disk() {
    for (depth, latency, failures) in [(1, 1, 0), (2, 7, 0), (2, 3, 2)] {
        let manners = Manners { depth, disk: DiskManners { latency, failures }, ..Manners::default() };
        let mut sim = Sim::with(config(16, Some(2)), manners);
        sim.add(tokens(1, 100), 2);
        sim.run_to_end();
        let chunks = sim.driver.disk.keys().count();
        assert!(chunks > 0 && (failures > 0 || chunks == 3), "{chunks} of three chunks are stored");
        sim.driver.restart().expect("sound");
        assert_eq!(sim.driver.stats().hit_tokens, 0);
        let computed = sim.computed();
        sim.add(tokens(1, 100), 2);
        sim.run_to_end();
        let stats = sim.driver.stats();
        if failures == 0 {
            assert_eq!((stats.disk_fetched, stats.hit_tokens), (3, 96));
            assert_eq!(sim.computed() - computed, 5);
        }
    }
}

#[test]
fn a_lost_file_costs_a_miss_and_no_answer() {
    let mut sim = Sim::new(config(16, Some(2)));
    sim.add(tokens(1, 100), 2);
    sim.run_to_end();
    sim.driver.restart().expect("sound");
    sim.driver.lose_chunk(0);
    sim.driver.lose_chunk(0);
    sim.driver.lose_chunk(0);
    sim.add(tokens(1, 100), 2);
    sim.run_to_end();
    assert_eq!(sim.hit_tokens(), 0);
    assert_eq!(sim.finished().len(), 2);
}
