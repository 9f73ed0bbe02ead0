//! Every operation, on every backend, against the reference; and every row bit for bit the same
//! whatever runs beside it.
//!
//! A backend passes if each row is within the case's tolerance of the reference's, and if rows
//! computed together, alone, in another order, in other chunks and in other blocks are bit-equal. A
//! new backend adds one test at the end of this file.

mod coded;
mod cuda;
mod cuda_draws;
mod cuda_products;
mod data;
mod empty;
mod fused;
mod paged;
mod rows;
mod trees;

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use folio_device::{
    Backend,
    cpu::{Cpu, CpuConfig, Isa},
    recording::Recording,
    reference::Reference,
};
use paged::Schedule;

/// A case with the reference's result.
struct Expected<C> {
    case: C,
    values: Vec<f32>,
    floor: f32,
}

/// Checks that each row is within `tolerance` of the expected one, relative to that row's largest
/// value (or `floor`, if larger).
fn close(found: &[f32], expected: &[f32], width: usize, tolerance: f32, floor: f32) -> Result<(), String> {
    assert_eq!(found.len(), expected.len());
    for (row, (found, expected)) in found.chunks_exact(width).zip(expected.chunks_exact(width)).enumerate() {
        let scale = expected.iter().fold(floor, |scale, value| scale.max(value.abs()));
        for (col, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            // Written so that a NaN fails.
            let near = (found - expected).abs() <= tolerance * scale;
            if !near {
                return Err(format!("row {row} col {col}: {found}, but the reference says {expected} (scale {scale})"));
            }
        }
    }
    Ok(())
}

/// Checks that values are equal bit for bit.
fn same(found: &[f32], expected: &[f32], width: usize) -> Result<(), String> {
    assert_eq!(found.len(), expected.len());
    match found.iter().zip(expected).position(|(found, expected)| found.to_bits() != expected.to_bits()) {
        Some(at) => Err(format!("row {} col {}: {} and {}", at / width, at % width, found[at], expected[at])),
        None => Ok(()),
    }
}

fn expected_rows(cases: Vec<rows::Case>) -> Vec<Expected<rows::Case>> {
    let all: Vec<usize> = (0..rows::ROWS).collect();
    expected(cases, |case| (case.run(&mut Reference::new(), &all), case.floor()))
}

fn expected_paged(cases: Vec<paged::Case>) -> Vec<Expected<paged::Case>> {
    expected(cases, |case| (case.run(&mut Reference::new(), Schedule::Whole), 0.1))
}

fn expected_trees(cases: Vec<trees::Case>) -> Vec<Expected<trees::Case>> {
    expected(cases, |case| (case.run(&mut Reference::new()), 0.1))
}

/// The reference's result for each case, and the floor of its tolerance; on all cores.
fn expected<C: Send + Sync>(cases: Vec<C>, run: impl Fn(&C) -> (Vec<f32>, f32) + Sync) -> Vec<Expected<C>> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let rounded = data::rounds_activations();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                data::round_activations(rounded);
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    let Some(case) = cases.get(number) else { return };
                    let values = run(case);
                    found.lock().expect("nobody panics").push((number, values));
                }
            });
        }
    });
    let mut found = found.into_inner().expect("nobody panics");
    found.sort_unstable_by_key(|(number, _)| *number);
    let expect = |(case, (_, (values, floor)))| Expected { case, values, floor };
    cases.into_iter().zip(found).map(expect).collect()
}

/// Runs a row case on `backend`: all rows must be within tolerance, and every selection bit-equal
/// to them.
fn check_rows<B: Backend>(name: &str, backend: &mut B, expected: &Expected<rows::Case>) {
    let Expected { case, values, floor } = expected;
    let width = case.width();
    let all: Vec<usize> = (0..rows::ROWS).collect();
    let together = case.run(backend, &all);
    close(&together, values, width, case.tolerance(), *floor).unwrap_or_else(|why| panic!("{name}, {case:?}: {why}"));

    let mut shuffled = all.clone();
    data::Random::new(5).shuffle(&mut shuffled);
    let mut at = 0;
    for count in [1, 2, 3, 5, 16, 6] {
        let picked = &shuffled[at..at + count];
        at += count;
        let alone = case.run(backend, picked);
        let expected: Vec<f32> =
            picked.iter().flat_map(|&row| together[row * width..(row + 1) * width].to_vec()).collect();
        same(&alone, &expected, width).unwrap_or_else(|why| panic!("{name}, {case:?}, rows {picked:?}: {why}"));
    }
    assert_eq!(at, rows::ROWS, "every row was computed apart from all others");
}

