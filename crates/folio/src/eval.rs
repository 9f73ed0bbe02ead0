//! `folio eval`: how well a model predicts a text, and what a smaller form of it loses.
//!
//! The same tokens in the same windows for every model; logits go straight from the decoder to f64 figures.

mod matrix;
mod measure;
mod plot;
mod reader;
mod recipe;
mod report;
mod run;
mod saved;
mod size;
pub mod text;

use anyhow::{Result, bail};
use folio_device::cpu::CpuConfig;
use folio_session::{Assets, Options, Target, machine};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use crate::args::{BackendArg, EvalArgs};
use crate::{environment, table};
use measure::{Comparison, Score, Ties};
use reader::{Device, Setup};
use run::Course;
use text::{Amount, Windows};

pub fn main(args: &EvalArgs) -> Result<()> {
    check(args)?;
    match &args.against.against {
        _ if args.matrix.matrix => matrix::main(args),
        Some(base) => compare(args, base),
        None => score(args),
    }
}

fn check(args: &EvalArgs) -> Result<()> {
    if args.threads == Some(0) {
        bail!("--threads must be at least 1");
    }
    if args.tokens.is_some_and(|tokens| tokens < 2) {
        bail!("--tokens must be at least 2: one to read, one to predict");
    }
    Ok(())
}

fn score(args: &EvalArgs) -> Result<()> {
    let mut assets = Assets::open(args.model.as_deref(), &environment::options())?;
    assets.quantize(args.quantize)?;
    let windows = windows(args, &assets)?;
    let mut model = reader::load(&assets.model, &model_setup(args, &assets)?)?;
    let bar = bar();
    let vocabulary = assets.model.spec.vocab_size;
    let course = Course { windows: &windows, vocabulary, threads: threads(args), bar: &bar };
    let score = course.score(&mut *model)?;
    bar.finish_and_clear();
    let report = Report { args, assets: &assets, windows: &windows };
    match args.json {
        true => outln!("{}", Value::Object(report.json(&score))),
        false => report.print(&score),
    }
}

fn compare(args: &EvalArgs, base: &str) -> Result<()> {
    let mut assets = Assets::open(args.model.as_deref(), &environment::options())?;
    assets.quantize(args.quantize)?;
    let base_assets = Assets::open(Some(base), &environment::options())?;
    let windows = windows_of_both(args, &base_assets, &assets)?;
    let mut base = reader::load(&base_assets.model, &setup(args, args.against.against_backend, &base_assets)?)?;
    let mut model = reader::load(&assets.model, &model_setup(args, &assets)?)?;
    let bar = bar();
    let vocabulary = assets.model.spec.vocab_size;
    let course = Course { windows: &windows, vocabulary, threads: threads(args), bar: &bar };
    let compared = course.compare(&mut *base, &mut *model)?;
    bar.finish_and_clear();
    let sides = [(&base_assets, base.weight_bytes()), (&assets, model.weight_bytes())].map(Side::new);
    let report = Report { args, assets: &assets, windows: &windows };
    match args.json {
        true => outln!("{}", report.json_of_both(&sides, &compared)),
        false => report.print_both(&sides, &compared),
    }
}

fn threads(args: &EvalArgs) -> usize {
    args.threads.unwrap_or_else(machine::cores)
}

/// How a model is run where no flag says otherwise.
fn setup(args: &EvalArgs, backend: BackendArg, assets: &Assets) -> Result<Setup> {
    let cpu = CpuConfig { threads: threads(args), isa: args.cpu_isa.map(Into::into) };
    let device = match backend {
        BackendArg::Cpu => Device::Cpu(cpu),
        BackendArg::Reference => Device::Reference,
        BackendArg::Cuda => {
            Device::Cuda(Target::gpu(&Options { device: args.device.options(), ..environment::options() })?)
        }
    };
    let kv_format = match &device {
        Device::Cuda(gpu) => gpu.kv_format(),
        _ => folio_session::as_precise_as_weights(assets),
    };
    Ok(Setup { device, threads: cpu.threads, kv_format, window: args.window })
}

fn model_setup(args: &EvalArgs, assets: &Assets) -> Result<Setup> {
    let setup = setup(args, args.backend, assets)?;
    Ok(Setup { kv_format: args.kv_cache_dtype.0.unwrap_or(setup.kv_format), ..setup })
}

fn windows(args: &EvalArgs, assets: &Assets) -> Result<Windows> {
    let Some(tokenizer) = &assets.tokenizer else {
        bail!("{} has no tokenizer; `folio eval` needs one", assets.name);
    };
    let longest = assets.model.spec.max_context;
    if !(2..=longest).contains(&args.window) {
        bail!("--window must lie between 2 and {longest}, the context of {}", assets.name);
    }
    let amount = Amount { window: args.window, tokens: args.tokens.unwrap_or(usize::MAX) };
    Windows::read(&args.text, tokenizer, amount)
}

