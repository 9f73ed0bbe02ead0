//! Many seeds, every invariant, every step; and a proof that the simulator can fail.

use folio_simulator::{
    Mode, Perturb, Scenario, play,
    scenario::{Action, Event},
    shrink::shrink,
    sweep::{Report, Sweep},
};

fn sweep(seeds: u64, steps: u64) -> Sweep {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Sweep { first_seed: 0, seeds, steps, threads, perturb: None, stop_at_first: false, at_most: None }
}

/// Checks every counter as a share of all steps: a feature that the traffic leaves out is not
/// tested.
fn check_coverage(report: &Report) {
    for (name, count) in report.coverage.rows() {
        let least = report.coverage.steps / 20_000;
        assert!(count > least, "the traffic is too tame: {name} {count} in {} steps", report.coverage.steps);
    }
}

#[test]
fn two_thousand_seeds_hold_every_invariant() {
    let report = sweep(2000, 2000).run();
    println!("{}", report.table());
    if let Some((seed, violation)) = report.failures.first() {
        panic!("seed {seed}: {violation}\n{} seeds fail; cargo xtask simulate --seed {seed}", report.failures.len());
    }
    assert!(report.coverage.steps >= 4_000_000, "{} steps", report.coverage.steps);
    check_coverage(&report);
}

/// I16: the same seed gives the same trace.
#[test]
fn the_same_seed_gives_the_same_run() {
    let one = Sweep { threads: 1, ..sweep(60, 300) }.run();
    let two = Sweep { threads: 3, ..sweep(60, 300) }.run();
    assert_eq!((one.trace, &one.coverage), (two.trace, &two.coverage));
    let other = Sweep { first_seed: 60, ..sweep(60, 300) }.run();
    assert_ne!(one.trace, other.trace);
}

#[test]
fn a_flipped_table_entry_that_is_read_is_always_caught() {
    let report = Sweep { perturb: Some(10_000), ..sweep(600, 600) }.run();
    let perturbed = report.perturbed;
    println!("{perturbed:?}");
    assert!(perturbed.effective_runs > 100, "{perturbed:?}");
    assert_eq!(perturbed.missed, 0, "{perturbed:?}");
    assert_eq!(perturbed.caught, perturbed.effective_runs);
}

/// The smallest possible fault: one entry of one plan of a run.
#[test]
fn a_single_wrong_entry_is_caught() {
    let mut caught = 0;
    for seed in 0..60 {
        let scenario = Scenario::random(seed, 200);
        let outcome = play(&scenario, Mode { spoken: false, perturb: Some(Perturb::once(seed)) });
        assert_eq!(outcome.effective_flips > 0, outcome.violation.is_some(), "seed {seed}: {:?}", outcome.violation);
        caught += outcome.effective_flips;
    }
    assert!(caught > 30, "{caught} runs had something to flip");
}

#[test]
fn a_failing_run_shrinks_to_a_short_one_that_fails_alike() {
    let mut shrunk = 0;
    for seed in 0..6 {
        let mut scenario = Scenario::random(seed, 300);
        let at = scenario.events.partition_point(|e| e.tick < 100);
        scenario.events.insert(at, Event { tick: 100, action: Action::Tamper });
        let Some(fault) = play(&scenario, Mode::default()).violation else { continue };
        let (small, outcome) = shrink(&scenario, &fault, &Mode::default());
        let found = outcome.violation.expect("still fails");
        assert!(found.is_like(&fault), "{found} instead of {fault}");
        assert!(small.events.len() <= 4, "seed {seed}: {:?}", small.events);
        assert!(small.events.iter().any(|e| e.action == Action::Tamper));
        assert!(outcome.lines.len() <= 40, "seed {seed}: {} lines", outcome.lines.len());
        shrunk += 1;
    }
    assert!(shrunk >= 3, "{shrunk} runs had something to spoil");
}
