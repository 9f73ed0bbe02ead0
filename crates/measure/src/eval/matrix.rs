//! A model quantized in every way, one after the other, each compared with the model as it is.
//!
//! A form is made in a scratch folder, measured and deleted before the next. A failure becomes a
//! row that says why.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use folio_device::KvFormat;
use folio_quantize::write::{FolderWriter, GgufJob, write_gguf};
use folio_session::{Assets, ModelRef, Warn};
use folio_text::Tokenizer;

use super::measure::Comparison;
use super::reader::{self, Reader, Setup};
use super::recipe::{FORMATS, Kind, METHODS, Recipe, recipes};
use super::report::{Figures, Matrix, Row, Size};
use super::run::Course;
use super::text::{Amount, Windows};
use super::{Options, saved, size};
use crate::progress::Progress;

/// The row that all others are compared with.
const AS_IT_IS: &str = "as it is";
/// Tokens of one sequence to calibrate on.
const CALIBRATION_WINDOW: usize = 512;

/// The forms to measure. An option that is absent means all that make sense.
#[derive(Clone, Debug)]
pub struct Forms {
    /// Formats in the notation of `folio quantize`.
    pub formats: Option<Vec<String>>,
    /// Methods for each format: rtn, gptq, awq.
    pub methods: Option<Vec<String>>,
    /// KV-cache formats, or `none`.
    pub kv: Option<Vec<String>>,
    /// Calibration text.
    pub calibration: Option<PathBuf>,
    pub calibration_tokens: usize,
    /// File of finished rows: those in it are taken, and each new one is appended.
    pub resume: Option<PathBuf>,
}

/// Measures all forms of a model. `say` takes a line for each row as it comes, since a matrix takes
/// long.
pub fn measure(args: &Options, wanted: &Forms, progress: &dyn Progress, say: Warn) -> Result<Matrix> {
    super::check(args)?;
    let recipes = recipes(wanted.formats.as_deref(), wanted.methods.as_deref())?;
    let kv_formats = kv_formats(wanted)?;
    if wanted.calibration.is_none()
        && let Some(recipe) = recipes.iter().find(|recipe| recipe.needs_calibration())
    {
        let method = recipe.method().unwrap_or("");
        bail!("{} {method} needs text to calibrate on: give --calibration FILE", recipe.format);
    }
    let source = match ModelRef::resolve(args.model.as_deref(), args.session.folders.hub.as_deref())? {
        ModelRef::Folder(path) | ModelRef::Gguf(path) => path,
        ModelRef::Embedded => bail!("--matrix needs a model to quantize: name a folder or a .gguf file"),
    };
    let assets = Assets::open(args.model.as_deref(), &args.session)?;
    let windows = super::windows(args, &assets)?;
    let tokenizer = assets.tokenizer.as_deref().context("the model has no tokenizer")?;
    let setup = super::setup(args, args.backend, &assets)?;
    let vocabulary = assets.model.spec.vocab_size;
    let course = Course { windows: &windows, vocabulary, threads: super::threads(args), progress };
    let mut bench = Bench {
        source,
        calibration: calibration(wanted, tokenizer)?,
        base: reader::load(&assets.model, &setup)?,
        setup,
        course,
        assets: &assets,
        options: args,
        say,
    };
    let mut matrix = Matrix {
        model: assets.name.clone(),
        text: args.text.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        tokens: windows.num_tokens(),
        window: args.window,
        weights: Vec::new(),
        kv: Vec::new(),
    };
    let resume = wanted.resume.as_deref();
    resume.map_or(Ok(()), |path| saved::load(path, &mut matrix))?;
    bench.fill(&mut matrix, &recipes, &kv_formats, resume)?;
    progress.end();
    matrix.weights.sort_by_key(place);
    Ok(matrix)
}

fn has(rows: &[Row], format: &str, method: Option<&str>) -> bool {
    rows.iter().any(|row| row.format == format && row.method.as_deref() == method)
}

