//! The whole table on a CUDA device, in f32 and in bf16. Without a device these tests are skipped.
//!
//! A case that fails does not stop the others: runs on a device are rare, so one run should show
//! all faults.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use folio_device::Steps;
use folio_device::cuda::{Cuda, CudaConfig, Precision, driver};

use crate::paged::Schedule;
use crate::{Expected, close, data, empty, expected_paged, expected_rows, expected_trees, paged, rows, same, trees};

/// A way of opening the device, and its promises.
struct Mode {
    name: &'static str,
    config: CudaConfig,
    /// Whether bits of products, and of attention, do not depend on the number of rows.
    invariant: bool,
}

fn modes() -> [Mode; 4] {
    let bf16 = CudaConfig::default();
    let f32 = CudaConfig { activations: Precision::F32, ..CudaConfig::default() };
    [
        Mode { name: "f32", config: f32, invariant: true },
        Mode { name: "bf16", config: bf16.clone(), invariant: false },
        Mode {
            name: "bf16 without cuBLASLt",
            config: CudaConfig { use_cublas: false, ..bf16.clone() },
            invariant: false,
        },
        Mode { name: "bf16 batch-invariant", config: CudaConfig { batch_invariant: true, ..bf16 }, invariant: true },
    ]
}

/// `None`: there is no device, and the test is skipped.
pub fn open(config: CudaConfig) -> Option<Cuda> {
    match driver::device_count() {
        Ok(0) => folio_testing::skip!(Gpu, "this machine has no CUDA device"),
        Err(error) => folio_testing::skip!(Gpu, "{error}"),
        Ok(_) => {
            let cache_folder = Some(std::env::temp_dir().join("folio-kernels-of-tests"));
            let config = CudaConfig { cache_folder, ..config };
            return Some(Cuda::new(config).unwrap_or_else(|error| panic!("{error}")));
        }
    }
    None
}

/// Runs one case and notes a failure. False: the device is lost, and no further case can run.
fn attempt(failures: &mut Vec<String>, backend: &mut Cuda, name: String, case: impl FnOnce(&mut Cuda)) -> bool {
    if every().is_some() {
        println!("{name}");
    }
    let outcome = catch_unwind(AssertUnwindSafe(|| case(backend)));
    if let Err(payload) = outcome {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        failures.push(format!("{name}: {}", text.unwrap_or_else(|| "panicked".to_owned())));
    }
    if let Err(error) = backend.check() {
        failures.push(format!("{name}: {error}"));
        return false;
    }
    true
}

fn check_rows(backend: &mut Cuda, mode: &Mode, expected: &Expected<rows::Case>) {
    let Expected { case, values, floor } = expected;
    let width = case.width();
    let tolerance = match mode.config.activations {
        Precision::F32 => case.tolerance(),
        Precision::BF16 => case.bf16_tolerance(),
    };
    let all: Vec<usize> = (0..rows::ROWS).collect();
    let together = case.run(backend, &all);
    close(&together, values, width, tolerance, *floor).unwrap_or_else(|why| panic!("{why}"));
    let mut shuffled = all;
    data::Random::new(5).shuffle(&mut shuffled);
    for picked in [&shuffled[..1], &shuffled[1..6], &shuffled[6..22]] {
        let alone = case.run(backend, picked);
        let expected: Vec<f32> =
            picked.iter().flat_map(|&row| together[row * width..(row + 1) * width].to_vec()).collect();
        match mode.invariant || !case.is_product() {
            true => same(&alone, &expected, width),
            false => close(&alone, &expected, width, tolerance, *floor),
        }
        .unwrap_or_else(|why| panic!("rows {picked:?}: {why}"));
    }
}

fn check_paged(backend: &mut Cuda, mode: &Mode, expected: &Expected<paged::Case>) {
    let Expected { case, values, floor } = expected;
    let tolerance = match mode.config.activations {
        Precision::F32 => case.tolerance(),
        Precision::BF16 => case.bf16_tolerance(),
    };
    let whole = case.run(backend, Schedule::Whole);
    close(&whole, values, case.width(), tolerance, *floor).unwrap_or_else(|why| panic!("{why}"));
    let is_long = case.lengths.iter().any(|&length| length > 500);
    let schedules = match is_long {
        true => [Schedule::Chunked(64), Schedule::Alone(16), Schedule::Saved(300)],
        false => [Schedule::Chunked(7), Schedule::Alone(1), Schedule::Saved(9)],
    };
    for schedule in schedules {
        let other = case.run(backend, schedule);
        match mode.invariant {
            true => same(&other, &whole, case.width()),
            false => close(&other, values, case.width(), tolerance, *floor),
        }
        .unwrap_or_else(|why| panic!("{schedule:?}: {why}"));
    }
}

