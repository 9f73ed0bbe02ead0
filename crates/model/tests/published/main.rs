//! The configurations of published models, unchanged (nulls, unknown fields and missing ones
//! included): each must give the numbers that transformers gives. `facts.py` made the expectations.

use folio_model::families::Family;
use folio_model::{Config, FfnSpec, ModelSpec, NormPlacement};
use serde_json::Value;

fn read(text: &str) -> serde_json::Map<String, Value> {
    serde_json::from_str(text).unwrap()
}

fn spec(name: &str) -> ModelSpec {
    let configs = read(include_str!("configs.json"));
    let config = Config::from_json("config.json", &configs[name].to_string()).unwrap();
    Family::of(&config).unwrap().spec(&config).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn numbers_are_those_of_transformers() {
    let facts = read(include_str!("facts.json"));
    let configs = read(include_str!("configs.json"));
    assert_eq!(facts.len(), configs.len() + 1, "facts.py was not run since configs.json changed");
    for name in configs.keys() {
        let (spec, facts) = (spec(name), &facts[name]);
        let number = |field: &str| facts[field].as_f64().unwrap();
        let check = |field: &str, found: usize| assert_eq!(found as f64, number(field), "{name}: {field}");
        check("hidden", spec.hidden);
        check("context", spec.max_context);
        check("vocab", spec.vocab_size);
        assert_eq!(spec.norm_eps, number("eps") as f32, "{name}: eps");
        assert_eq!(spec.tied_head, facts["tied"].as_bool().unwrap(), "{name}: tied");
        for layer in &spec.layers {
            check("heads", layer.attention.heads);
            check("kv_heads", layer.attention.kv_heads);
            check("head_dim", layer.attention.head_dim);
        }
        let windows: Vec<_> = spec.layers.iter().map(|layer| layer.attention.window.unwrap_or(0)).collect();
        assert_eq!(serde_json::json!(windows), facts["windows"], "{name}: windows");
        check_ropes(name, &spec, facts["ropes"].as_array().unwrap());
    }
}

fn check_ropes(name: &str, spec: &ModelSpec, expected: &[Value]) {
    assert_eq!(spec.ropes.len(), expected.len(), "{name}: position encodings");
    for (rope, expected) in spec.ropes.iter().zip(expected) {
        let ends = [rope.inv_freq[0], rope.inv_freq[rope.inv_freq.len() - 1], rope.magnitude];
        assert_eq!(rope.inv_freq.len() as u64, expected[0].as_u64().unwrap(), "{name}: rotated pairs");
        for (at, found) in ends.into_iter().enumerate() {
            let expected = expected[at + 1].as_f64().unwrap();
            assert!((f64::from(found) / expected - 1.0).abs() < 1e-5, "{name}: {found} for {expected}");
        }
    }
}

/// Features of a configuration that are not numbers in `facts.py`.
#[test]
fn features_are_those_of_the_family() {
    let first = |name: &str| spec(name).layers[0].clone();
    let scale = |name: &str| first(name).attention.scale;
    assert_eq!(scale("Llama-2-7b-hf"), 128f32.powf(-0.5));
    assert_eq!(scale("gemma-2-27b"), 144f32.powf(-0.5));
    assert_eq!(scale("gemma-3-27b-it"), 168f32.powf(-0.5));
    assert_eq!(scale("granite-3.1-2b-instruct"), 0.015625);
    assert!(first("Qwen2.5-0.5B").attention.qkv_bias && !first("Qwen2.5-0.5B").attention.output_bias);
    assert!(!first("Qwen3-0.6B").attention.qkv_bias && first("Qwen3-0.6B").attention.qk_norm.is_some());
    assert_eq!(first("gemma-2-2b").attention.soft_cap, Some(50.0));
    assert_eq!(first("OLMo-2-1124-7B").norms, NormPlacement::POST);
    assert_eq!(first("gemma-3-4b-it").norms, NormPlacement::FOUR);
    assert!(first("gpt-oss-20b").attention.sinks && first("gpt-oss-20b").attention.output_bias);
    let granite = spec("granite-3.1-2b-instruct");
    assert_eq!((granite.embed_scale, granite.logit_scale, granite.layers[7].residual_scale), (12.0, 0.125, 0.22));
    let positions = spec("SmolLM3-3B").layers.iter().map(|layer| layer.attention.rope.is_some()).collect::<Vec<_>>();
    assert_eq!(positions, [true, true, true, false].repeat(9));
    for (name, expected) in [
        ("Mixtral-8x7B-v0.1", (8, 2, 14336, true)),
        ("Qwen3-30B-A3B", (128, 8, 768, true)),
        ("gpt-oss-20b", (32, 4, 2880, false)),
    ] {
        for layer in spec(name).layers {
            let FfnSpec::Experts(experts) = layer.ffn else { panic!("{name} has experts in every layer") };
            assert_eq!((experts.experts, experts.top_k, experts.inter, experts.normalize), expected, "{name}");
        }
    }
}

/// The sizes in these models' names.
#[test]
fn parameters_are_those_of_the_name() {
    for (name, billions, active) in [
        ("Llama-2-7b-hf", 6.738, 6.738),
        ("Llama-3.2-1B", 1.236, 1.236),
        ("Mixtral-8x7B-v0.1", 46.703, 12.880),
        ("Qwen2.5-0.5B", 0.494, 0.494),
        ("Qwen3-30B-A3B", 30.532, 3.353),
        ("gemma-2-2b", 2.614, 2.614),
        ("gemma-3-1b-it", 1.000, 1.000),
        ("Phi-4-mini-instruct", 3.836, 3.836),
        ("SmolLM3-3B", 3.075, 3.075),
        ("gpt-oss-20b", 20.915, 4.188),
    ] {
        let found = folio_model::parameters(&spec(name));
        let close = |found: u64, expected: f64| (found as f64 / 1e9 - expected).abs() < 0.001;
        assert!(close(found.total, billions) && close(found.active, active), "{name}: {found:?}");
    }
}
