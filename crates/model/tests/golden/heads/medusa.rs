//! Medusa heads with the model's output matrix and with their own.

use folio_device::{Backend, reference::Reference};
use folio_model::heads::Medusa;
use serde::Deserialize;

use super::{Golden, TensorGroup, Weights, batch, check, cpu, cuda, cuda_in_f32, distance, read};

#[derive(Deserialize)]
pub(super) struct Expected {
    name: String,
    tensors: Vec<TensorGroup>,
    rows: Vec<u32>,
    /// Logits of each head, row by row.
    logits: Vec<Vec<Vec<f64>>>,
}

fn agrees<B: Backend>(backend: impl Fn() -> B) {
    let golden = read();
    assert_eq!(golden.medusa.len(), 2);
    for expected in &golden.medusa {
        let mut decoder = golden.decoder(backend());
        let weights = Weights::of(golden.head_seed, &expected.tensors);
        let mut medusa = Medusa::load(&mut decoder, &weights, 4).expect("heads");
        assert_eq!(medusa.num_heads(), expected.logits.len());
        decoder.forward(&batch(golden.prompt(), 0, &[])).expect("a step");
        let all = read_all(&golden, expected, &mut medusa, &mut decoder, &expected.rows);
        // One by one, and in another order: the same bits.
        for (i, &row) in expected.rows.iter().enumerate().rev() {
            let alone = read_all(&golden, expected, &mut medusa, &mut decoder, &[row]);
            for (alone, all) in alone.iter().zip(&all) {
                assert!(alone[0] == all[i], "{}: row {row} alone", expected.name);
            }
        }
        assert!(medusa.start(&mut decoder, &[25]).is_err(), "a row that is no output");
        assert!(medusa.start(&mut decoder, &[0; 5]).is_err(), "more rows than there is room for");
    }
}

/// Logits of all heads, checked against the expected ones of these rows.
fn read_all<B: Backend>(
    golden: &Golden,
    expected: &Expected,
    medusa: &mut Medusa<B>,
    decoder: &mut folio_model::Decoder<B>,
    rows: &[u32],
) -> Vec<Vec<Vec<f32>>> {
    medusa.start(decoder, rows).expect("a start");
    let (mut out, mut fewer, mut all) = (Vec::new(), Vec::new(), Vec::new());
    let vocab = golden.config["vocab_size"].as_u64().expect("a size") as usize;
    medusa.logits(decoder, 1, &mut fewer).expect("logits");
    medusa.logits(decoder, expected.logits.len(), &mut out).expect("logits");
    assert_eq!(out.len(), expected.logits.len() * rows.len() * vocab);
    assert!(fewer == out[..rows.len() * vocab], "{}: the first head alone", expected.name);
    for (head, expected_rows) in expected.logits.iter().enumerate() {
        let own = &out[head * rows.len() * vocab..(head + 1) * rows.len() * vocab];
        let found: Vec<Vec<f32>> = own.chunks_exact(vocab).map(<[f32]>::to_vec).collect();
        for (found, row) in found.iter().zip(rows) {
            let number = expected.rows.iter().position(|other| other == row).expect("a row that is expected");
            check(&format!("{}: head {head}, row {row}", expected.name), found, &expected_rows[number]);
            let other = &expected.logits[(head + 1) % expected.logits.len()][number];
            assert!(distance(found, other) > 0.05, "{}: heads are alike", expected.name);
        }
        all.push(found);
    }
    all
}

#[test]
fn reference_agrees() {
    agrees(Reference::new);
}

#[test]
fn cpu_agrees() {
    agrees(cpu);
}

#[test]
fn cuda_agrees() {
    if let Some(_turn) = cuda::turn() {
        agrees(cuda_in_f32);
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let golden = read();
    let mut decoder = golden.decoder(Reference::new());
    let empty = Weights::default();
    let error = Medusa::load(&mut decoder, &empty, 1).err().expect("a refusal").to_string();
    let expected =
        "tensor medusa_head.0.0.linear.weight is missing, but a file of Medusa heads needs it with shape [32, 32]";
    assert_eq!(error, expected);
}
