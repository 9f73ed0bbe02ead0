//! The gain from calibration, on a trained model if there is one and on text that it never saw:
//! these sources.

use std::path::{Path, PathBuf};

use folio_device::cpu::{Cpu, CpuConfig};
use folio_device::{BLOCK_TOKENS, Batch, GroupTables, KvFormat, Span};
use folio_model::{Decoder, DecoderLimits, OpenModel};
use folio_quantize::{Finished, Method, Options, Plain, Result, Sink, Target, run};
use folio_testing::{Tensor, Weights};
use folio_text::Tokenizer;

const WINDOW: usize = 512;

/// A model in memory, codes decoded.
#[derive(Default)]
struct Memory(Weights);

impl Sink for Memory {
    fn tensor(&mut self, name: &str, tensor: Finished<'_>) -> Result<()> {
        self.0.put(
            name,
            match tensor {
                Finished::Quantized(coded) => Tensor::f32(&[coded.rows, coded.cols], coded.to_f32()),
                Finished::Plain(Plain { format, shape, bytes }) => Tensor { format, shape, bytes: bytes.into_owned() },
            },
        );
        Ok(())
    }
}

/// Rust files under `folder`, in order of their names.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// One window of tokens from each file that is long enough.
fn windows(tokenizer: &Tokenizer, crates: &[&str], count: usize) -> Vec<Vec<u32>> {
    let mut files = Vec::new();
    for name in crates {
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src"), &mut files);
    }
    let read = |path: &PathBuf| tokenizer.encode(&std::fs::read_to_string(path).unwrap(), false).unwrap();
    let long = files.iter().map(read).filter(|tokens| tokens.len() >= WINDOW);
    long.map(|tokens| tokens[..WINDOW].to_vec()).take(count).collect()
}

/// Loss in nats per token.
fn loss(model: &OpenModel, windows: &[Vec<u32>]) -> f64 {
    let (groups, blocks, len) = (model.spec.kv_groups().len(), WINDOW.div_ceil(BLOCK_TOKENS), WINDOW as u32);
    let limits = DecoderLimits {
        rows: WINDOW,
        spans: 1,
        outputs: WINDOW,
        table_entries: blocks,
        blocks: vec![blocks; groups],
        kv_format: KvFormat::F32,
    };
    let backend = Cpu::new(CpuConfig { threads: 2, isa: None }).unwrap();
    let mut decoder = Decoder::load(backend, model, limits, &mut |_| {}).unwrap();
    let group = GroupTables { slots: (0..len).collect(), blocks: (0..blocks as u32).collect(), first_block: vec![0] };
    let (mut sum, mut count, mut logits) = (0.0, 0, Vec::new());
    for tokens in windows {
        let step = Batch {
            tokens: tokens.clone(),
            positions: (0..len).collect(),
            spans: vec![Span { first_row: 0, num_rows: len, context: len }],
            ancestors: Vec::new(),
            groups: vec![group.clone(); groups],
            outputs: (0..len - 1).collect(),
        };
        decoder.forward(&step).unwrap();
        decoder.logits(&mut logits);
        for (row, next) in logits.chunks_exact(model.spec.vocab_size).zip(&tokens[1..]) {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f32 = row.iter().map(|logit| (logit - most).exp()).sum();
            sum += f64::from(most + total.ln() - row[*next as usize]);
            count += 1;
        }
    }
    sum / f64::from(count)
}

#[test]
fn calibrated_codes_predict_better_than_rounded_ones() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/folio-rust-7m");
    if !path.is_dir() {
        return folio_testing::skip!(Shared, "models/folio-rust-7m is not there");
    }
    let tokenizer = Tokenizer::from_json(&std::fs::read(path.join("tokenizer.json")).unwrap()).unwrap();
    let calibration = windows(&tokenizer, &["device", "model", "engine"], 12);
    let judged = windows(&tokenizer, &["server", "scheduler", "formats"], 6);
    assert_eq!((calibration.len(), judged.len()), (12, 6), "windows of text");
    let model = || folio_model::open(&path).unwrap();
    let lost = |method| {
        let target = Target::Int { bits: 4, group: Some(32), zero_points: false };
        let options = Options { calibration: calibration.clone(), threads: 2, ..Options::new(target, method) };
        let mut coded = Memory::default();
        run(model(), &options, &mut coded, &mut |_| {}).unwrap();
        loss(&model().with_weights(Box::new(coded.0)), &judged)
    };
    let plain = loss(&model(), &judged);
    let [rounded, gptq, awq] = [Method::Rtn, Method::Gptq, Method::Awq].map(|method| lost(method) - plain);
    println!("nats a token {plain:.4}; lost by rtn {rounded:.4}, gptq {gptq:.4}, awq {awq:.4}");
    assert!(rounded > 0.0, "rounding to four bits costs something");
    assert!(gptq < 0.7 * rounded, "gptq loses {gptq}, rounding {rounded}");
    assert!(awq < 0.85 * rounded, "awq loses {awq}, rounding {rounded}");
}
