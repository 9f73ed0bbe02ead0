//! Quality of a model: how well it predicts a text, and how much of that a smaller form of it
//! loses.
//!
//! Every model reads the same tokens in the same windows; logits go straight from the decoder to
//! f64 figures.

pub mod matrix;
mod measure;
mod plot;
mod reader;
mod recipe;
mod report;
mod run;
mod saved;
mod size;
mod text;

use std::path::PathBuf;

use anyhow::{Result, bail};
use folio_device::KvFormat;
use folio_device::cpu::{CpuConfig, Isa};
use folio_model::AtLoad;
use folio_session::{Assets, Target, machine};
use serde_json::{Value, json};

use crate::progress::Progress;
use crate::table;
use measure::{Comparison, Score, Ties};
use reader::{Device, Setup};
pub use recipe::aimed;
pub use report::{Figures, Matrix, Row, Size};
use run::Course;
pub use size::disk_bytes;
pub use text::{Amount, Windows};

/// The model, the text and how both are read.
#[derive(Clone, Debug)]
pub struct Options {
    /// By default the built-in one.
    pub model: Option<String>,
    /// A .jsonl file of objects with a "text", or one document of plain text.
    pub text: PathBuf,
    /// Number of tokens to measure on; by default all.
    pub tokens: Option<usize>,
    /// Tokens per window; windows do not overlap, and the first token of each is not scored.
    pub window: usize,
    /// Compute threads; by default all cores.
    pub threads: Option<usize>,
    pub isa: Option<Isa>,
    /// Quantize the model's unquantized weights at load time.
    pub quantize: Option<AtLoad>,
    pub backend: Backend,
    /// By default as precise as the weights.
    pub kv_format: Option<KvFormat>,
    /// The device of [`Backend::Cuda`], and folders.
    pub session: folio_session::Options,
}

/// A backend of forward passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Cpu,
    /// Plain loops over weights decoded to f32.
    Reference,
    Cuda,
}

fn check(options: &Options) -> Result<()> {
    if options.threads == Some(0) {
        bail!("--threads must be at least 1");
    }
    if options.tokens.is_some_and(|tokens| tokens < 2) {
        bail!("--tokens must be at least 2: one to read, one to predict");
    }
    Ok(())
}

/// How well the model predicts the text.
pub fn score(options: &Options, progress: &dyn Progress) -> Result<ScoreReport> {
    check(options)?;
    let mut assets = Assets::open(options.model.as_deref(), &options.session)?;
    assets.quantize(options.quantize)?;
    let windows = windows(options, &assets)?;
    let mut model = reader::load(&assets.model, &model_setup(options, &assets)?)?;
    let vocabulary = assets.model.spec.vocab_size;
    let course = Course { windows: &windows, vocabulary, threads: threads(options), progress };
    let score = course.score("", &mut *model)?;
    progress.end();
    Ok(ScoreReport { about: About::new(options, &assets, &windows), score })
}

/// How far the model's predictions are from those of `base`.
pub fn compare(
    options: &Options,
    base: &str,
    base_backend: Backend,
    progress: &dyn Progress,
) -> Result<ComparisonReport> {
    check(options)?;
    let mut assets = Assets::open(options.model.as_deref(), &options.session)?;
    assets.quantize(options.quantize)?;
    let base_assets = Assets::open(Some(base), &options.session)?;
    let windows = windows_of_both(options, &base_assets, &assets)?;
    let mut base = reader::load(&base_assets.model, &setup(options, base_backend, &base_assets)?)?;
    let mut model = reader::load(&assets.model, &model_setup(options, &assets)?)?;
    let vocabulary = assets.model.spec.vocab_size;
    let course = Course { windows: &windows, vocabulary, threads: threads(options), progress };
    let compared = course.compare("", &mut *base, &mut *model)?;
    progress.end();
    let sides = [(&base_assets, base.weight_bytes()), (&assets, model.weight_bytes())].map(Side::new);
    Ok(ComparisonReport { about: About::new(options, &assets, &windows), sides, compared })
}

