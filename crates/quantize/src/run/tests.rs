use std::collections::HashMap;

use folio_testing::Rng;

use super::*;
use crate::testing::{MIXTURE, config, invent, logits, model};

/// The results, in order: decoded weights, and which of them were codes.
#[derive(Default)]
struct Kept {
    names: Vec<String>,
    coded: Vec<String>,
    tensors: HashMap<String, Stored>,
}

impl Sink for Kept {
    fn tensor(&mut self, name: &str, tensor: Finished<'_>) -> Result<()> {
        let stored = match tensor {
            Finished::Quantized(coded) => {
                self.coded.push(name.to_owned());
                let bytes = coded.to_f32().iter().flat_map(|value| value.to_le_bytes()).collect();
                Stored { format: folio_formats::Format::F32, shape: vec![coded.rows, coded.cols], bytes }
            }
            Finished::Plain(Plain { format, shape, bytes }) => Stored { format, shape, bytes: bytes.into_owned() },
        };
        self.names.push(name.to_owned());
        assert!(self.tensors.insert(name.to_owned(), stored).is_none(), "{name} came twice");
        Ok(())
    }
}

fn sequences() -> Vec<Vec<u32>> {
    let mut rng = Rng::new(2);
    (0..40).map(|at| (0..20 + at).map(|_| rng.below(50) as u32).collect()).collect()
}

fn small(target: Target, method: Method) -> Options {
    let calibration = sequences();
    Options { calibration, threads: 2, ..Options::new(target, method) }
}

/// Distance between logits, relative to their size.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let wrong: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    (wrong / expected.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
}

const INT4: Target = Target::Int { bits: 4, group: Some(32), zero_points: false };

#[test]
fn every_tensor_comes_once_and_the_model_still_speaks() {
    for (family, extra) in [("llama", ""), ("phi3", ""), ("gemma2", ""), ("qwen3_moe", MIXTURE)] {
        let config = config(family, extra);
        let base = invent(&config);
        let expected = logits(&model(&config, &base, HashMap::new()));
        let mut far = HashMap::new();
        for method in [Method::Rtn, Method::Gptq, Method::Awq] {
            let mut kept = Kept::default();
            let mut last = -1.0;
            let mut progress = |progress: Progress| {
                assert!((last..=1.0).contains(&progress.done), "{progress:?} after {last}");
                last = progress.done;
            };
            let options = small(INT4, method);
            run(model(&config, &base, HashMap::new()), &options, &mut kept, &mut progress).unwrap();
            assert_eq!(last, 1.0);
            let mut names = kept.names.clone();
            names.sort();
            assert_eq!(names, base.names(), "{family}");
            assert!(kept.coded.iter().all(|name| !name.contains("norm") && !name.contains("mlp.gate.")), "{family}");
            assert!(kept.coded.len() >= 4, "{family}");
            far.insert(method.to_string(), distance(&logits(&model(&config, &base, kept.tensors)), &expected));
        }
        assert!(far["rtn"] < 0.3 && far["gptq"] < far["rtn"] && far["awq"] < 1.2 * far["rtn"], "{family}: {far:?}");
    }
}

#[test]
fn what_is_kept_stays_as_it_is() {
    let config = config("llama", "").replace(r#""tie_word_embeddings": true"#, r#""tie_word_embeddings": false"#);
    let base = invent(&config);
    let run = |keep: &[&str], method| {
        let mut kept = Kept::default();
        let keep = keep.iter().map(|name| name.to_string()).collect();
        let options = Options { keep, ..small(INT4, method) };
        super::run(model(&config, &base, HashMap::new()), &options, &mut kept, &mut |_| {}).unwrap();
        kept
    };
    let kept = run(&["lm_head", "down_proj"], Method::Gptq);
    for name in ["lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"] {
        assert!(!kept.coded.contains(&name.to_owned()), "{name}");
        assert_eq!(kept.tensors[name].bytes, base.tensor(name).unwrap().bytes, "{name}");
    }
    let all = run(&[], Method::Gptq);
    assert!(all.coded.contains(&"lm_head.weight".to_owned()));
    assert_eq!(all.names.last().unwrap(), "lm_head.weight");
}

#[test]
fn outliers_are_found_by_calibration() {
    let config = config("llama", "");
    let base = invent(&config);
    let name = "model.layers.0.input_layernorm.weight";
    let mut norm = base.tensor(name).unwrap().to_f32().unwrap();
    norm[5] = 100.0;
    let bytes = norm.iter().flat_map(|value| value.to_le_bytes()).collect();
    let stored = Stored { format: folio_formats::Format::F32, shape: vec![64], bytes };
    let model = model(&config, &base, HashMap::from([(name.to_owned(), stored)]));
    struct Columns(Vec<u32>);
    impl Sink for Columns {
        fn tensor(&mut self, name: &str, tensor: Finished<'_>) -> Result<()> {
            if let (Finished::Quantized(coded), true) = (tensor, name.contains("q_proj")) {
                self.0 = coded.outliers.as_ref().expect("one column is large").columns.clone();
            }
            Ok(())
        }
    }
    let mut found = Columns(Vec::new());
    let options = Options { outlier_threshold: 20.0, ..small(Target::LlmInt8, Method::Rtn) };
    run(model, &options, &mut found, &mut |_| {}).unwrap();
    assert_eq!(found.0, [5]);
}

#[test]
fn what_cannot_be_done_is_said() {
    let config = config("llama", "");
    let base = invent(&config);
    let refused = |options: &Options| {
        let model = model(&config, &base, HashMap::new());
        run(model, options, &mut Kept::default(), &mut |_| {}).unwrap_err().to_string()
    };
    let none = |target, method| Options::new(target, method);
    assert!(refused(&none(INT4, Method::Gptq)).starts_with("gptq needs text"));
    assert!(refused(&none(Target::LlmInt8, Method::Rtn)).starts_with("llm-int8 needs text"));
    assert!(refused(&small(Target::LlmInt8, Method::Awq)).starts_with("llm-int8 by awq cannot"));
    let wide = Target::Int { bits: 4, group: Some(128), zero_points: false };
    assert!(refused(&none(wide, Method::Rtn)).contains("groups of 128 values, but model.layers.0."));
    let with = |sequence: Vec<u32>| Options { calibration: vec![vec![1], sequence], ..none(INT4, Method::Gptq) };
    assert_eq!(refused(&with(vec![])), "calibration sequence 1 is empty");
    assert!(refused(&with(vec![50])).contains("token 50"));
    assert!(refused(&with(vec![1; 65])).contains("65 tokens"));
}