/// The model as it is, then formats from large to small, each by all its methods.
fn place(row: &Row) -> (Option<usize>, Option<usize>) {
    let method = row.method.as_deref().and_then(|method| METHODS.iter().position(|known| *known == method));
    (FORMATS.iter().position(|format| *format == row.format), method)
}

fn kv_formats(args: &Forms) -> Result<Vec<KvFormat>> {
    let Some(names) = &args.kv else { return Ok(vec![KvFormat::Fp8, KvFormat::Int8, KvFormat::Int4]) };
    let names = names.iter().filter(|name| *name != "none");
    let format = |name: &String| {
        let known = || KvFormat::ALL.map(KvFormat::name).join(", ");
        let found = KvFormat::ALL.into_iter().find(|format| format.name() == name);
        found.with_context(|| format!("--kv: {name} is not a format of keys and values; expected some of {}", known()))
    };
    names.map(format).collect()
}

fn calibration(args: &Forms, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    let Some(path) = &args.calibration else { return Ok(Vec::new()) };
    let amount = Amount { window: CALIBRATION_WINDOW, tokens: args.calibration_tokens };
    Ok(Windows::read(path, tokenizer, amount).context("--calibration")?.windows)
}

/// A row's work, whatever becomes of it: one format's bug must not cost the others' figures.
fn guarded(work: impl FnOnce() -> Result<Figures>) -> Result<Figures, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => outcome.map_err(|error| format!("{error:#}")),
        Err(panic) => {
            let message = panic.downcast_ref::<String>().cloned();
            let message = message.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Err(format!("panicked: {}", message.unwrap_or_default()))
        }
    }
}

/// Makes forms and measures them.
struct Bench<'a> {
    source: PathBuf,
    calibration: Vec<Vec<u32>>,
    base: Box<dyn Reader>,
    setup: Setup,
    course: Course<'a>,
    assets: &'a Assets,
    options: &'a Options,
    say: Warn,
}