fn threads(options: &Options) -> usize {
    options.threads.unwrap_or_else(machine::cores)
}

/// How a model is run unless an option says otherwise.
fn setup(options: &Options, backend: Backend, assets: &Assets) -> Result<Setup> {
    let cpu = CpuConfig { threads: threads(options), isa: options.isa };
    let device = match backend {
        Backend::Cpu => Device::Cpu(cpu),
        Backend::Reference => Device::Reference,
        Backend::Cuda => Device::Cuda(Target::gpu(&options.session)?),
    };
    let kv_format = match &device {
        Device::Cuda(gpu) => gpu.kv_format(),
        _ => folio_session::as_precise_as_weights(assets),
    };
    Ok(Setup { device, threads: cpu.threads, kv_format, window: options.window })
}

fn model_setup(options: &Options, assets: &Assets) -> Result<Setup> {
    let setup = setup(options, options.backend, assets)?;
    Ok(Setup { kv_format: options.kv_format.unwrap_or(setup.kv_format), ..setup })
}

fn windows(options: &Options, assets: &Assets) -> Result<Windows> {
    let Some(tokenizer) = &assets.tokenizer else {
        bail!("{} has no tokenizer; `folio eval` needs one", assets.name);
    };
    let longest = assets.model.spec.max_context;
    if !(2..=longest).contains(&options.window) {
        bail!("--window must lie between 2 and {longest}, the context of {}", assets.name);
    }
    let amount = Amount { window: options.window, tokens: options.tokens.unwrap_or(usize::MAX) };
    Windows::read(&options.text, tokenizer, amount)
}

/// Both must mean the same by a token.
fn windows_of_both(options: &Options, base: &Assets, model: &Assets) -> Result<Windows> {
    let (of_base, of_model) = (base.model.spec.vocab_size, model.model.spec.vocab_size);
    if of_base != of_model {
        bail!(
            "{} has {of_base} tokens and {} has {of_model}: their predictions cannot be compared",
            base.name,
            model.name
        );
    }
    let found = windows(options, base)?;
    if model.tokenizer.is_some() && windows(options, model)? != found {
        bail!("the tokenizers of {} and {} read the text as different tokens", base.name, model.name);
    }
    Ok(found)
}

/// One of two models, as a report needs it.
#[derive(Clone, Debug)]
struct Side {
    name: String,
    disk_bytes: u64,
    memory_bytes: u64,
    bits_per_weight: f64,
}

impl Side {
    fn new((assets, memory_bytes): (&Assets, u64)) -> Self {
        let (disk_bytes, bits_per_weight) = (size::disk_bytes(&assets.model), size::bits_per_weight(&assets.model));
        Self { name: assets.name.clone(), disk_bytes, memory_bytes, bits_per_weight }
    }

    fn json(&self, score: &Score) -> Value {
        json!({
            "model": self.name, "perplexity": score.perplexity(), "nats_per_token": score.nats,
            "weight_bytes_on_disk": self.disk_bytes, "weight_bytes_in_memory": self.memory_bytes,
            "bits_per_weight": self.bits_per_weight,
        })
    }
}

/// The model and the text of a report.
#[derive(Clone, Debug)]
struct About {
    model: String,
    text: PathBuf,
    window: usize,
    windows: usize,
    tokens: usize,
    text_bytes: f64,
}

impl About {
    fn new(options: &Options, assets: &Assets, windows: &Windows) -> Self {
        Self {
            model: assets.name.clone(),
            text: options.text.clone(),
            window: options.window,
            windows: windows.windows.len(),
            tokens: windows.num_tokens(),
            text_bytes: windows.text_bytes,
        }
    }

    /// Every byte of the text is paid for by the tokens that were scored: the unscored first ones
    /// are few.
    fn bits_per_byte(&self, score: &Score) -> f64 {
        score.nats / std::f64::consts::LN_2 * self.tokens as f64 / self.text_bytes
    }

