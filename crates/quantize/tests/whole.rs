//! From a folder to a quantized folder that loads: every format, every method, dense and with
//! experts.

mod common;

use std::path::Path;

use common::*;
use folio_device::KvFormat;
use folio_device::cpu::{Cpu, CpuConfig};
use folio_model::{Decoder, DecoderLimits};
use folio_quantize::write::FolderWriter;
use folio_quantize::{Method, Options, Target};
use folio_testing::Folder;

fn quantize(source: &Path, out: &Path, target: Target, method: Method) {
    let mut options = Options::new(target, method);
    options.threads = 2;
    let token = |at: usize| (at * 29 % VOCAB) as u32;
    options.calibration = (0..4).map(|text| (0..32).map(|at| token(text * 32 + at)).collect()).collect();
    let mut writer = FolderWriter::create(source, out, &options, false).unwrap();
    let mut last = 0.0;
    let model = folio_model::open(source).unwrap();
    folio_quantize::run(model, &options, &mut writer, &mut |progress| {
        assert!((last..=1.0).contains(&progress.done), "{} after {last}", progress.done);
        last = progress.done;
    })
    .unwrap_or_else(|error| panic!("{target} by {method}: {error}"));
    let written = writer.finish().unwrap();
    assert!(written.num_quantized >= 7 * LAYERS, "{target} by {method}: {}", written.num_quantized);
}

/// Bytes of weights once loaded.
fn loaded(folder: &Path) -> u64 {
    let model = folio_model::open(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let blocks = vec![4; model.spec.kv_groups().len()];
    let kv_format = KvFormat::BF16;
    let limits = DecoderLimits { rows: 8, spans: 2, outputs: 2, table_entries: 8, blocks, kv_format };
    let cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).unwrap();
    let decoder = Decoder::load(cpu, &model, limits, &mut |_| {});
    decoder.unwrap_or_else(|error| panic!("{}: {error}", folder.display())).memory().weights
}

#[test]
fn every_format_becomes_a_model_that_loads() {
    let scratch = Folder::new("quantize-whole");
    for moe in [false, true] {
        let source = scratch.join(if moe { "moe" } else { "dense" });
        model_folder(&source, moe);
        let plain = loaded(&source);
        let mut jobs: Vec<(Target, Method)> = Vec::new();
        for name in ["int8", "int8-channel", "int4-g32", "fp8", "fp8-block", "mxfp4", "nvfp4", "nf4", "llm-int8"] {
            jobs.push((name.parse().unwrap(), Method::Rtn));
        }
        jobs.push(("int4-g128".parse().unwrap(), Method::Gptq));
        jobs.push((Target::Int { bits: 4, group: Some(128), zero_points: true }, Method::Awq));
        for (target, method) in jobs {
            let out = scratch.join(format!("{target}-{method}-{moe}"));
            quantize(&source, &out, target, method);
            let bytes = loaded(&out);
            assert!(bytes < plain, "{target} by {method}: {bytes} bytes for {plain}");
        }
    }
}