fn check_paged<B: Backend>(name: &str, backend: &mut B, expected: &Expected<paged::Case>, tolerance: f32) {
    let Expected { case, values, floor } = expected;
    let whole = case.run(backend, Schedule::Whole);
    close(&whole, values, case.width(), tolerance, *floor).unwrap_or_else(|why| panic!("{name}, {case:?}: {why}"));
    let is_long = case.lengths.iter().any(|&length| length > 500);
    let schedules = match is_long {
        true => [Schedule::Chunked(64), Schedule::Alone(16), Schedule::Saved(300)],
        false => [Schedule::Chunked(7), Schedule::Alone(1), Schedule::Saved(9)],
    };
    for schedule in schedules {
        let other = case.run(backend, schedule);
        same(&other, &whole, case.width()).unwrap_or_else(|why| panic!("{name}, {case:?}, {schedule:?}: {why}"));
    }
}

/// A tree's rows equal a chain's, bit for bit; the case checks that itself.
fn check_trees<B: Backend>(
    name: &str,
    backend: &mut B,
    expected: &[Expected<trees::Case>],
    tolerance: impl Fn(&paged::Case) -> f32,
) {
    for Expected { case, values, floor } in expected {
        let found = case.run(backend);
        close(&found, values, case.width(), tolerance(&case.shape), *floor)
            .unwrap_or_else(|why| panic!("{name}, {case:?}: {why}"));
    }
}

/// Runs the whole table on one backend.
fn conformance<B: Backend>(
    name: &str,
    open: impl Fn() -> B,
    rows: &[Expected<rows::Case>],
    paged: &[Expected<paged::Case>],
    paged_tolerance: impl Fn(&paged::Case) -> f32,
) {
    let mut backend = open();
    rows::round_trip(&mut backend);
    empty::run(&mut backend);
    for expected in rows {
        check_rows(name, &mut backend, expected);
    }
    for expected in paged {
        check_paged(name, &mut backend, expected, paged_tolerance(&expected.case));
    }
}

/// Two backends of one instruction set must agree to the bit with any number of threads.
fn check_threads(isa: Isa, rows: &[Expected<rows::Case>], paged: &[Expected<paged::Case>]) {
    let open = |threads| Cpu::new(CpuConfig { threads, isa: Some(isa) }).unwrap();
    let (mut one, mut others) = (open(1), [open(2), open(3)]);
    let all: Vec<usize> = (0..rows::ROWS).collect();
    for Expected { case, .. } in rows {
        let single = case.run(&mut one, &all);
        for other in &mut others {
            same(&case.run(other, &all), &single, case.width())
                .unwrap_or_else(|why| panic!("{isa:?}, {} threads, {case:?}: {why}", other.num_threads()));
        }
    }
    for Expected { case, .. } in paged {
        let single = case.run(&mut one, Schedule::Whole);
        for other in &mut others {
            same(&case.run(other, Schedule::Chunked(33)), &single, case.width())
                .unwrap_or_else(|why| panic!("{isa:?}, {} threads, {case:?}: {why}", other.num_threads()));
        }
    }
}

#[test]
fn reference_rows_do_not_see_each_other() {
    let (rows, paged) = (expected_rows(rows::cases()), expected_paged(paged::cases()));
    conformance("recorded reference", || Recording::new(Reference::new()), &rows, &paged, paged::Case::tolerance);
}

#[test]
fn cpu_agrees_with_the_reference() {
    let (rows, paged) = (expected_rows(rows::cases()), expected_paged(paged::cases()));
    for isa in Isa::available() {
        let open = || Cpu::new(CpuConfig { threads: 2, isa: Some(isa) }).unwrap();
        conformance(&format!("cpu {isa:?}"), open, &rows, &paged, |case| case.cpu_tolerance(isa));
        check_threads(isa, &rows, &paged);
    }
}

#[test]
fn rows_of_trees_are_rows_of_chains() {
    let expected = expected_trees(trees::cases());
    check_trees("recorded reference", &mut Recording::new(Reference::new()), &expected, paged::Case::tolerance);
    for isa in Isa::available() {
        for threads in [1, 3] {
            let mut cpu = Cpu::new(CpuConfig { threads, isa: Some(isa) }).unwrap();
            check_trees(&format!("cpu {isa:?}, {threads} threads"), &mut cpu, &expected, |case| {
                case.cpu_tolerance(isa)
            });
        }
    }
}

/// The checks can fail: one wrong entry in a block table, one value off by a little, one flipped
/// bit.
#[test]
fn a_wrong_answer_is_seen() {
    let case = &paged::cases()[0];
    let backend = &mut Reference::new();
    let good = case.run(backend, Schedule::Whole);
    let bad = case.run(backend, Schedule::WrongBlock);
    assert!(close(&bad, &good, case.width(), case.tolerance(), 0.1).is_err());
    assert!(close(&[1.0, 2.0001], &[1.0, 2.0], 2, 1e-5, 0.1).is_err());
    assert!(close(&[1.0, f32::NAN], &[1.0, 2.0], 2, 1e-5, 0.1).is_err());
    assert!(same(&[1.0, f32::from_bits(1.0f32.to_bits() ^ 1)], &[1.0, 1.0], 1).is_err());
}
