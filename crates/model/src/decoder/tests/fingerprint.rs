//! Differences that a fingerprint must show, and others that it must not.

use folio_device::cpu::{Cpu, CpuConfig, Isa};

use super::*;
use crate::fingerprint::hash_weights;
use crate::{Digest, file_stamp};

fn print_of<B: Backend>(backend: B, model: &OpenModel, limits: DecoderLimits) -> u128 {
    let mut decoder = Decoder::load(backend, model, limits, &mut |_| {}).unwrap();
    decoder.fingerprint(model, "").unwrap().0
}

fn reference(config: &str, weights: &Memory) -> u128 {
    let model = OpenModel::from_config(config, Box::new(weights.clone())).unwrap();
    let limits = limits(model.spec.kv_groups().len());
    print_of(Reference::new(), &model, limits)
}

#[test]
fn equal_models_agree_whatever_the_limits_and_the_way_logits_are_made() {
    let base = config("gemma2", "");
    let weights = invent(&base);
    let expected = reference(&base, &weights);
    assert_eq!(reference(&base, &weights), expected);
    let capped = config("gemma2", r#", "final_logit_softcapping": 7.0"#);
    assert_eq!(reference(&capped, &weights), expected, "another cap on the logits");
    let model = OpenModel::from_config(&base, Box::new(weights)).unwrap();
    let few = DecoderLimits { rows: 3, spans: 1, outputs: 1, table_entries: 1, ..limits(2) };
    assert_eq!(print_of(Reference::new(), &model, few), expected, "a step of three rows");
    let more = DecoderLimits { blocks: vec![9, 4], ..limits(2) };
    assert_eq!(print_of(Reference::new(), &model, more), expected, "other pools");
}

#[test]
fn weights_configuration_format_and_kernels_count() {
    let base = config("llama", "");
    let weights = invent(&base);
    let mut seen = vec![("as it is".to_owned(), reference(&base, &weights))];
    for name in weights.names() {
        let mut other = weights.clone();
        other.0.get_mut(name).unwrap().2[1] ^= 1;
        seen.push((name.to_owned(), reference(&base, &other)));
    }
    let mut renamed = weights.clone();
    renamed.put("unused.weight", &[1], &[0.0]);
    seen.push(("one tensor more".to_owned(), reference(&base, &renamed)));
    let scaled = r#", "rope_scaling": {"type": "linear", "factor": 4.0}"#;
    for extra in [r#", "rope_theta": 5000.0"#, r#", "rms_norm_eps": 1e-4"#, scaled] {
        seen.push((extra.to_owned(), reference(&config("llama", extra), &weights)));
    }
    let model = OpenModel::from_config(&base, Box::new(weights)).unwrap();
    for kv_format in KvFormat::ALL.into_iter().filter(|&format| format != limits(1).kv_format) {
        let limits = DecoderLimits { kv_format, ..limits(1) };
        seen.push((format!("{kv_format:?}"), print_of(Reference::new(), &model, limits)));
    }
    for isa in Isa::available() {
        let cpu = |threads| Cpu::new(CpuConfig { threads, isa: Some(isa) }).unwrap();
        let one = print_of(cpu(1), &model, limits(1));
        assert_eq!(one, print_of(cpu(2), &model, limits(1)), "threads do not count");
        seen.push((format!("{isa:?}"), one));
    }
    for (at, (what, print)) in seen.iter().enumerate() {
        for (other, same) in &seen[..at] {
            assert_ne!(print, same, "{what} and {other}");
        }
    }
}

/// Weights too large to be hashed whole: small tensors, first and last pages and the files' stamp
/// still count.
#[test]
fn large_weights_are_sampled_and_stamped() {
    let config = config("llama", "");
    let mut weights = invent(&config);
    weights.put("model.embed_tokens.weight", &[500, 64], &vec![0.5; 500 * 64]);
    let print = |change: fn(&mut Memory), stamp: &str, whole_bytes: usize| {
        let mut changed = weights.clone();
        change(&mut changed);
        let model = OpenModel::from_config(&config, Box::new(changed)).unwrap();
        let mut digest = Digest::new("test");
        hash_weights(&mut digest, &model, stamp, whole_bytes);
        digest.finish()
    };
    fn embedding(weights: &mut Memory) -> &mut Vec<u8> {
        &mut weights.0.get_mut("model.embed_tokens.weight").unwrap().2
    }
    let sampled = print(|_| {}, "a", 1000);
    assert_eq!(sampled, print(|_| {}, "a", 1000));
    assert_ne!(sampled, print(|_| {}, "b", 1000), "another stamp");
    assert_ne!(sampled, print(|w| embedding(w)[0] ^= 1, "a", 1000), "the first page");
    assert_ne!(sampled, print(|w| *embedding(w).last_mut().unwrap() ^= 1, "a", 1000), "the last page");
    assert_ne!(sampled, print(|w| w.0.get_mut("model.norm.weight").unwrap().2[9] ^= 1, "a", 1000), "a small tensor");
    assert_ne!(sampled, print(|w| embedding(w).fill(3), "a", 1000), "all of a large one");
    assert_eq!(print(|_| {}, "a", 1 << 20), print(|_| {}, "b", 1 << 20), "whole weights need no stamp");
    assert_ne!(print(|_| {}, "a", 1 << 20), print(|w| embedding(w)[100_000] ^= 1, "a", 1 << 20), "every byte counts");
}

#[test]
fn stamps_name_weight_files_only() {
    let folder = std::env::temp_dir().join(format!("folio-stamp-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write("b.safetensors", "12345");
    write("a.safetensors", "1");
    write("tokenizer.json", "{}");
    let stamp = file_stamp(&folder);
    let names: Vec<&str> = stamp.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names, ["a.safetensors", "b.safetensors"]);
    assert!(stamp.contains("b.safetensors 5 "), "{stamp}");
    assert_eq!(file_stamp(&folder.join("b.safetensors")).lines().count(), 1);
    write("tokenizer.json", "{ }");
    assert_eq!(file_stamp(&folder), stamp);
    write("a.safetensors", "12");
    assert_ne!(file_stamp(&folder), stamp);
    assert_eq!(file_stamp(&folder.join("missing.gguf")), "");
    std::fs::remove_dir_all(&folder).unwrap();
}
