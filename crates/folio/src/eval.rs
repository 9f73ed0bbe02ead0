//! `folio eval`: flags become options of `folio-measure`, and its reports are printed.

use std::path::PathBuf;

use anyhow::{Context, Result};
use folio_measure::eval::{self, Matrix, matrix};

use crate::args::EvalArgs;
use crate::progress::Bar;

pub fn main(args: &EvalArgs) -> Result<()> {
    let (options, bar) = (args.options(), Bar::new("{msg} {bar:30} {pos}/{len} tokens {eta}"));
    match &args.against.against {
        _ if args.matrix.matrix => {
            let say = |line: std::fmt::Arguments<'_>| say!("{line}");
            finish(args, &matrix::measure(&options, &args.matrix.forms(), &bar, say)?)
        }
        Some(base) => {
            let report = eval::compare(&options, base, args.against.against_backend.into(), &bar)?;
            match args.json {
                true => outln!("{}", report.json()),
                false => out!("{}", report.text()),
            }
        }
        None => {
            let report = eval::score(&options, &bar)?;
            match args.json {
                true => outln!("{}", report.json()),
                false => out!("{}", report.text()),
            }
        }
    }
}

fn finish(args: &EvalArgs, matrix: &Matrix) -> Result<()> {
    let write = |path: &Option<PathBuf>, text: &dyn Fn() -> String| match path {
        Some(path) => std::fs::write(path, text()).with_context(|| path.display().to_string()),
        None => Ok(()),
    };
    let printed = match args.json {
        true => outln!("{}", matrix.json()),
        false => outln!("{}", matrix.text()),
    };
    // Files that were asked for are written even if the reader of the table has left.
    write(&args.matrix.svg, &|| matrix.svg())?;
    write(&args.matrix.markdown, &|| matrix.markdown())?;
    printed
}
