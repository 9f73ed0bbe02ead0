//! Steps that verify drafts: if bits do not depend on the batch, each row is as if its tokens had
//! come one by one; on a CUDA device replayed steps equal unrecorded ones bit for bit. Tests that
//! need such a device are skipped without one.

use folio_device::cpu::{Cpu, CpuConfig};
use folio_device::cuda::{CudaConfig, Precision};
use folio_device::{Backend, KvFormat, tree};
use folio_model::{OpenModel, Tap};

use crate::crowd::{Crowd, Drafted};
use crate::cuda::{every, f32, open, turn};
use crate::families::for_all;
use crate::file::Golden;
use crate::switch_off;

/// Division of tokens into steps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    AtOnce,
    OneByOne,
}

/// Kinds of steps: the lengths of the first sequences' chains, and how many of them are trees
/// instead.
const KINDS: [(&[usize], usize); 4] = [
    (&[5], 0),
    // More rows than are computed separately.
    (&[5, 5, 5, 5, 5, 5], 0),
    (&[3, 3, 3, 1, 1, 1], 0),
    (&[4, 4, 2, 1], 2),
];
/// Steps of each kind: the first is launched, the second recorded, the others replayed.
const REPEATS: usize = 4;
const SEQUENCES: usize = 6;
const PROMPT: usize = 11;

fn token(golden: &Golden, who: usize, at: usize) -> u32 {
    golden.greedy[(7 * who + at) % golden.greedy.len()]
}

fn kv_of(config: &CudaConfig) -> KvFormat {
    if config.activations == Precision::F32 { KvFormat::F32 } else { KvFormat::BF16 }
}

/// Logits of every row of every step, followed by states that a head would read.
fn run<B: Backend>(
    golden: &Golden,
    model: &OpenModel,
    (backend, kv): (B, KvFormat),
    pace: Pace,
    kinds: &[(&[usize], usize)],
) -> Result<Vec<Vec<f32>>, String> {
    let room = PROMPT + 2 * REPEATS * kinds.len() + 8;
    let mut crowd = Crowd::new(backend, model, &[room; SEQUENCES], (SEQUENCES * PROMPT, 32), kv)?;
    crowd.tap(Tap::Before(vec![0, model.spec.layers.len() - 1]))?;
    let (mut found, mut logits) = (Vec::new(), Vec::new());
    let mut lengths = [0; SEQUENCES];
    for (who, length) in lengths.iter_mut().enumerate() {
        let tokens = (0..PROMPT).map(|at| token(golden, who, at)).collect();
        crowd.verify(&[Drafted { who, tokens, words: Vec::new() }], &mut logits)?;
        *length = PROMPT;
    }
    for step in 0..REPEATS * kinds.len() {
        let (chains, trees) = kinds[step / REPEATS];
        let words = tree::ancestors(&[None, Some(0), Some(0), Some(2)]);
        let drafts = chains.iter().enumerate().map(|(who, &rows)| Drafted {
            who,
            tokens: (0..rows).map(|row| token(golden, who, lengths[who] + row)).collect(),
            words: if who < trees { words.clone() } else { Vec::new() },
        });
        let drafts: Vec<Drafted> = drafts.collect();
        match pace {
            Pace::AtOnce => {
                crowd.verify(&drafts, &mut logits)?;
                let states = crowd.tapped();
                let rows = logits.chunks_exact(model.spec.vocab_size).zip(states.chunks_exact(2 * model.spec.hidden));
                found.extend(rows.map(|(logits, states)| [logits, states].concat()));
            }
            Pace::OneByOne => {
                for Drafted { who, tokens, .. } in &drafts {
                    for &token in tokens {
                        crowd.verify(&[Drafted { who: *who, tokens: vec![token], words: Vec::new() }], &mut logits)?;
                        found.push([logits.clone(), crowd.tapped()].concat());
                    }
                }
            }
        }
        // One token of a draft is accepted, and two of some chains.
        for (who, &rows) in chains.iter().enumerate() {
            let taken = if who >= trees && rows > 1 { 1 + step % 2 } else { 1 };
            lengths[who] += taken;
            crowd.rewind(who, lengths[who]);
        }
    }
    Ok(found)
}

fn first_difference(one: &[Vec<f32>], other: &[Vec<f32>]) -> Option<usize> {
    assert_eq!(one.len(), other.len(), "rows of logits");
    one.iter().zip(other).position(|(one, other)| one != other)
}

#[test]
fn chains_equal_single_tokens() {
    for_all(&every(15), |golden| {
        let model = switch_off::open(golden)?;
        let open = || Cpu::new(CpuConfig { threads: 2, isa: None }).map_err(|e| e.to_string());
        let run = |pace| run(golden, &model, (open()?, KvFormat::BF16), pace, &KINDS[..3]);
        match first_difference(&run(Pace::AtOnce)?, &run(Pace::OneByOne)?) {
            Some(row) => Err(format!("row {row} of chains differs when its tokens come one by one")),
            None => Ok(0.0),
        }
    });
}

#[test]
fn recorded_drafts_equal_unrecorded_ones() {
    if let Some(_turn) = turn() {
        let configs = [f32(), CudaConfig::default(), CudaConfig { batch_invariant: true, ..CudaConfig::default() }];
        for_all(&every(4), |golden| {
            let model = switch_off::open(golden)?;
            for config in &configs {
                let run = |graphs| {
                    let config = CudaConfig { graphs, ..config.clone() };
                    run(golden, &model, (open(&config), kv_of(&config)), Pace::AtOnce, &KINDS)
                };
                if let Some(row) = first_difference(&run(true)?, &run(false)?) {
                    return Err(format!("row {row} of drafts differs when steps are recorded ({config:?})"));
                }
            }
            Ok(0.0)
        });
    }
}

#[test]
fn batch_invariant_chains_equal_single_tokens() {
    if let Some(_turn) = turn() {
        let configs = [f32(), CudaConfig { batch_invariant: true, ..CudaConfig::default() }];
        for_all(&every(4), |golden| {
            let model = switch_off::open(golden)?;
            for config in &configs {
                let run = |pace| run(golden, &model, (open(config), kv_of(config)), pace, &KINDS[..3]);
                if let Some(row) = first_difference(&run(Pace::AtOnce)?, &run(Pace::OneByOne)?) {
                    return Err(format!("row {row} of chains differs when its tokens come one by one ({config:?})"));
                }
            }
            Ok(0.0)
        });
    }
}
