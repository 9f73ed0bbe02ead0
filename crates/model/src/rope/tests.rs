//! Expected values: transformers 5.22.2, `ROPE_INIT_FUNCTIONS` on a Llama configuration with 16
//! values per head and `max_position_embeddings` 256.

use super::*;

fn build_from(rope: &str, max_context: Option<usize>) -> Result<RopeSpec> {
    let config = Config::from_json("config.json", &format!(r#"{{"rope_parameters": {rope}}}"#))?;
    let Reach { own, longest } = Reach::of(&config, 256, 1 << 30)?;
    let shape = RopeShape { head_dim: 16, positions: 256, longest, max_context: max_context.unwrap_or(own) };
    shared(&config, 10_000.0, shape)
}

fn check(rope: &str, max_context: Option<usize>, inv_freq: &[f64], magnitude: f64) {
    let spec = build_from(rope, max_context).unwrap();
    assert_eq!(spec.inv_freq.len(), inv_freq.len(), "{rope}");
    for (found, expected) in spec.inv_freq.iter().zip(inv_freq) {
        assert!((f64::from(*found) / expected - 1.0).abs() < 1e-6, "{rope}: {found} for {expected}");
    }
    assert!((f64::from(spec.magnitude) - magnitude).abs() < 1e-6, "{rope}: {} for {magnitude}", spec.magnitude);
}

#[test]
fn every_scaling_matches_transformers() {
    let plain =
        [1.0, 0.316227764, 0.100000001, 0.0316227786, 0.00999999978, 0.00316227786, 0.00100000005, 0.000316227786];
    check("{}", None, &plain, 1.0);
    check(
        r#"{"rope_type": "linear", "factor": 4.0}"#,
        None,
        &[
            0.25,
            0.079056941,
            0.0250000004,
            0.00790569466,
            0.00249999994,
            0.000790569466,
            0.000250000012,
            7.90569466e-05,
        ],
        1.0,
    );
    check(
        r#"{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}"#,
        None,
        &[
            1.0,
            0.079403013,
            0.00470075384,
            0.000911583134,
            0.000176776681,
            3.42810235e-05,
            6.64786967e-06,
            1.28917316e-06,
        ],
        1.0,
    );
    check(
        r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#,
        None,
        &[1.0, 0.237170815, 0.049999997, 0.00790569466, 0.00249999994, 0.000790569466, 0.000250000012, 7.90569466e-05],
        1.138629436111989,
    );
    // Without a length before scaling, it is the configuration's own.
    for original in ["", r#", "original_max_position_embeddings": 256"#] {
        check(
            &format!(r#"{{"rope_type": "yarn", "factor": 4.0{original}}}"#),
            None,
            &[1.0, 0.25693506, 0.0625, 0.0138349654, 0.00249999994, 0.000790569466, 0.000250000012, 7.90569466e-05],
            1.138629436111989,
        );
    }
    check(
        r#"{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 64,
            "truncate": false, "beta_fast": 32.0, "beta_slow": 1.0}"#,
        None,
        &[
            1.0,
            0.0852490962,
            0.00158791477,
            0.000357944577,
            8.0687154e-05,
            1.8188337e-05,
            4.09997847e-06,
            9.24208962e-07,
        ],
        1.3465735902799727,
    );
    check(
        r#"{"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0,
            "mscale_all_dim": 0.8}"#,
        None,
        &[
            1.0,
            0.213453725,
            0.0349999964,
            0.000790569466,
            0.000250000012,
            7.90569466e-05,
            2.49999994e-05,
            7.90569447e-06,
        ],
        1.0569662567531275,
    );
    check(
        r#"{"rope_type": "default", "partial_rotary_factor": 0.5}"#,
        None,
        &[1.0, 0.1, 0.00999999978, 0.00100000005],
        1.0,
    );
}

const LONGROPE: &str = r#"{"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5], "original_max_position_embeddings": 64}"#;

#[test]
fn length_dependent_scalings_follow_the_context_loaded_for() {
    let short =
        [1.0, 0.287479758, 0.0833333358, 0.0243252143, 0.00714285718, 0.00210818532, 0.000624999986, 0.000186016332];
    let long =
        [0.5, 0.126491114, 0.0333333351, 0.00903507881, 0.00249999994, 0.000702728401, 0.000199999995, 5.74959558e-05];
    check(LONGROPE, Some(64), &short, 1.1547005383792517);
    check(LONGROPE, Some(65), &long, 1.1547005383792517);
    check(LONGROPE, None, &long, 1.1547005383792517);

    let dynamic = r#"{"rope_type": "dynamic", "factor": 2.0}"#;
    let plain =
        [1.0, 0.316227764, 0.100000001, 0.0316227786, 0.00999999978, 0.00316227786, 0.00100000005, 0.000316227786];
    let stretched =
        [1.0, 0.239481375, 0.057351321, 0.0137345716, 0.00328917382, 0.00078769587, 0.000188638471, 4.51753949e-05];
    check(dynamic, None, &plain, 1.0);
    check(dynamic, Some(1024), &stretched, 1.0);
}

#[test]
fn a_scaling_reaches_further_than_the_configuration_says() {
    let check = |config: &str, stated: bool, own: usize, longest: usize| {
        let mut parsed = Config::from_json("config.json", config).unwrap();
        if stated {
            parsed = parsed.with_stated_context();
        }
        let found = Reach::of(&parsed, 256, 1 << 30).unwrap();
        assert_eq!((found.own, found.longest), (own, longest), "{config}");
    };
    let rope = |rope: &str| ["rope_scaling", "rope_parameters"].map(|field| format!(r#"{{"{field}": {rope}}}"#));
    for (params, reach) in [
        ("{}", 256),
        (r#"{"rope_type": "linear", "factor": 4}"#, 1024),
        (r#"{"type": "linear", "factor": 2.5}"#, 640),
        (r#"{"rope_type": "yarn", "factor": 4.0}"#, 1024),
        (r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}"#, 2048),
        // The configuration states a long context already.
        (r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#, 256),
        (r#"{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}"#, 256),
        (r#"{"rope_type": "yarn", "original_max_position_embeddings": 64}"#, 256),
        (r#"{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}"#, 256),
        (r#"{"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 64}"#, 256),
        (r#"{"rope_type": "su", "factor": 8.0}"#, 256),
        (r#"{"rope_type": "dynamic", "factor": 8.0}"#, 256),
        (r#"{"rope_type": "yarn", "factor": 1e300}"#, 1 << 30),
    ] {
        for config in rope(params) {
            check(&config, false, reach, reach);
            // A file whose context includes everything permits more, and does not take it by
            // default.
            check(&config, true, 256, reach);
        }
    }
    let nested = r#"{"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": {}}"#;
    check(&rope(nested)[1], false, 512, 512);
    check(
        r#"{"original_max_position_embeddings": 128, "rope_scaling": {"type": "yarn", "factor": 4.0}}"#,
        false,
        512,
        512,
    );
}

#[test]
fn what_cannot_be_expressed_is_refused_by_name() {
    let rows = [
        (r#"{"rope_type": "axial"}"#, "rope_type"),
        (r#"{"rope_type": "linear"}"#, "rope_parameters.factor is missing"),
        (r#"{"rope_type": "linear", "factor": 0}"#, "factor is 0"),
        (r#"{"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}"#, "high_freq_factor"),
        (r#"{"rope_type": "longrope", "long_factor": [1.0], "original_max_position_embeddings": 64}"#, "long_factor"),
        (r#"{"rope_theta": "big"}"#, "rope_theta"),
        (r#"{"rope_theta": -1}"#, "rope_theta"),
        (r#"{"partial_rotary_factor": 0.01}"#, "partial_rotary_factor"),
        (r#"{"partial_rotary_factor": 1e300}"#, "partial_rotary_factor"),
        (r#"{"full_attention": {"rope_type": "default"}}"#, "full_attention"),
    ];
    for (rope, named) in rows {
        let error = build_from(rope, None).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains(named), "{rope}: {error}");
    }
    let error = build_from("{}", Some(257)).unwrap_err().to_string();
    assert!(error.contains("max_position_embeddings is 256, but a context of 257"), "{error}");
}