    fn json(&self, score: &Score) -> serde_json::Map<String, Value> {
        let value = json!({
            "model": self.model, "text": self.text.display().to_string(), "window": self.window,
            "windows": self.windows, "tokens": self.tokens, "tokens_scored": score.scored,
            "bytes": self.text_bytes.round(), "nats_per_token": score.nats, "perplexity": score.perplexity(),
            "bits_per_byte": self.bits_per_byte(score),
        });
        value.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, scored: usize) -> String {
        let Self { text, window, windows, tokens, text_bytes, .. } = self;
        format!(
            "text             {} ({text_bytes:.0} bytes, {tokens} tokens)\n\
             windows          {windows} of up to {window} tokens, {scored} tokens scored\n",
            text.display()
        )
    }
}

/// Figures of one model.
#[derive(Clone, Debug)]
pub struct ScoreReport {
    about: About,
    score: Score,
}

impl ScoreReport {
    pub fn json(&self) -> Value {
        Value::Object(self.about.json(&self.score))
    }

    pub fn text(&self) -> String {
        let Self { about, score } = self;
        let mut text = format!("model            {}\n{}", about.model, about.text(score.scored));
        text += &format!("nats per token   {:.5}\n", score.nats);
        text += &format!("perplexity       {:.4}\n", score.perplexity());
        text + &format!("bits per byte    {:.5}\n", about.bits_per_byte(score))
    }
}

/// Figures of a model beside a base.
#[derive(Clone, Debug)]
pub struct ComparisonReport {
    about: About,
    /// The base, and the model.
    sides: [Side; 2],
    compared: Comparison,
}

impl ComparisonReport {
    pub fn json(&self) -> Value {
        let ([base, model], compared) = (&self.sides, &self.compared);
        let mut value = self.about.json(&compared.model);
        value.insert("base".into(), base.json(&compared.base));
        let figures = json!({
            "weight_bytes_on_disk": model.disk_bytes, "weight_bytes_in_memory": model.memory_bytes,
            "bits_per_weight": model.bits_per_weight, "perplexity_change": compared.perplexity_change(),
            "nats_change_error": compared.nats_error, "kl_mean": compared.divergence_mean,
            "kl_p99": compared.divergence_p99, "greedy_agreement": compared.agreement,
            "logit_difference": compared.ties.logit_difference,
            "clear_disagreements": compared.ties.clear_disagreements,
        });
        value.extend(figures.as_object().cloned().unwrap_or_default());
        Value::Object(value)
    }

    pub fn text(&self) -> String {
        let ([base, model], compared) = (&self.sides, &self.compared);
        let row = |name: &str, cell: &dyn Fn(&Side, &Score) -> String| {
            vec![name.to_owned(), cell(base, &compared.base), cell(model, &compared.model)]
        };
        let rows = [
            row("", &|side, _| side.name.clone()),
            row("perplexity", &|_, score| format!("{:.4}", score.perplexity())),
            row("nats per token", &|_, score| format!("{:.5}", score.nats)),
            row("bits per byte", &|_, score| format!("{:.5}", self.about.bits_per_byte(score))),
            row("bits per weight", &|side, _| format!("{:.2}", side.bits_per_weight)),
            row("weights on disk", &|side, _| table::bytes(side.disk_bytes)),
            row("weights in memory", &|side, _| table::bytes(side.memory_bytes)),
        ];
        let mut text = format!("{}\n{}\n", self.about.text(compared.model.scored), table::render(&rows));
        let change = 100.0 * compared.perplexity_change();
        text += &format!("perplexity       {change:+.3}% (standard error {:.3}%)\n", 100.0 * compared.nats_error);
        let (mean, p99) = (compared.divergence_mean, compared.divergence_p99);
        text += &format!("KL divergence    {mean:.3e} nats mean, {p99:.3e} at the 99th percentile\n");
        text += &format!("greedy agreement {:.2}%\n", 100.0 * compared.agreement);
        let Ties { logit_difference, clear_disagreements } = compared.ties;
        text + &format!(
            "logits           {logit_difference:.3e} apart (root mean square); {clear_disagreements} disagreements where \
             the first token leads by more than {} times that\n",
            Ties::NEAR
        )
    }
}
