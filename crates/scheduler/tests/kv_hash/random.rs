//! Random traffic over tiny pools: whatever happens, every answer is the unloaded one.

use crate::sim::{Rng, Sim};
use folio_scheduler::SchedulerConfig;

const SEEDS: u64 = 120;

fn random_config(rng: &mut Rng) -> SchedulerConfig {
    let blocks = 1 + rng.below(64);
    let mut config =
        SchedulerConfig::new(if rng.chance(3) { vec![blocks, blocks + rng.below(8)] } else { vec![blocks] });
    config.block_tokens = [1, 4, 16][rng.below(3)];
    config.budget_tokens = 1 + rng.below(96);
    config.max_chunk = rng.chance(2).then(|| 1 + rng.below(20));
    config.max_seqs = 1 + rng.below(24);
    config.prefix_caching = !rng.chance(4);
    config.hash_bits = if rng.chance(3) { 4 } else { 128 };
    config.force_preempt_every = rng.chance(3).then(|| 1 + rng.next() % 5);
    config
}

/// Prompts over few tokens and with few beginnings, so that they share.
fn random_prompt(rng: &mut Rng, most: usize) -> Vec<u32> {
    let family = rng.below(3) as u32;
    let shared = rng.below(most + 1);
    let len = 1 + rng.below(most);
    (0..len).map(|i| if i < shared { family * 7 + i as u32 / 5 } else { rng.below(3) as u32 }).collect()
}

fn run(seed: u64) -> Sim {
    let mut rng = Rng(seed);
    let config = random_config(&mut rng);
    let room = (config.blocks[0] * config.block_tokens).min(150);
    let mut sim = Sim::new(config);
    if room < 2 {
        return sim;
    }
    let mut ids = Vec::new();
    for _ in 0..80 {
        for _ in 0..rng.below(3) {
            let prompt = random_prompt(&mut rng, room - 1);
            let num_tokens = 1 + rng.below((room - prompt.len()).min(40));
            let salt = u64::from(rng.chance(5));
            let copies = if rng.chance(4) { 1 + rng.below(4) } else { 1 };
            for _ in 0..copies {
                ids.push(sim.add_salted(prompt.clone(), num_tokens, salt));
            }
        }
        if rng.chance(6) && !ids.is_empty() {
            sim.abort(ids[rng.below(ids.len())]);
        }
        if sim.scheduler.has_work() {
            sim.step();
        }
    }
    sim.run_to_end();
    sim
}

#[test]
fn answers_equal_the_unloaded_run() {
    let (mut preemptions, mut hits) = (0, 0);
    for seed in 0..SEEDS {
        let sim = std::panic::catch_unwind(|| {
            let sim = run(seed);
            sim.check_end();
            sim
        });
        let sim = sim.unwrap_or_else(|_| panic!("seed {seed} fails"));
        preemptions += sim.scheduler.stats().preemptions;
        hits += sim.scheduler.stats().hit_tokens;
    }
    assert!(preemptions > 300 && hits > 3_000, "the traffic is too tame: {preemptions} preemptions, {hits} hits");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..20 {
        let (a, b) = (run(seed), run(seed));
        assert_eq!((a.steps, a.scheduler.stats()), (b.steps, b.scheduler.stats()), "seed {seed}");
    }
}

/// The inverse: one wrong table entry must show.
#[test]
fn a_wrong_table_entry_is_caught() {
    let mut caught = 0;
    for seed in 0..50 {
        let mut rng = Rng(seed);
        let mut config = SchedulerConfig::new(vec![40]);
        config.budget_tokens = 64;
        let mut sim = Sim::new(config);
        for _ in 0..4 {
            sim.add((0..40).map(|_| rng.below(1000) as u32).collect(), 12);
        }
        let at = rng.below(10);
        let mut planted = false;
        while sim.scheduler.has_work() {
            let late = sim.steps >= at;
            sim.step_with(|plan| {
                let with_table = |a: &&mut folio_scheduler::Assignment| a.samples && a.tables[0].len() > 2;
                if let Some(a) = plan.assignments.iter_mut().find(with_table).filter(|_| late && !planted) {
                    let entry = rng.below(a.tables[0].len() - 1);
                    a.tables[0][entry].0 = (a.tables[0][entry].0 + 1) % 40;
                    planted = true;
                }
            });
        }
        assert!(planted);
        caught += usize::from(sim.wrong_answers() > 0);
    }
    assert_eq!(caught, 50);
}