/// Both must mean the same by a token.
fn windows_of_both(args: &EvalArgs, base: &Assets, model: &Assets) -> Result<Windows> {
    let (of_base, of_model) = (base.model.spec.vocab_size, model.model.spec.vocab_size);
    if of_base != of_model {
        bail!(
            "{} has {of_base} tokens and {} has {of_model}: their predictions cannot be compared",
            base.name,
            model.name
        );
    }
    let found = windows(args, base)?;
    if model.tokenizer.is_some() && windows(args, model)? != found {
        bail!("the tokenizers of {} and {} read the text as different tokens", base.name, model.name);
    }
    Ok(found)
}

/// Drawn only when it takes long enough to be watched.
fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} tokens {eta}");
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(4));
    bar.with_style(style.expect("the template is well formed"))
}

/// One of two models, as a report needs it.
struct Side<'a> {
    name: &'a str,
    disk_bytes: u64,
    memory_bytes: u64,
    bits_per_weight: f64,
}

impl<'a> Side<'a> {
    fn new((assets, memory_bytes): (&'a Assets, u64)) -> Self {
        let (disk_bytes, bits_per_weight) = (size::disk_bytes(&assets.model), size::bits_per_weight(&assets.model));
        Self { name: &assets.name, disk_bytes, memory_bytes, bits_per_weight }
    }

    fn json(&self, score: &Score) -> Value {
        json!({
            "model": self.name, "perplexity": score.perplexity(), "nats_per_token": score.nats,
            "weight_bytes_on_disk": self.disk_bytes, "weight_bytes_in_memory": self.memory_bytes,
            "bits_per_weight": self.bits_per_weight,
        })
    }
}

struct Report<'a> {
    args: &'a EvalArgs,
    assets: &'a Assets,
    windows: &'a Windows,
}

impl Report<'_> {
    /// Every byte of the text is paid for by the tokens that were scored: the unscored first ones are few.
    fn bits_per_byte(&self, score: &Score) -> f64 {
        score.nats / std::f64::consts::LN_2 * self.windows.num_tokens() as f64 / self.windows.text_bytes
    }

    fn json(&self, score: &Score) -> serde_json::Map<String, Value> {
        let value = json!({
            "model": self.assets.name, "text": self.args.text.display().to_string(), "window": self.args.window,
            "windows": self.windows.windows.len(), "tokens": self.windows.num_tokens(), "tokens_scored": score.scored,
            "bytes": self.windows.text_bytes.round(), "nats_per_token": score.nats, "perplexity": score.perplexity(),
            "bits_per_byte": self.bits_per_byte(score),
        });
        value.as_object().cloned().unwrap_or_default()
    }

    fn json_of_both(&self, [base, model]: &[Side<'_>; 2], compared: &Comparison) -> Value {
        let mut value = self.json(&compared.model);
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

    fn print(&self, score: &Score) -> Result<()> {
        outln!("model            {}", self.assets.name)?;
        self.print_text(score.scored)?;
        outln!("nats per token   {:.5}", score.nats)?;
        outln!("perplexity       {:.4}", score.perplexity())?;
        outln!("bits per byte    {:.5}", self.bits_per_byte(score))
    }

    fn print_text(&self, scored: usize) -> Result<()> {
        let (count, tokens, bytes) = (self.windows.windows.len(), self.windows.num_tokens(), self.windows.text_bytes);
        outln!("text             {} ({bytes:.0} bytes, {tokens} tokens)", self.args.text.display())?;
        outln!("windows          {count} of up to {} tokens, {scored} tokens scored", self.args.window)
    }

    fn print_both(&self, [base, model]: &[Side<'_>; 2], compared: &Comparison) -> Result<()> {
        self.print_text(compared.model.scored)?;
        out!("\n")?;
        let row = |name: &str, cell: &dyn Fn(&Side<'_>, &Score) -> String| {
            vec![name.to_owned(), cell(base, &compared.base), cell(model, &compared.model)]
        };
        let rows = [
            row("", &|side, _| side.name.to_owned()),
            row("perplexity", &|_, score| format!("{:.4}", score.perplexity())),
            row("nats per token", &|_, score| format!("{:.5}", score.nats)),
            row("bits per byte", &|_, score| format!("{:.5}", self.bits_per_byte(score))),
            row("bits per weight", &|side, _| format!("{:.2}", side.bits_per_weight)),
            row("weights on disk", &|side, _| table::bytes(side.disk_bytes)),
            row("weights in memory", &|side, _| table::bytes(side.memory_bytes)),
        ];
        outln!("{}", table::render(&rows))?;
        let change = 100.0 * compared.perplexity_change();
        outln!("perplexity       {change:+.3}% (standard error {:.3}%)", 100.0 * compared.nats_error)?;
        let (mean, p99) = (compared.divergence_mean, compared.divergence_p99);
        outln!("KL divergence    {mean:.3e} nats mean, {p99:.3e} at the 99th percentile")?;
        outln!("greedy agreement {:.2}%", 100.0 * compared.agreement)?;
        let Ties { logit_difference, clear_disagreements } = compared.ties;
        outln!(
            "logits           {logit_difference:.3e} apart (root mean square); {clear_disagreements} disagreements where \
             the first token leads by more than {} times that",
            Ties::NEAR
        )
    }
}
