//! Every golden file on a CUDA device: in f32 like on the CPU, in bf16 within its rounding error
//! for a small network of random weights, and recorded steps bit for bit like unrecorded ones.
//! Without a device these tests are skipped.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::available_parallelism;

use folio_device::cpu::{Cpu, CpuConfig};
use folio_device::cuda::{Cuda, CudaConfig, Precision, driver};
use folio_device::{KvFormat, Steps};
use folio_model::OpenModel;

use crate::agreement::Questions;
use crate::crowd::{self, Story};
use crate::families::for_all;
use crate::file::{self, Golden};
use crate::habits;
use crate::run::{self, Sequence};
use crate::switch_off;

/// Largest difference of logits in bf16 from those in f32, in tolerances of the golden file:
/// attention's scores there have deviations of two and more, and bf16 has eight bits of mantissa.
const BF16_COSTS: f64 = 900.0;

/// A turn on the device, if there is one. All tests share it and its stream, and work that one
/// queues while another's step is recorded would become part of the recording.
pub fn turn() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    match driver::device_count() {
        Ok(count) if count > 0 => return Some(TURN.lock().unwrap_or_else(PoisonError::into_inner)),
        Ok(_) => folio_testing::skip!(Gpu, "this machine has no CUDA device"),
        Err(error) => folio_testing::skip!(Gpu, "{error}"),
    }
    None
}

/// All tests share one device; compiled kernels are reused.
pub fn open(config: &CudaConfig) -> Cuda {
    static DEVICE: OnceLock<Arc<driver::Device>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        let cache_folder = Some(std::env::temp_dir().join("folio-kernels-of-tests"));
        let config = driver::CudaConfig { ordinal: 0, cache_folder };
        Arc::new(driver::Device::open(&config).unwrap_or_else(|error| panic!("{error}")))
    });
    // For tools that do not follow recordings.
    let graphs = config.graphs && std::env::var_os("FOLIO_EAGER").is_none();
    let config = CudaConfig { graphs, ..config.clone() };
    Cuda::on(Arc::clone(device), config).unwrap_or_else(|error| panic!("{error}"))
}

pub fn f32() -> CudaConfig {
    CudaConfig { activations: Precision::F32, ..CudaConfig::default() }
}

#[test]
fn cuda_in_f32_agrees_with_transformers() {
    if let Some(_turn) = turn() {
        let config = f32();
        for_all(&file::all(), |golden| run::check(golden, &switch_off::open(golden)?, || open(&config)));
    }
}

/// Logits of the prompt in one step, then of the recorded continuation, token by token.
fn forced(golden: &Golden, model: &OpenModel, config: &CudaConfig, kv: KvFormat) -> Result<Vec<Vec<f32>>, String> {
    let tokens = golden.prompt.len() + golden.greedy.len();
    let mut sequence = Sequence::with_kv(open(config), model, tokens, golden.prompt.len(), kv)?;
    let mut logits = sequence.prompt(&golden.prompt, golden.prompt.len())?;
    for token in &golden.greedy {
        logits.extend(sequence.feed(&[*token])?);
    }
    Ok(logits)
}

#[test]
fn cuda_in_bf16_agrees_with_transformers() {
    if let Some(_turn) = turn() {
        for_all(&file::all(), |golden| {
            let model = switch_off::open(golden)?;
            let logits = forced(golden, &model, &CudaConfig::default(), KvFormat::BF16)?;
            let (prompt, rest) = logits.split_at(golden.prompt.len());
            if !rest.iter().flatten().all(|logit| logit.is_finite()) {
                return Err("a logit of the continuation is not finite".to_owned());
            }
            run::compare_within(golden, prompt, BF16_COSTS * golden.tolerance())
        });
    }
}

/// Every `step`-th file, and mixtures of experts, because each of these takes many decoders. Or
/// only the file that `FOLIO_GOLDEN` names, for slow tools.
pub fn every(step: usize) -> Vec<Golden> {
    if let Ok(name) = std::env::var("FOLIO_GOLDEN") {
        return vec![file::read(&name)];
    }
    let all = file::all().into_iter().enumerate();
    let some = all.filter(|(index, golden)| index % step == 0 || golden.name.ends_with("fused"));
    some.map(|(_, golden)| golden).collect()
}

/// Results must not depend on whether a step was recorded.
#[test]
fn recorded_steps_equal_unrecorded_ones() {
    if let Some(_turn) = turn() {
        let configs = [f32(), CudaConfig::default(), CudaConfig { batch_invariant: true, ..CudaConfig::default() }];
        for_all(&every(3), |golden| {
            let model = switch_off::open(golden)?;
            for config in &configs {
                let kv = if config.activations == Precision::F32 { KvFormat::F32 } else { KvFormat::BF16 };
                let with = forced(golden, &model, &CudaConfig { graphs: true, ..config.clone() }, kv)?;
                let without = forced(golden, &model, &CudaConfig { graphs: false, ..config.clone() }, kv)?;
                if let Some(row) = with.iter().zip(&without).position(|(with, without)| with != without) {
                    return Err(format!("position {row} differs between recorded and unrecorded steps ({config:?})"));
                }
            }
            Ok(0.0)
        });
    }
}