impl Bench<'_> {
    /// Measures what `matrix` does not have yet, and keeps every row as it comes.
    fn fill(
        &mut self,
        matrix: &mut Matrix,
        recipes: &[Recipe],
        kv_formats: &[KvFormat],
        keep: Option<&Path>,
    ) -> Result<()> {
        let keep = |matrix: &Matrix| keep.map_or(Ok(()), |path| saved::store(path, matrix));
        if !has(&matrix.weights, AS_IT_IS, None) {
            matrix.weights.insert(0, self.base_row()?);
            keep(matrix)?;
        }
        for recipe in recipes {
            let (format, method) = (&recipe.format, recipe.method());
            if !has(&matrix.weights, format, method) {
                let outcome = guarded(|| self.weights(recipe));
                matrix.weights.push(Row { format: format.clone(), method: method.map(Into::into), outcome });
                self.say(matrix.weights.last());
                keep(matrix)?;
            }
        }
        for format in kv_formats {
            if !has(&matrix.kv, format.name(), None) {
                let outcome = guarded(|| self.keys_and_values(*format));
                matrix.kv.push(Row { format: format.name().into(), method: None, outcome });
                self.say(matrix.kv.last());
                keep(matrix)?;
            }
        }
        Ok(())
    }

    fn base_row(&mut self) -> Result<Row> {
        let compared = Comparison::with_itself(self.course.score("as it is: measuring", &mut *self.base)?);
        let size = weight_size(self.assets, &*self.base, None);
        let row = Row { format: AS_IT_IS.into(), method: None, outcome: Ok(Figures { size, compared }) };
        self.say(Some(&row));
        Ok(row)
    }

    fn weights(&mut self, recipe: &Recipe) -> Result<Figures> {
        let scratch = Scratch::new(self.say)?;
        let started = Instant::now();
        let made = self.make(recipe, scratch.path())?;
        let seconds = started.elapsed().as_secs_f64();
        let path = made.to_str().context("the scratch folder's path is not UTF-8")?;
        let assets = Assets::open(Some(path), &self.options.session)?;
        let mut model = reader::load(&assets.model, &self.setup)?;
        let stage = format!("{}: measuring", recipe.format);
        let compared = self.course.compare(&stage, &mut *self.base, &mut *model)?;
        Ok(Figures { size: weight_size(&assets, &*model, Some(seconds)), compared })
    }

    fn keys_and_values(&mut self, kv_format: KvFormat) -> Result<Figures> {
        let mut model = reader::load(&self.assets.model, &Setup { kv_format, ..self.setup.clone() })?;
        let stage = format!("keys and values as {}: measuring", kv_format.name());
        let compared = self.course.compare(&stage, &mut *self.base, &mut *model)?;
        let token_bytes = self.assets.model.spec.kv_bytes_per_token(kv_format);
        Ok(Figures { size: Size::Kv { token_bytes }, compared })
    }

    /// Makes one form below `scratch`; the path of what was made.
    fn make(&self, recipe: &Recipe, scratch: &Path) -> Result<PathBuf> {
        let method = recipe.method().unwrap_or("");
        let mut report = |progress: folio_quantize::Progress| {
            let percent = 100.0 * progress.done;
            self.course.progress.note(&format!("{} {method}: {} {percent:.0}%", recipe.format, progress.what));
        };
        match recipe.kind {
            Kind::Gguf(mix) => {
                let out = scratch.join("model.gguf");
                let threads = self.setup.threads;
                write_gguf(&GgufJob { source: &self.source, out: &out, mix, keep: &[], threads }, &mut report)?;
                Ok(out)
            }
            Kind::Folder(target, method) => {
                let out = scratch.join("model");
                let mut options = folio_quantize::Options::new(target, method);
                options.threads = self.setup.threads;
                if recipe.needs_calibration() {
                    options.calibration.clone_from(&self.calibration);
                }
                let mut writer = FolderWriter::create(&self.source, &out, &options, false)?;
                folio_quantize::run(folio_model::open(&self.source)?, &options, &mut writer, &mut report)?;
                writer.finish()?;
                Ok(out)
            }
        }
    }

    /// One line a row as it comes: a matrix takes long.
    fn say(&self, row: Option<&Row>) {
        let Some(row) = row else { return };
        let name = format!("{} {}", row.format, row.method.as_deref().unwrap_or(""));
        match &row.outcome {
            Ok(Figures { compared, .. }) => {
                let change = 100.0 * compared.perplexity_change();
                (self.say)(format_args!("{name:24} perplexity {change:+.2}%, KL {:.2e}", compared.divergence_mean));
            }
            Err(why) => (self.say)(format_args!("{name:24} failed: {why}")),
        }
    }
}

fn weight_size(assets: &Assets, reader: &dyn Reader, seconds: Option<f64>) -> Size {
    let (disk_bytes, bits_per_weight) = (size::disk_bytes(&assets.model), size::bits_per_weight(&assets.model));
    Size::Weights { bits_per_weight, disk_bytes, memory_bytes: reader.weight_bytes(), seconds }
}

/// A folder that is gone when its owner is.
struct Scratch {
    path: PathBuf,
    say: Warn,
}

impl Scratch {
    fn new(say: Warn) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("folio-eval-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(Self { path, say })
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            (self.say)(format_args!("{} stays behind: {error}", self.path.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_fails_says_why_and_ends_nobody() {
        assert_eq!(guarded(|| bail!("no room")).expect_err("it failed"), "no room");
        let panicked = guarded(|| panic!("index {} of 3", 5)).expect_err("it panicked");
        assert_eq!(panicked, "panicked: index 5 of 3");
    }

    #[test]
    fn a_scratch_folder_goes_with_its_owner() {
        let scratch = Scratch::new(|line| panic!("{line}")).expect("a folder");
        let path = scratch.path().to_owned();
        std::fs::write(path.join("file"), "x").expect("writable");
        drop(scratch);
        assert!(!path.exists());
    }
}
