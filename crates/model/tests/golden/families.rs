//! Logits and greedy tokens of every golden file, on every backend.

use std::collections::HashMap;

use folio_device::{
    cpu::{Cpu, CpuConfig, Isa},
    reference::Reference,
};
use folio_model::OpenModel;

use crate::{
    file::{self, Golden},
    run, switch_off,
};

/// Runs a check over all files and reports every failure, not only the first.
pub fn for_all(goldens: &[Golden], check: impl Fn(&Golden) -> Result<f64, String>) {
    let mut failures = Vec::new();
    for golden in goldens {
        match check(golden) {
            Ok(worst) => println!("{:28} differs by {worst:.1e}, may by {:.1e}", golden.name, golden.tolerance()),
            Err(problem) => failures.push(format!("{}: {problem}", golden.name)),
        }
    }
    assert!(failures.is_empty(), "{} of {} fail:\n{}", failures.len(), goldens.len(), failures.join("\n"));
}

#[test]
fn every_family_has_two_models() {
    let goldens = file::all();
    let families = [
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "granite",
        "smollm3",
        "gpt_oss",
    ];
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for golden in &goldens {
        *counts.entry(golden.family()).or_default() += 1;
        assert!(
            golden.scores_std.iter().all(|spread| *spread >= 2.0),
            "{}: attention scores lie too close",
            golden.name
        );
        assert_eq!((golden.prompt.len(), golden.greedy.len()), (64, 64), "{}", golden.name);
    }
    for family in families {
        assert!(counts.get(family).is_some_and(|count| *count >= 2), "{family} has too few golden files");
    }
}

#[test]
fn reference_agrees_with_transformers() {
    for_all(&file::all(), |golden| run::check(golden, &switch_off::open(golden)?, Reference::new));
}

/// A scaling extends a model's own positions beyond those that the configuration states.
#[test]
fn a_scaling_lengthens_a_model_without_being_asked() {
    let golden = file::read("llama-yarn-longer-5");
    let model = OpenModel::from_config(&golden.config.to_string(), Box::new(golden.weights())).expect("it is sound");
    assert_eq!((model.spec.max_context, golden.max_context), (128, 128));
    assert_eq!(golden.config["max_position_embeddings"], 32);
}

/// The check can fail: a wrong entry in any group's table, planted half way, is noticed.
#[test]
fn a_wrong_block_is_noticed() {
    for name in ["llama-mha", "gemma3_text-5", "gpt_oss-floats"] {
        let golden = file::read(name);
        let model = switch_off::open(&golden).expect(name);
        let (before, after) = golden.prompt.split_at(32);
        let groups = model.spec.kv_groups().len();
        for group in 0..groups {
            let mut sequence = run::Sequence::new(Reference::new(), &model, golden.prompt.len(), 32).expect(name);
            let mut logits = sequence.feed(before).expect(name);
            sequence.misplace(group, 1);
            logits.extend(sequence.feed(after).expect(name));
            assert!(run::compare(&golden, &logits).is_err(), "{name}: a wrong block in group {group} goes unnoticed");
        }
    }
}

#[test]
fn cpu_agrees_with_transformers() {
    for isa in Isa::available() {
        println!("{}:", isa.name());
        for_all(&file::all(), |golden| {
            let backend = || Cpu::new(CpuConfig { threads: 1, isa: Some(isa) }).expect("an available instruction set");
            let model = switch_off::open(golden)?;
            let worst = match golden.packed() {
                true => run::check_rounded(golden, &model, backend),
                false => run::check(golden, &model, backend),
            };
            worst.map_err(|problem| format!("{}: {problem}", isa.name()))
        });
    }
}
