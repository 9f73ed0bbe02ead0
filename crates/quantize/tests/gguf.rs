//! Folders and GGUF files written as GGUF: Folio reads back the same model, up to the format's
//! rounding.

mod common;

use std::path::Path;

use common::*;
use folio_formats::gguf::Gguf;
use folio_formats::{Format, WeightSource};
use folio_quantize::write::{GgufJob, Mix, write_gguf};
use folio_testing::Folder;

fn write(source: &Path, out: &Path, mix: Mix, keep: &[&str]) -> folio_quantize::Result<Gguf> {
    let keep: Vec<String> = keep.iter().map(|name| (*name).to_owned()).collect();
    let job = GgufJob { source, out, mix, keep: &keep, threads: 2 };
    let mut last = 0.0;
    let written = write_gguf(&job, &mut |progress| {
        assert!(progress.done >= last && progress.done <= 1.0);
        last = progress.done;
    })?;
    assert_eq!(last, 1.0);
    let gguf = Gguf::open(out)?;
    assert_eq!(written.num_tensors, gguf.names().len());
    Ok(gguf)
}

/// The relative error of all values of a tensor.
fn error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let off: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (off / a.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>()).sqrt()
}

#[test]
fn a_llama_folder_becomes_the_same_model() {
    let scratch = Folder::new("quantize-gguf-llama");
    model_folder(&scratch.join("model"), false);
    let gguf = write(&scratch.join("model"), &scratch.join("out.gguf"), Mix::Q8, &[]).unwrap();
    assert_eq!(gguf.str("general.architecture").unwrap(), "llama");
    assert_eq!(gguf.u32("general.file_type").unwrap(), 7);
    assert_eq!(gguf.metadata().strings("tokenizer.ggml.tokens").unwrap().len(), VOCAB);
    assert_eq!(gguf.u32("tokenizer.ggml.eos_token_id").unwrap(), 1);
    let here = folio_model::open(&scratch.join("model")).unwrap();
    let there = folio_model::open(&scratch.join("out.gguf")).unwrap();
    assert_eq!(here.spec, there.spec);
    // Rows of the first head alternate between its halves.
    let source = here.weights.require("model.layers.1.self_attn.q_proj.weight").unwrap().to_f32().unwrap();
    let turned = gguf.require("blk.1.attn_q.weight").unwrap().to_f32().unwrap();
    let row = |of: &[f32], at: usize| of[at * HIDDEN..(at + 1) * HIDDEN].to_vec();
    for (at, from) in [(0, 0), (1, 32), (2, 1), (63, 63), (64, 64), (65, 96)] {
        assert!(error(&row(&source, from), &row(&turned, at)) < 0.01, "row {at}");
    }
    let down = here.weights.require("model.layers.0.mlp.down_proj.weight").unwrap().to_f32().unwrap();
    assert!(error(&down, &gguf.require("blk.0.ffn_down.weight").unwrap().to_f32().unwrap()) < 0.01);
    let norm = gguf.require("blk.0.attn_norm.weight").unwrap();
    assert_eq!(norm.format, Format::F32);
}

#[test]
fn experts_are_stacked_in_order() {
    let scratch = Folder::new("quantize-gguf-moe");
    model_folder(&scratch.join("model"), true);
    let gguf = write(&scratch.join("model"), &scratch.join("out.gguf"), Mix::Q4KM, &[]).unwrap();
    assert_eq!(gguf.str("general.architecture").unwrap(), "qwen3moe");
    let here = folio_model::open(&scratch.join("model")).unwrap();
    assert_eq!(here.spec, folio_model::open(&scratch.join("out.gguf")).unwrap().spec);
    let stack = gguf.require("blk.1.ffn_up_exps.weight").unwrap();
    assert_eq!((stack.format, stack.shape.as_slice()), (Format::Q4_K, [EXPERTS, INTER, HIDDEN].as_slice()));
    let values = stack.to_f32().unwrap();
    for (expert, values) in values.chunks(INTER * HIDDEN).enumerate() {
        let name = format!("model.layers.1.mlp.experts.{expert}.up_proj.weight");
        let off = error(&here.weights.require(&name).unwrap().to_f32().unwrap(), values);
        assert!(off > 0.01 && off < 0.1, "{name}: {off}");
    }
    assert_eq!(gguf.require("blk.0.ffn_gate_inp.weight").unwrap().format, Format::F32);
    // Rows of 384 are not whole blocks of 256.
    assert_eq!(gguf.require("blk.0.ffn_down_exps.weight").unwrap().format, Format::Q5_0);
    assert_eq!(gguf.require("token_embd.weight").unwrap().format, Format::Q6_K);
}

#[test]
fn a_file_is_written_again_and_kept_tensors_stay() {
    let scratch = Folder::new("quantize-gguf-again");
    model_folder(&scratch.join("model"), false);
    let kept = ["mlp", "attn", "embed"];
    let plain = write(&scratch.join("model"), &scratch.join("plain.gguf"), Mix::Q8, &kept).unwrap();
    assert_eq!(plain.require("blk.0.attn_q.weight").unwrap().format, Format::BF16);
    let again = write(&scratch.join("plain.gguf"), &scratch.join("again.gguf"), Mix::Q4KM, &["ffn_up"]).unwrap();
    assert_eq!(again.u32("general.file_type").unwrap(), 15);
    assert_eq!(again.require("blk.0.attn_q.weight").unwrap().format, Format::Q4_K);
    assert_eq!(again.require("blk.0.ffn_up.weight").unwrap().format, Format::BF16);
    assert_eq!(again.names(), plain.names());
    assert_eq!(again.str("tokenizer.chat_template").unwrap(), "{{ messages[0]['content'] }}");
    let twice = write(&scratch.join("again.gguf"), &scratch.join("twice.gguf"), Mix::Q8, &[]).unwrap_err();
    assert!(twice.to_string().contains("full precision"), "{twice}");
    assert!(!scratch.join("twice.gguf").exists());
}

#[test]
fn what_gguf_cannot_say_is_refused() {
    let scratch = Folder::new("quantize-gguf-refused");
    let check = |file: &str, change: fn(&mut serde_json::Value), expect: &str| {
        let folder = scratch.join("model");
        model_folder(&folder, false);
        let path = folder.join(file);
        let mut value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        change(&mut value);
        std::fs::write(&path, value.to_string()).unwrap();
        let error = write(&folder, &scratch.join("out.gguf"), Mix::Q8, &[]).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    check("config.json", |config| config["model_type"] = "phi3".into(), "phi3");
    let dynamic = |config: &mut serde_json::Value| {
        config["rope_scaling"] = serde_json::json!({"rope_type": "dynamic", "factor": 2.0});
    };
    check("config.json", dynamic, "dynamic");
    check("tokenizer.json", |t| t["model"]["type"] = "Unigram".into(), "byte-level BPE");
    check("tokenizer.json", |t| t["pre_tokenizer"]["type"] = "Metaspace".into(), "Metaspace");
}
