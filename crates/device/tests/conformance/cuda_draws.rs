//! Sampling on a CUDA device: each kind of draw against plain arithmetic, and sampled tokens that a
//! next step uses unseen by the host. Tests beside the kernels cover sampling at length; these
//! cover the calls.

use folio_device::cuda::{Cuda, CudaConfig};
use folio_device::{
    Batch, DRAWN_TOKEN, Draw, DrawFailure, Drawn, Draws, GroupTables, Handles, InputLimits, Memory, Operations,
    Sampling, SeenToken, Span, Steps, TensorKind,
};

use crate::cuda::open;
use crate::data::{Random, download, f32_matrix};

const VOCAB: usize = 5000;
/// Rows that are sampled, and the padded number of a recording.
const ROWS: usize = 9;
const PADDED: usize = 16;

/// Tokens of a row, best first.
fn order(row: &[f32]) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..row.len() as u32).collect();
    tokens.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
    tokens
}

/// The token at which the weights, cumulated in order of token, reach the share `uniform`.
fn drawn_at(row: &[f32], temperature: f32, uniform: f64) -> u32 {
    let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = row.iter().map(|&logit| f64::from(((logit - best) / temperature).exp())).collect();
    let target = uniform * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let place = weights.iter().position(|weight| {
        sum += weight;
        sum > target
    });
    place.expect("a token") as u32
}

fn logprob(row: &[f32], token: u32) -> f32 {
    let whole: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
    (f64::from(row[token as usize]) - whole) as f32
}

fn inputs(backend: &mut Cuda) -> <Cuda as Handles>::Inputs {
    let limits =
        InputLimits { rows: 16, spans: 16, outputs: 16, table_entries: 16, groups: 1, ropes: 0, rope_pairs: 0 };
    backend.inputs(limits).unwrap()
}

#[test]
fn cuda_draws_what_is_asked_for() {
    let Some(mut backend) = open(CudaConfig::default()) else { return };
    let mut inputs = inputs(&mut backend);
    let mut values: Vec<f32> = Random::new(42).values(ROWS * VOCAB).iter().map(|value| value * 3.0).collect();
    values[3 * VOCAB + 5] = f32::NAN;
    let rows: Vec<Vec<f32>> = values.chunks_exact(VOCAB).map(<[f32]>::to_vec).collect();
    let best = |row: usize, rank: usize| order(&rows[row])[rank];
    let mut draws = Draws {
        tokens: vec![best(1, 0), 30, 90, 4999],
        biases: vec![(77, 100.0)],
        seen: vec![SeenToken { token: best(7, 0), outputs: 2 }],
        draws: vec![
            Draw::greedy(0),
            Draw { banned: 0..1, logprobs: Some(3), ..Draw::greedy(1) },
            Draw { temperature: 1.0, top_k: 1, uniform: 0.7, ..Draw::greedy(2) },
            Draw::greedy(3),
            Draw { target: Some(17), logprobs: Some(0), ..Draw::greedy(4) },
            Draw { allowed: Some(1..4), ..Draw::greedy(5) },
            Draw { temperature: 0.8, ..Draw::greedy(6) },
            Draw { frequency_penalty: 50.0, seen: 0..1, ..Draw::greedy(7) },
            Draw { biases: 0..1, ..Draw::greedy(8) },
        ],
    };
    let among =
        *[30u32, 90, 4999].iter().max_by(|a, b| rows[5][**a as usize].total_cmp(&rows[5][**b as usize])).unwrap();
    let mut expected = [best(0, 0), best(1, 1), best(2, 0), 5, 17, among, 0, best(7, 1), 77];
    let mut logits = backend.tensor(PADDED, VOCAB, TensorKind::Scores).unwrap();
    // Rows that only a padded draw uses.
    values.resize(PADDED * VOCAB, f32::NAN);
    // Launched, recorded and replayed, each in the memory of two turns: kernels must restore their
    // state between calls, and a replay must read this round's parameters.
    for round in 0..8 {
        draws.draws[6].uniform = 0.1 + 0.1 * f64::from(round);
        expected[6] = drawn_at(&rows[6], 0.8, draws.draws[6].uniform);
        backend.upload_rows(&mut logits, &values);
        backend.draw(&mut logits, &draws);
        let mut drawn: Vec<Drawn> = Vec::new();
        backend.drawn(&mut drawn).unwrap();
        assert!(backend.is_drawn());
        for (number, (drawn, token)) in drawn.iter().zip(expected).enumerate() {
            match &drawn.failure {
                Some(DrawFailure::NotFinite { token, value }) if number == 3 => assert!(*token == 5 && value.is_nan()),
                Some(failure) => panic!("draw {number}: {failure:?}"),
                None => assert_eq!(drawn.token, token, "draw {number}"),
            }
        }
        assert!(drawn[3].failure.is_some());
        let second = drawn[1].logprobs.as_ref().expect("logprobs");
        assert_eq!(second.rank, 2);
        assert_eq!(second.top.iter().map(|top| top.0).collect::<Vec<_>>(), order(&rows[1])[..3]);
        let near = |found: f32, token: u32, row: usize| (found - logprob(&rows[row], token)).abs() < 1e-4;
        assert!(near(second.logprob, best(1, 1), 1) && near(second.top[0].1, best(1, 0), 1), "{second:?}");
        let target = drawn[4].logprobs.as_ref().expect("logprobs");
        assert!(near(target.logprob, 17, 4) && target.top.is_empty(), "{target:?}");
        check_awaited(&mut backend, &mut inputs, &expected);
    }
    assert_eq!(backend.recorded_draws(), 2, "one kind of draw, two turns");
    backend.check().unwrap();
}

/// A step with tokens that the host does not know: draws 6 and 0, around one that it does.
fn check_awaited(backend: &mut Cuda, inputs: &mut <Cuda as Handles>::Inputs, expected: &[u32]) {
    let table: Vec<f32> = (0..VOCAB).flat_map(|token| [token as f32, 1.0]).collect();
    let table = backend.weight(&f32_matrix(2, &table)).unwrap();
    let span = |row: u32| Span { first_row: row, num_rows: 1, context: 1 };
    let batch = Batch {
        tokens: vec![DRAWN_TOKEN | 6, 4, DRAWN_TOKEN],
        positions: vec![0; 3],
        spans: (0..3).map(span).collect(),
        ancestors: Vec::new(),
        groups: vec![GroupTables { slots: vec![0, 16, 32], blocks: vec![0, 1, 2], first_block: vec![0, 1, 2] }],
        outputs: vec![0, 1, 2],
    };
    let size = backend.upload(inputs, &batch);
    assert_eq!((size.rows, size.outputs), (3, 3), "so few rows are not padded");
    let mut out = backend.tensor(3, 2, TensorKind::Stream).unwrap();
    backend.embed(&mut out, &table, inputs, 1.0);
    let found: Vec<f32> = download(backend, &out, 3).iter().copied().step_by(2).collect();
    // A bf16 table holds eight bits of a number.
    for (found, token) in found.iter().zip([expected[6], 4, expected[0]]) {
        assert!((found - token as f32).abs() <= token as f32 / 256.0, "{found} for token {token}");
    }
}
