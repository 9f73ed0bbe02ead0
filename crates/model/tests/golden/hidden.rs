//! Pooled hidden states of one model per family, on every backend: the source of embeddings.

use std::collections::BTreeMap;

use folio_device::{
    Backend,
    cpu::{Cpu, CpuConfig},
    reference::Reference,
};
use serde::Deserialize;

use crate::{file, run::Sequence, switch_off};

const TOLERANCE: f64 = 1e-4;

#[derive(Deserialize)]
struct HiddenStates {
    models: BTreeMap<String, Pooled>,
}

/// Means of the states behind the last norm, over the prompt of the model's golden file.
#[derive(Deserialize)]
struct Pooled {
    mean: Vec<f64>,
    last: Vec<f64>,
}

fn read() -> BTreeMap<String, Pooled> {
    file::unpack::<HiddenStates>(&file::folder().join("../hidden-states.json.lzma")).models
}

/// The largest difference, as a share of the largest value.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().map(|value| value.abs()).fold(0.0, f64::max);
    // A NaN counts as infinitely far.
    let far = |(found, expected): (&f64, &f64)| Some((found - expected).abs()).filter(|far| !far.is_nan());
    found.iter().zip(expected).map(|pair| far(pair).unwrap_or(f64::INFINITY)).fold(0.0, f64::max) / largest
}

fn check<B: Backend>(backend: impl Fn() -> B) {
    let expected = read();
    assert!(expected.len() >= 13, "{} models only", expected.len());
    for (name, Pooled { mean, last }) in expected {
        let golden = file::read(&name);
        let model = switch_off::open(&golden).expect(&name);
        for chunk in [golden.prompt.len(), 7] {
            let mut sequence = Sequence::new(backend(), &model, golden.prompt.len(), chunk).expect(&name);
            let mut rows = Vec::new();
            for step in golden.prompt.chunks(chunk) {
                rows.extend(sequence.feed_for_states(step).expect(&name));
            }
            let sum = |i: usize| rows.iter().map(|row| f64::from(row[i])).sum::<f64>();
            let found: Vec<f64> = (0..mean.len()).map(|i| sum(i) / rows.len() as f64).collect();
            let found_last: Vec<f64> = rows[rows.len() - 1].iter().copied().map(f64::from).collect();
            let (of_mean, of_last) = (distance(&found, &mean), distance(&found_last, &last));
            assert!(of_mean < TOLERANCE && of_last < TOLERANCE, "{name}: mean {of_mean:.1e}, last {of_last:.1e}");
            // The comparison distinguishes the two.
            assert!(distance(&found, &last) > 0.05, "{name}: the mean is nearly the last");
        }
    }
}

#[test]
fn reference_pools_as_transformers_does() {
    check(Reference::new);
}

#[test]
fn cpu_pools_as_transformers_does() {
    check(|| Cpu::new(CpuConfig { threads: 1, isa: None }).expect("a CPU"));
}
