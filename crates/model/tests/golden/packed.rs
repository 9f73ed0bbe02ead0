//! Checkpoints that other tools quantized, whole: the reference backend against transformers on the dequantized weights,
//! and the fast one against the reference.
//!
//! Small ones are made from nothing, by the rules in `tests/golden/quantized/seeded`. Those that llm-compressor itself made
//! of random and of trained models are too large to keep: `tests/golden/quantized/folders.py` makes them anew, with what to
//! expect, and without it their test says that it skips.

use std::{fs, path::PathBuf};

use folio_device::{
    Backend,
    cpu::{Cpu, CpuConfig, Isa},
    reference::Reference,
};
use folio_formats::safetensors::{SHARD_BYTES, Writer};
use folio_model::{Config, OpenModel};
use serde_json::{Value, json};

use crate::{
    families::for_all,
    file::{self, Golden},
    run,
};

fn goldens() -> Vec<Golden> {
    file::all_in(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/quantized/seeded"))
}

fn open(golden: &Golden) -> Result<OpenModel, String> {
    let config = Config::from_json("config.json", &golden.config.to_string()).map_err(|e| e.to_string())?;
    OpenModel::from_parsed(&config, Box::new(golden.weights())).map_err(|e| e.to_string())
}

#[test]
fn reference_agrees_with_dequantized_models() {
    let goldens = goldens();
    assert!(goldens.len() >= 13, "{} golden files", goldens.len());
    for_all(&goldens, |golden| within(run::check(golden, &open(golden)?, Reference::new)?));
}

/// Logits of the reference may differ by this much, whatever their size.
const TOLERANCE: f64 = 1e-4;

fn within(worst: f64) -> Result<f64, String> {
    if worst <= TOLERANCE { Ok(worst) } else { Err(format!("logits differ by {worst:.1e}")) }
}

/// ModelOpt describes its quantization beside config.json, too; older versions there alone.
#[test]
fn a_description_beside_the_configuration_is_read() {
    let golden = goldens().into_iter().find(|golden| golden.name == "llama-modelopt-nvfp4").expect("a golden file");
    let folder = std::env::temp_dir().join(format!("folio-modelopt-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let mut writer = Writer::create(&folder, SHARD_BYTES).expect("a writer");
    for (name, tensor) in golden.weights().iter() {
        writer.tensor(name, tensor.format.name(), &tensor.shape, &tensor.bytes).expect("a tensor");
    }
    writer.finish().expect("a file");
    let mut config = golden.config.clone();
    let mut quantization = config.as_object_mut().expect("an object").remove("quantization_config").expect("a field");
    fs::write(folder.join("config.json"), config.to_string()).expect("a configuration");
    let beside = |quantization: &Value| {
        let text = json!({"producer": {"name": "modelopt"}, "quantization": quantization}).to_string();
        fs::write(folder.join("hf_quant_config.json"), text).expect("a file");
        let model = folio_model::open(&folder).map_err(|e| e.to_string())?;
        run::compare(&golden, &logits(Reference::new(), &model, &golden.prompt)?)
    };
    assert!(beside(&quantization).and_then(within).is_ok(), "{:?}", beside(&quantization));
    quantization["quant_algo"] = json!("W9A9");
    assert!(beside(&quantization).unwrap_err().contains("is \"W9A9\", but only FP8"), "{:?}", beside(&quantization));
    // A quantized KV cache alone changes no weight, and then these are no weights.
    quantization["quant_algo"] = json!(null);
    assert!(beside(&quantization).unwrap_err().contains("has shape [128, 64]"), "{:?}", beside(&quantization));
    let _ = fs::remove_dir_all(folder);
}

/// The check can fail: one code of one layer shows.
#[test]
fn a_changed_code_is_noticed() {
    for golden in goldens() {
        let mut weights = golden.weights();
        let packed = |name: &str| {
            name.ends_with("layers.0.self_attn.v_proj.weight_packed")
                || name.ends_with("layers.0.self_attn.v_proj.weight")
        };
        let name = weights.iter().map(|(name, _)| name.to_owned()).find(|name| packed(name)).expect(&golden.name);
        weights.change(&name, |bytes| bytes.iter_mut().take(64).for_each(|byte| *byte ^= 0x08));
        let config = Config::from_json("config.json", &golden.config.to_string()).expect("a configuration");
        let model = OpenModel::from_parsed(&config, Box::new(weights)).expect("a model");
        let rows = golden.prompt.len();
        let logits =
            run::Sequence::new(Reference::new(), &model, rows, rows).and_then(|mut s| s.prompt(&golden.prompt, rows));
        assert!(
            run::compare(&golden, &logits.expect("logits")).is_err(),
            "{}: a changed code goes unnoticed",
            golden.name
        );
    }
}

/// How far the fast path's rounding moves the distributions: mean and 99th percentile over positions, in nats.
struct Divergence {
    mean: f64,
    worst_percent: f64,
}

fn divergence(exact: &[Vec<f32>], fast: &[Vec<f32>]) -> Divergence {
    let kl = |exact: &[f32], fast: &[f32]| {
        let (a, b) = (run::log_sum_exp(exact), run::log_sum_exp(fast));
        let term = |(p, q): (&f32, &f32)| {
            let (p, q) = (f64::from(*p) - a, f64::from(*q) - b);
            p.exp() * (p - q)
        };
        exact.iter().zip(fast).map(term).sum::<f64>()
    };
    let mut all: Vec<f64> = exact.iter().zip(fast).map(|(exact, fast)| kl(exact, fast)).collect();
    all.sort_by(f64::total_cmp);
    let at = (all.len() * 99).div_ceil(100).saturating_sub(1);
    Divergence { mean: all.iter().sum::<f64>() / all.len() as f64, worst_percent: all[at] }
}

fn logits<B: Backend>(backend: B, model: &OpenModel, prompt: &[u32]) -> Result<Vec<Vec<f32>>, String> {
    run::Sequence::new(backend, model, prompt.len(), prompt.len())?.prompt(prompt, prompt.len())
}

/// The mean may be this much on models as they are trained, and at the start of training.
const MEAN_DIVERGENCE: f64 = 1e-3;
/// The small models here are made to be sensitive: attention that is nearly a choice of one token, and logits far apart.
/// Rounding activations to bf16 alone moves them by 2e-3, and experts near a tie are chosen anew.
const MEAN_DIVERGENCE_SENSITIVE: f64 = 6e-2;

fn check_fast_path(golden: &Golden, model: &OpenModel, mean: f64) -> Result<(), String> {
    let exact = logits(Reference::new(), model, &golden.prompt)?;
    for isa in Isa::available() {
        let backend = Cpu::new(CpuConfig { threads: 1, isa: Some(isa) }).map_err(|e| e.to_string())?;
        let found = divergence(&exact, &logits(backend, model, &golden.prompt)?);
        let (name, isa) = (&golden.name, isa.name());
        println!("{name:28} {isa:8} KL mean {:.1e}, 99th percentile {:.1e}", found.mean, found.worst_percent);
        // What is not a number is not small.
        let small = found.mean <= mean;
        if !small {
            return Err(format!("{isa}: mean KL {:.2e} to the reference", found.mean));
        }
    }
    Ok(())
}

#[test]
fn fast_path_stays_near_the_reference() {
    for_all(&goldens(), |golden| check_fast_path(golden, &open(golden)?, MEAN_DIVERGENCE_SENSITIVE).map(|()| 0.0));
}

#[test]
fn folders_of_llm_compressor_agree() {
    let place = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/quantized");
    let Ok(entries) = fs::read_dir(&place) else {
        let made = "tests/golden/quantized/folders.py makes them from the trained models";
        return folio_testing::skip!(Shared, "no folders in target/quantized; {made}");
    };
    let mut folders: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.sort();
    for folder in folders {
        let text = fs::read_to_string(folder.join("expected.json")).expect("expected.json");
        let mut golden: Golden = serde_json::from_str(&text).expect("expected.json");
        golden.name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        let model = folio_model::open(&folder).unwrap_or_else(|e| panic!("{}: {e}", golden.name));
        let exact = logits(Reference::new(), &model, &golden.prompt).expect("logits");
        let worst = run::compare(&golden, &exact).and_then(within).unwrap_or_else(|e| panic!("{}: {e}", golden.name));
        println!("{:28} differs by {worst:.1e}, may by {TOLERANCE:.1e}", golden.name);
        check_fast_path(&golden, &model, MEAN_DIVERGENCE).unwrap_or_else(|e| panic!("{}: {e}", golden.name));
    }
}