/// Selects every 8th case from number 3 on with `FOLIO_EVERY=8,3`. Tools that watch each access to
/// memory are slow.
fn every() -> Option<(usize, usize)> {
    let text = std::env::var("FOLIO_EVERY").ok()?;
    let (step, first) = text.split_once(',').unwrap_or((&text, "0"));
    Some((step.parse().expect("FOLIO_EVERY"), first.parse().expect("FOLIO_EVERY")))
}

/// In every mode a tree's rows equal those of a decoded chain, bit for bit; the case checks that
/// itself.
fn check_tree(backend: &mut Cuda, mode: &Mode, expected: &Expected<trees::Case>) {
    let Expected { case, values, floor } = expected;
    let tolerance = match mode.config.activations {
        Precision::F32 => case.shape.tolerance(),
        Precision::BF16 => case.shape.bf16_tolerance(),
    };
    close(&case.run(backend), values, case.width(), tolerance, *floor).unwrap_or_else(|why| panic!("{why}"));
}

fn some_of<C>(cases: Vec<C>) -> Vec<C> {
    let (step, first) = every().unwrap_or((1, 0));
    cases.into_iter().skip(first).step_by(step).collect()
}

fn conformance(mode: &Mode) {
    let Some(mut backend) = open(mode.config.clone()) else { return };
    println!("{}: {}", mode.name, backend.numerics());
    // Both sides start from the same numbers.
    data::round_activations(mode.config.activations == Precision::BF16);
    let (rows, paged) = (expected_rows(some_of(rows::cases())), expected_paged(some_of(paged::cases())));
    let mut failures = Vec::new();
    let backend = &mut backend;
    let mut alive = attempt(&mut failures, backend, "round trip".into(), rows::round_trip);
    alive = alive && attempt(&mut failures, backend, "no rows".into(), empty::run);
    for expected in &rows {
        let name = format!("{:?}", expected.case);
        alive = alive && attempt(&mut failures, backend, name, |backend| check_rows(backend, mode, expected));
    }
    for expected in &paged {
        let name = format!("{:?}", expected.case);
        alive = alive && attempt(&mut failures, backend, name, |backend| check_paged(backend, mode, expected));
    }
    data::round_activations(false);
    report(mode, &failures, rows.len() + paged.len());
}

/// Failures, a few of each kind: the others of a kind likely have the same cause.
fn report(mode: &Mode, failures: &[String], cases: usize) {
    let count = failures.len();
    println!("{}: {cases} cases", mode.name);
    let kind = |failure: &String| failure.split(' ').next().unwrap_or_default().to_owned();
    let mut shown: HashMap<String, usize> = HashMap::new();
    for failure in failures {
        let seen = shown.entry(kind(failure)).or_default();
        *seen += 1;
        if *seen <= 8 {
            println!("{}: {failure}", mode.name);
        }
    }
    shown.iter().for_each(|(kind, count)| println!("{}: {count} of {kind}", mode.name));
    assert!(count == 0, "{}: {count} of {cases} cases failed", mode.name);
}

fn trees(mode: &Mode) {
    let Some(mut backend) = open(mode.config.clone()) else { return };
    data::round_activations(mode.config.activations == Precision::BF16);
    let (cases, mut failures, mut alive) = (expected_trees(some_of(trees::cases())), Vec::new(), true);
    for expected in &cases {
        let name = format!("{:?}", expected.case);
        alive = alive && attempt(&mut failures, &mut backend, name, |backend| check_tree(backend, mode, expected));
    }
    data::round_activations(false);
    report(mode, &failures, cases.len());
}

#[test]
fn cuda_trees_in_f32_are_chains() {
    trees(&modes()[0]);
}

#[test]
fn cuda_trees_in_bf16_are_chains() {
    trees(&modes()[1]);
}

#[test]
fn cuda_batch_invariant_trees_are_chains() {
    trees(&modes()[3]);
}

#[test]
fn cuda_f32_agrees_with_the_reference() {
    conformance(&modes()[0]);
}

#[test]
fn cuda_bf16_agrees_with_the_reference() {
    conformance(&modes()[1]);
}

#[test]
fn cuda_without_cublas_agrees_with_the_reference() {
    conformance(&modes()[2]);
}

#[test]
fn cuda_batch_invariant_rows_do_not_see_each_other() {
    conformance(&modes()[3]);
}
