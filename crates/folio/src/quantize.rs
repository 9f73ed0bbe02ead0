//! `folio quantize`: writes a quantized copy of a model, in formats that other programs load too.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use folio_measure::eval::{Amount, Windows, aimed, disk_bytes};
use folio_measure::table;
use folio_model::parameters;
use folio_quantize::write::{FolderWriter, GgufJob, Mix, write_gguf};
use folio_quantize::{Method, Options, Progress, Target};
use folio_session::{Assets, ModelRef, machine};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::args::{QuantizeArgs, QuantizeFormat};
use crate::environment;

/// The default calibration text.
const OWN_TEXT: [&str; 6] = [
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../docs/memory.md"),
    include_str!("../../../docs/server.md"),
    include_str!("../../../docs/kv-tiers.md"),
    include_str!("../../../docs/simulator.md"),
];

pub fn main(args: &QuantizeArgs) -> Result<()> {
    let started = Instant::now();
    let source = source(args)?;
    check(args, &source)?;
    let bar = bar();
    let mut report = |progress: Progress| show(&bar, progress);
    let threads = args.threads.unwrap_or_else(machine::cores);
    let summary = match args.format {
        QuantizeFormat::Gguf(mix) => to_gguf(args, &source, mix, threads, &mut report),
        QuantizeFormat::Folder(target) => to_folder(args, &source, target, threads, &mut report),
    };
    bar.finish_and_clear();
    outln!("{}", summary?.describe(&args.out, started.elapsed()))
}

/// The location of the model in full precision.
enum Source {
    Folder(PathBuf),
    Gguf(PathBuf),
}

impl Source {
    fn path(&self) -> &Path {
        match self {
            Source::Folder(path) | Source::Gguf(path) => path,
        }
    }
}

fn source(args: &QuantizeArgs) -> Result<Source> {
    Ok(match ModelRef::resolve(Some(&args.model), environment::hub_cache().as_deref())? {
        ModelRef::Folder(path) => Source::Folder(path),
        ModelRef::Gguf(path) => Source::Gguf(path),
        ModelRef::Embedded => bail!("the built-in model is quantized already"),
    })
}

/// Checks that need no work.
fn check(args: &QuantizeArgs, source: &Source) -> Result<()> {
    if args.threads == Some(0) {
        bail!("--threads must be at least 1");
    }
    if args.calibration_window < 2 || args.calibration_tokens < args.calibration_window {
        bail!("--calibration-window must be at least 2, and --calibration-tokens no less than it");
    }
    let out = args.out.display();
    let named_gguf = args.out.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
    match (args.format, source) {
        (QuantizeFormat::Gguf(_), _) if !named_gguf => bail!("{out}: the file name of this format must end in .gguf"),
        (QuantizeFormat::Gguf(_), _) if args.method != Method::Rtn => bail!(
            "--method: GGUF formats are always fitted by least squares; gptq and awq apply to int4, int8 and other \
             folder formats"
        ),
        (QuantizeFormat::Gguf(_), _) if args.calibration.is_some() => {
            bail!("--calibration: GGUF formats use no calibration text")
        }
        (QuantizeFormat::Gguf(_), _) => {}
        (QuantizeFormat::Folder(_), _) if named_gguf => bail!("{out}: this format is a folder, not a .gguf file"),
        (QuantizeFormat::Folder(_), Source::Gguf(path)) => bail!(
            "{}: a .gguf file can be quantized to q4_k_m or q8_0 only; other formats need a model folder",
            path.display()
        ),
        (QuantizeFormat::Folder(target), Source::Folder(_)) => check_method(args, target)?,
    }
    if args.out.exists() && !args.force {
        bail!("{out} exists; give --force to overwrite it");
    }
    let (from, to) = (source.path().canonicalize().ok(), args.out.canonicalize().ok());
    if from.is_some() && from == to {
        bail!("{out} is the model itself");
    }
    Ok(())
}

fn check_method(args: &QuantizeArgs, target: Target) -> Result<()> {
    let calibrated = args.method != Method::Rtn || target == Target::LlmInt8;
    if args.calibration.is_some() && !calibrated {
        bail!("--calibration: --method rtn uses no calibration text; gptq and awq do");
    }
    if target == Target::LlmInt8 && args.method != Method::Rtn {
        bail!("--method: llm-int8 keeps outlier columns in bf16 and rounds the others to nearest; use rtn");
    }
    Ok(())
}

/// The figures of the closing line.
struct Summary {
    before: u64,
    after: u64,
    parameters: u64,
    num_quantized: usize,
    /// Name and size of the calibration text.
    calibrated: Option<String>,
}

impl Summary {
    fn describe(&self, out: &Path, took: Duration) -> String {
        let peak =
            machine::peak_resident().map_or(String::new(), |peak| format!(", peak memory {}", table::bytes(peak)));
        let text = self.calibrated.as_ref().map_or(String::new(), |text| format!(", calibrated on {text}"));
        format!(
            "{}: {} matrices quantized{text}; {} before, {} after, {:.2} bits per weight; {:.1} s{peak}",
            out.display(),
            self.num_quantized,
            table::bytes(self.before),
            table::bytes(self.after),
            self.after as f64 * 8.0 / self.parameters.max(1) as f64,
            took.as_secs_f64(),
        )
    }
}

fn to_gguf(
    args: &QuantizeArgs,
    source: &Source,
    mix: Mix,
    threads: usize,
    report: &mut dyn FnMut(Progress),
) -> Result<Summary> {
    let (before, parameters) = size_of(&folio_model::open(source.path())?);
    let job = GgufJob { source: source.path(), out: &args.out, mix, keep: &kept(args), threads };
    let written = write_gguf(&job, report)?;
    Ok(Summary { before, after: written.bytes, parameters, num_quantized: written.num_quantized, calibrated: None })
}

