//! Steps of few rows: products that norm their inputs and add their outputs to the residual stream
//! compute the bits of their parts, in every order of norms that a layer may have.

use super::*;

const FUSED: [&str; 3] = ["norm_linear", "norm_linear_gated", "linear_add"];

/// A prompt of five rows, then steps of one and of two rows, on a reference that fuses up to two
/// rows and on one that fuses none.
#[test]
fn fused_products_compute_the_bits_of_their_parts() {
    let experts = r#", "num_experts": 4, "num_experts_per_tok": 2"#;
    let cases: [(&str, &str, &[&str]); 4] = [
        ("llama", "", &FUSED),
        ("gemma3_text", "", &["norm_linear", "norm_linear_gated"]),
        ("qwen3_moe", experts, &["norm_linear", "linear_add"]),
        // Norms stand behind the branches alone: there is nothing to fuse.
        ("olmo2", "", &[]),
    ];
    for (model_type, extra, expected) in cases {
        let config = config(model_type, extra);
        let weights = invent(&config);
        let mut plain = try_load(Reference::new(), &config, &weights).unwrap();
        let recording = Recording::new(Reference::with_fused_rows(2));
        let log = recording.log();
        let mut fused = try_load(recording, &config, &weights).unwrap();
        let groups = plain.spec().kv_groups().len();
        for (first, rows) in [(0, 5), (5, 1), (6, 2), (8, 1), (9, 3)] {
            let step = batch(&TOKENS[first..first + rows], first, groups);
            let found = logits(&mut fused, &step);
            assert!(found == logits(&mut plain, &step), "{model_type}: {rows} rows at {first}");
            let log = log.take();
            let seen = FUSED.into_iter().filter(|name| log.iter().any(|op| op.name == *name));
            let expected = if rows <= 2 { expected } else { &[] };
            assert_eq!(seen.collect::<Vec<_>>(), expected, "{model_type}: {rows} rows");
        }
    }
}
