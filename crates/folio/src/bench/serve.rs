//! `folio bench serve`: the load generator of `folio-measure` with the names of vLLM's flags.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_measure::Unwatched;
use folio_measure::load::{self, Report};

use crate::args::{ResultArgs, ServeBench};
use crate::progress::Bar;

pub fn main(args: &ServeBench) -> Result<()> {
    let key = ["FOLIO_API_KEY", "OPENAI_API_KEY"].into_iter().find_map(|name| std::env::var(name).ok());
    let options = args.options(key.filter(|key| !key.is_empty()))?;
    let report = match args.result.disable_tqdm {
        true => load::run(&options, Arc::new(Unwatched)),
        false => load::run(&options, Arc::new(Bar::new("{msg} {bar:30} {pos}/{len}  {rate}  {elapsed} < {eta}"))),
    }?;
    let printed = out!("{}", report.text());
    for (error, count) in report.errors() {
        say!("{count} failed: {error}");
    }
    // A file that was asked for is written even if the reader of the table has left.
    if args.result.save_result {
        save(&args.result, &report)?;
    }
    if report.metrics.completed == 0 {
        bail!("every request failed");
    }
    printed
}

fn save(args: &ResultArgs, report: &Report) -> Result<()> {
    let folder = args.result_dir.clone().unwrap_or_default();
    if args.result_dir.is_some() {
        std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    let path = folder.join(args.result_filename.clone().unwrap_or_else(|| report.file_name()));
    std::fs::write(&path, report.json().to_string()).with_context(|| path.display().to_string())
}
