//! Written folders, read back by Folio: every linear equals its decoded codes, and all other
//! tensors are unchanged.

mod common;

use std::borrow::Cow;
use std::path::Path;

use common::*;
use folio_formats::{Safetensors, WeightSource};
use folio_quantize::write::FolderWriter;
use folio_quantize::{Finished, Method, Options, Plain, Quantized, Result, Sink, Target, rtn};
use folio_testing::Folder;

const TARGETS: [&str; 10] =
    ["int8", "int8-channel", "int4-g128", "int4-g32", "fp8", "fp8-block", "mxfp4", "nvfp4", "nf4", "llm-int8"];

fn coded(target: Target, values: Vec<f32>, cols: usize) -> Quantized {
    match target {
        Target::LlmInt8 => rtn::quantize_around(target, values, cols, vec![3, 70], 1),
        _ => rtn::quantize(target, &values, cols, 1),
    }
}

/// Passes every tensor on, linears quantized; returns their codes.
fn write(source: &Path, out: &Path, target: Target) -> Result<Vec<(String, Quantized)>> {
    let options = Options::new(target, Method::Rtn);
    let mut writer = FolderWriter::create(source, out, &options, false)?;
    let weights = Safetensors::open(source)?;
    let mut all = Vec::new();
    for name in weights.names() {
        let view = weights.require(name)?;
        if name.ends_with("_proj.weight") {
            let q = coded(target, view.to_f32()?, view.shape[1]);
            writer.tensor(name, Finished::Quantized(&q))?;
            all.push((name.to_owned(), q));
        } else if name != "model.norm.weight" {
            // The last norm is left to the writer, like a tensor that no run uses.
            let plain = Plain { format: view.format, shape: view.shape.clone(), bytes: Cow::Borrowed(view.bytes) };
            writer.tensor(name, Finished::Plain(plain))?;
        }
    }
    assert!(!out.exists(), "half a folder bears another name");
    let written = writer.finish()?;
    assert_eq!(written.num_quantized, all.len());
    Ok(all)
}

#[test]
fn folio_reads_what_was_written() {
    let scratch = Folder::new("quantize-folder");
    let mut targets: Vec<Target> = TARGETS.iter().map(|name| name.parse().unwrap()).collect();
    targets.push(Target::Int { bits: 4, group: Some(128), zero_points: true });
    for moe in [false, true] {
        let source = scratch.join(if moe { "moe" } else { "dense" });
        model_folder(&source, moe);
        let plain = Safetensors::open(&source).unwrap();
        for target in &targets {
            let out = scratch.join(format!("{target}-{moe}"));
            let linears = write(&source, &out, *target).unwrap();
            let model = folio_model::open(&out).unwrap_or_else(|error| panic!("{target}: {error}"));
            let packing = model.packing.as_deref().expect("a quantized model");
            for (name, q) in &linears {
                let stem = name.strip_suffix(".weight").unwrap();
                assert!(packing.holds(&*model.weights, stem), "{target}: {stem}");
                let packed = packing.matrix(&*model.weights, stem, q.rows, q.cols);
                let packed = packed.unwrap_or_else(|error| panic!("{target}: {stem}: {error}"));
                let (mut found, mut expected) = (vec![0.0; q.cols], vec![0.0; q.cols]);
                for row in [0, 1, q.rows - 1] {
                    packed.matrix.read_row(row, &mut found);
                    q.read_row(row, &mut expected);
                    let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(off < 1e-6, "{target}: row {row} of {stem} is off by {off}");
                }
            }
            for name in ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"] {
                assert_eq!(model.weights.require(name).unwrap().bytes, plain.require(name).unwrap().bytes);
            }
            for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
                assert_eq!(std::fs::read(out.join(file)).unwrap(), std::fs::read(source.join(file)).unwrap());
            }
        }
    }
}

#[test]
fn nothing_is_left_of_a_run_that_failed() {
    let scratch = Folder::new("quantize-folder-failed");
    model_folder(&scratch.join("model"), false);
    let options = Options::new("fp8".parse().unwrap(), Method::Rtn);
    let out = scratch.join("out");
    drop(FolderWriter::create(&scratch.join("model"), &out, &options, false).unwrap());
    assert!(!out.exists() && !scratch.join("out.part").exists());
    std::fs::create_dir(&out).unwrap();
    let error = FolderWriter::create(&scratch.join("model"), &out, &options, false).unwrap_err();
    assert!(error.to_string().contains("is there already"), "{error}");
    std::fs::remove_dir(&out).unwrap();
    write(&scratch.join("model"), &out, options.target).unwrap();
    let again = FolderWriter::create(&out, &scratch.join("again"), &options, false).unwrap_err();
    assert!(again.to_string().contains("quantized already"), "{again}");
}
