//! A decoder with weights from a file of packed ones computes the same as the one that packed them.

use std::sync::Arc;
use std::sync::mpsc;

use folio_device::Memory as _;
use folio_device::cpu::{Cpu, CpuConfig, Packed, PackedFile, PackedParts, PackedPlace};
use folio_formats::quant::encode;

use super::*;
use crate::AtLoad;

const DENSE: &str = r#"{"model_type": "llama", "vocab_size": 50, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 64}"#;
const EXPERTS: &str = r#"{"model_type": "qwen3_moe", "vocab_size": 50, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}"#;

/// All matrices in that format.
fn stored_as(format: Format, mut weights: Memory) -> Memory {
    for (stored, shape, bytes) in weights.0.values_mut().filter(|(_, shape, _)| shape.len() > 1) {
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        let rows = values.chunks_exact(shape[shape.len() - 1]);
        *bytes = rows.flat_map(|row| encode(format, row).unwrap()).collect();
        *stored = format;
    }
    weights
}

/// The weights with zeros for matrices.
fn emptied(mut weights: Memory) -> Memory {
    let matrices = weights.0.values_mut().filter(|(_, shape, _)| shape.len() > 1);
    matrices.for_each(|(_, _, bytes)| bytes.fill(0));
    weights
}

fn load(config: &str, weights: &Memory, at_load: Option<AtLoad>, packed: Option<&Packed>) -> Decoder<Cpu> {
    let mut model = OpenModel::from_config(config, Box::new(weights.clone())).unwrap();
    model.at_load = at_load;
    let cpu = Cpu::new(CpuConfig { threads: 2, isa: None }).unwrap();
    load_model(packed.into_iter().fold(cpu, Cpu::with_packed), &model).unwrap()
}

#[test]
fn mapped_weights_compute_what_packed_ones_do() {
    let folder = std::env::temp_dir().join(format!("folio-decoder-packed-{}", std::process::id()));
    let cases = [
        ("dense", DENSE, Format::BF16, None),
        ("dense", DENSE, Format::BF16, Some(AtLoad::Int4)),
        ("dense", DENSE, Format::BF16, Some(AtLoad::Fp8)),
        ("dense", DENSE, Format::Q8_0, None),
        ("dense", DENSE, Format::Q4_K, None),
        ("experts", EXPERTS, Format::BF16, None),
        ("experts", EXPERTS, Format::Q4_K, None),
    ];
    for (key, (name, config, format, at_load)) in cases.into_iter().enumerate() {
        let what = format!("{name} {format:?} {at_load:?}");
        let weights = stored_as(format, invent(config));
        let step = batch(&TOKENS, 0, 1);
        let expected = logits(&mut load(config, &weights, at_load, None), &step);

        let parts = PackedParts::default();
        let mut decoder = load(config, &weights, at_load, Some(&Packed::Shared(parts.clone())));
        assert!(logits(&mut decoder, &step) == expected, "{what}: parts that are shared");
        let shapes = parts.shapes();
        let place = PackedPlace { folder: folder.clone(), name: name.into(), key: key as u128 };
        let (sender, receiver) = mpsc::channel();
        let writer = place.clone().write(&parts, move |error| sender.send(error).unwrap()).unwrap();
        assert!(receiver.recv().is_err(), "{what}: it is written");
        drop((writer, decoder));

        let file = PackedFile::new(place.open().unwrap(), place.key, &shapes).unwrap();
        let packed = Packed::File(Arc::new(file));
        // Only vectors are read from the source.
        let mut decoder = load(config, &emptied(weights.clone()), at_load, Some(&packed));
        let found = logits(&mut decoder, &step);
        assert!(found == expected, "{what}: parts of a file");
        assert!(expected.iter().any(|logit| *logit != 0.0) && expected.iter().all(|logit| logit.is_finite()), "{what}");
        assert!(decoder.backend().reads_matrices(), "{what}: what comes behind the model is packed");
        assert_eq!(decoder.memory(), load(config, &weights, at_load, None).memory(), "{what}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