/// A prompt in one step, in steps of seven and token by token: the same bits, in modes that promise
/// them.
#[test]
fn batch_invariant_prompts_may_be_cut_anywhere() {
    if let Some(_turn) = turn() {
        let config = CudaConfig { batch_invariant: true, ..CudaConfig::default() };
        println!("{}", open(&config).numerics());
        for_all(&every(3), |golden| {
            let (model, rows) = (switch_off::open(golden)?, golden.prompt.len());
            let in_steps = |chunk| {
                Sequence::with_kv(open(&config), &model, rows, chunk, KvFormat::BF16)?.prompt(&golden.prompt, chunk)
            };
            let whole = in_steps(rows)?;
            for chunk in [7, 1] {
                let cut = in_steps(chunk)?;
                if let Some(row) = cut.iter().zip(&whole).position(|(cut, whole)| cut != whole) {
                    return Err(format!("position {row} differs when the prompt comes in steps of {chunk}"));
                }
            }
            Ok(0.0)
        });
    }
}

/// Sequences of different lengths, together and alone: the same bits, in modes that promise them.
/// Steps of five sequences are padded to eight rows and replayed; those that end early leave steps
/// of other sizes.
#[test]
fn sequences_together_equal_sequences_alone() {
    if let Some(_turn) = turn() {
        let configs = [f32(), CudaConfig { batch_invariant: true, ..CudaConfig::default() }];
        for_all(&every(6), |golden| {
            let model = switch_off::open(golden)?;
            let story = |(start, prompt, rest): (usize, usize, usize)| Story {
                prompt: golden.prompt[start..start + prompt].to_vec(),
                rest: golden.greedy[start..start + rest].to_vec(),
            };
            let stories = [(0, 17, 12), (3, 1, 20), (20, 5, 9), (9, 40, 12), (30, 16, 12)].map(story);
            for config in &configs {
                let kv = if config.activations == Precision::F32 { KvFormat::F32 } else { KvFormat::BF16 };
                let together = crowd::run(open(config), &model, &stories, kv)?;
                for (number, story) in stories.iter().enumerate() {
                    let alone = crowd::run(open(config), &model, std::slice::from_ref(story), kv)?;
                    if let Some(step) = alone[0].iter().zip(&together[number]).position(|(one, all)| one != all) {
                        return Err(format!("sequence {number} differs at step {step} when it is alone ({config:?})"));
                    }
                }
            }
            Ok(0.0)
        });
    }
}

/// In f32 the tokens are the reference's; in bf16 its likeliest token is the same, except for near
/// ties. The rounding of the CPU is printed for comparison.
fn answers_as_the_reference(name: &str, model: &OpenModel, questions: &Questions) {
    let check = || -> Result<(), String> {
        let guesses = questions.greedy(open(&f32()), model, KvFormat::F32)?;
        let verdicts = questions.judge(model, &guesses);
        let parted: Vec<_> = verdicts.iter().filter_map(|verdict| verdict.parted).collect();
        let same = verdicts.len() - parted.len();
        println!(
            "{name}, f32: {same} of {} greedy answers are the reference's; others part at {parted:?}",
            guesses.len()
        );
        let exact = questions.forced(open(&f32()), model, KvFormat::F32, &verdicts)?;
        exact.print(&format!("{name}, f32"));
        let rounded = questions.forced(open(&CudaConfig::default()), model, KvFormat::BF16, &verdicts)?;
        rounded.print(&format!("{name}, bf16"));
        let threads = available_parallelism().map_or(1, usize::from);
        let cpu = Cpu::new(CpuConfig { threads, isa: None }).map_err(|e| e.to_string())?;
        questions.forced(cpu, model, KvFormat::BF16, &verdicts)?.print(&format!("{name}, the CPU's fast kernels"));
        match () {
            () if same * 100 < 99 * guesses.len() => Err(format!("in f32 only {same} answers are the same")),
            () if rounded.agreement < 0.99 => Err("in bf16 too few positions agree".to_owned()),
            () if rounded.clear() > 0 => Err("in bf16 disagreements are no near ties".to_owned()),
            () => Ok(()),
        }
    };
    check().unwrap_or_else(|error| panic!("{name}: {error}"));
}

#[test]
fn default_model_on_cuda_answers_as_the_reference() {
    if let Some(_turn) = turn() {
        let path = file::tree().join("models/folio-rust-42m.gguf");
        let model = folio_model::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        answers_as_the_reference("folio-rust-42m", &model, &Questions::of_text(200, 128));
    }
}

#[test]
fn experts_on_cuda_answer_as_the_reference() {
    if let Some(_turn) = turn() {
        answers_as_the_reference("32 experts", &habits::experts(), &habits::questions(200, 128));
    }
}
