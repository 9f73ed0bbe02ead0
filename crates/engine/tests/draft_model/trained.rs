//! The small trained model drafts for the large one, on text outside the training data of both.

use std::{fs, path::PathBuf};

use folio_device::cpu::{Cpu, CpuConfig};
use folio_engine::speculate::DraftModelOptions;
use lzma_rust2::LzmaReader;

use crate::driver::{Driver, Request};

/// Token ids of a text of this project, which is not in the training data.
fn unseen() -> Vec<u32> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/eval.json.lzma");
    let packed = fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let text = LzmaReader::new_mem_limit(packed, 128 << 10, None).expect("packed");
    let text = std::io::read_to_string(std::io::BufReader::new(text)).expect("a whole file");
    let ids = text.split_once("\"ids\"").and_then(|(_, rest)| rest.split_once('[')).expect("ids").1;
    let ids = ids.split_once(']').expect("their end").0;
    ids.split(',').map(|id| id.trim().parse().expect("a token id")).collect()
}

fn pair(options: DraftModelOptions) -> Driver<Cpu> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let [large, small] = ["42m", "7m"]
        .map(|size| folio_model::open(&folder.join(format!("folio-rust-{size}.gguf"))).expect("a model that ships"));
    let cpu = Cpu::new(CpuConfig { threads: 2, isa: None }).expect("a CPU");
    let beside = cpu.beside();
    Driver::new([cpu, beside], [&large, &small], 120, options).expect("a pair")
}

#[test]
fn the_small_model_agrees_with_the_large_one() {
    let text = unseen();
    let answers = |most: usize, options: DraftModelOptions| {
        let mut driver = pair(options);
        let mut all = Vec::new();
        for prompt in text.chunks_exact(text.len() / 6).take(6) {
            let mut request = Request::new(&prompt[..120], most);
            while request.tokens.len() < 120 + 64 {
                request.most = most.min(120 + 64 - request.tokens.len());
                driver.step(&mut [&mut request]);
            }
            request.tokens.truncate(120 + 64);
            all.push(request.tokens);
            driver.free.append(&mut request.table);
        }
        (all, driver.count)
    };
    let (plain, count) = answers(0, DraftModelOptions::default());
    assert_eq!(count.drafted, 0);
    let sure = DraftModelOptions { keeps_above: 0.0, goes_on_above: 0.0, ..DraftModelOptions::default() };
    let mut accepted = Vec::new();
    for (name, options) in [("always five tokens", sure), ("while it is sure", DraftModelOptions::default())] {
        let (drafted, count) = answers(5, options);
        assert_eq!(plain, drafted, "{name}: other tokens than without drafts");
        println!("{name}: {count:?}, {:.2} tokens a step", count.put_out as f64 / count.steps as f64);
        assert!(count.put_out > 2 * count.steps, "{name}: {count:?}");
        accepted.push(count.accepted as f64 / count.drafted as f64);
    }
    assert!(accepted[1] > accepted[0] + 0.1, "it knows when it is sure: {accepted:?}");
}