/// Matrices to keep. GGUF's mixtures quantize the output matrix by a rule of their own, so the
/// default `lm_head` is left out.
fn kept(args: &QuantizeArgs) -> Vec<String> {
    args.keep.iter().filter(|name| *name != "lm_head").cloned().collect()
}

fn to_folder(
    args: &QuantizeArgs,
    source: &Source,
    target: Target,
    threads: usize,
    report: &mut dyn FnMut(Progress),
) -> Result<Summary> {
    let assets = Assets::open(Some(&args.model), &environment::options())?;
    let (before, parameters) = size_of(&assets.model);
    let mut options = Options::new(aimed(target, args.method), args.method);
    options.keep.clone_from(&args.keep);
    options.threads = threads;
    let calibrated = match options.needs_calibration() {
        true => Some(calibrate(args, &assets, &mut options)?),
        false => None,
    };
    let mut writer = FolderWriter::create(source.path(), &args.out, &options, args.force)?;
    folio_quantize::run(assets.model, &options, &mut writer, report)?;
    let written = writer.finish()?;
    Ok(Summary { before, after: written.bytes, parameters, num_quantized: written.num_quantized, calibrated })
}

/// Bytes of the stored weights, and the number of parameters.
fn size_of(model: &folio_model::OpenModel) -> (u64, u64) {
    (disk_bytes(model), parameters(&model.spec).total)
}

/// Sets the calibration sequences and returns a description of their text.
fn calibrate(args: &QuantizeArgs, assets: &Assets, options: &mut Options) -> Result<String> {
    let Some(tokenizer) = &assets.tokenizer else {
        bail!("{} has no tokenizer, which calibration needs", assets.name);
    };
    let window = args.calibration_window.min(assets.model.spec.max_context);
    let amount = Amount { window, tokens: args.calibration_tokens };
    let (windows, what) = match &args.calibration {
        Some(path) => (Windows::read(path, tokenizer, amount)?, path.display().to_string()),
        None => {
            let documents = OWN_TEXT.map(str::to_owned);
            (Windows::of(&documents, tokenizer, amount)?, "Folio's documentation".to_owned())
        }
    };
    let what = format!("{} tokens of {what}", windows.num_tokens());
    options.calibration = windows.windows;
    Ok(what)
}

/// The bar counts thousandths of the work.
const STEPS: f32 = 1000.0;

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {percent}% {msg}, {eta} left");
    let bar = ProgressBar::with_draw_target(Some(STEPS as u64), ProgressDrawTarget::stderr_with_hz(4));
    bar.with_style(style.expect("the template is well formed"))
}

fn show(bar: &ProgressBar, progress: Progress) {
    bar.set_position((progress.done * STEPS) as u64);
    bar.set_message(match progress.layer < progress.layers {
        true => format!("layer {} of {}: {}", progress.layer + 1, progress.layers, progress.what),
        false => progress.what.to_owned(),
    });
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Command, Folio};

    fn args(flags: &str) -> QuantizeArgs {
        let words = ["folio", "quantize"].into_iter().chain(flags.split_whitespace());
        match Folio::try_parse_from(words).map(|folio| folio.command) {
            Ok(Command::Quantize(args)) => *args,
            Ok(_) => unreachable!("another command"),
            Err(error) => panic!("{flags}: {error}"),
        }
    }

    fn refused(flags: &str, source: &Source) -> String {
        check(&args(flags), source).map_or_else(|error| error.to_string(), |()| "nothing".to_owned())
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        let folder = Source::Folder("in".into());
        let gguf = Source::Gguf("in.gguf".into());
        for (flags, source, expect) in [
            ("in out --format int4-g128", &folder, "nothing"),
            ("in out --format nf4 --method gptq --calibration x.txt", &folder, "nothing"),
            ("in out --format llm-int8 --calibration x.txt", &folder, "nothing"),
            ("in out.gguf --format q4_k_m", &gguf, "nothing"),
            ("in out --format q4_k_m", &folder, "must end in .gguf"),
            ("in out.gguf --format q8_0 --method gptq", &folder, "least squares"),
            ("in out.gguf --format q8_0 --calibration x.txt", &folder, "use no calibration text"),
            ("in out.gguf --format int8", &folder, "is a folder"),
            ("in.gguf out --format int8", &gguf, "model folder"),
            ("in out --format int8 --calibration x.txt", &folder, "rtn uses no calibration text"),
            ("in out --format llm-int8 --method awq", &folder, "use rtn"),
            ("in out --format int8 --threads 0", &folder, "--threads"),
            ("in out --format int8 --method gptq --calibration-window 1", &folder, "--calibration-window"),
            ("in . --format int8", &folder, "--force"),
            ("in . --format int8 --force", &folder, "nothing"),
        ] {
            let found = refused(flags, source);
            assert!(found.contains(expect), "{flags}: {found}");
        }
        assert!(refused("in . --format int8 --force", &Source::Folder(".".into())).contains("the model itself"));
    }

    #[test]
    fn the_closing_line_says_what_became_smaller() {
        let calibrated = Some("9 tokens of x.txt".to_owned());
        let summary =
            Summary { before: 200 << 20, after: 50 << 20, parameters: 100 << 20, num_quantized: 7, calibrated };
        let line = summary.describe(Path::new("out"), Duration::from_millis(1500));
        let start = "out: 7 matrices quantized, calibrated on 9 tokens of x.txt; 200.0 MiB before, 50.0 MiB after, \
                     4.00 bits per weight; 1.5 s";
        assert!(line.starts_with(start), "{line}");
    }
}
