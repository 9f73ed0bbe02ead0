//! `cargo xtask gates`: speed that a busy machine cannot blur. Instructions are counted, not seconds: those of the CPU
//! kernels' inner loops, and those that the code around the model takes for fixed work. Counts are held against
//! committed tables, which are true of one compiler.

mod counts;
mod kernels;
mod loops;
mod table;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{prepare, process};
use table::Table;

/// Relative to the repository's root.
const KERNELS: &str = "xtask/src/gates/kernels.txt";
/// One instruction more is a loss in loops of up to 66, which nearly all of the products are.
const KERNELS_MARGIN: f64 = 0.015;
const COUNTS: &str = "xtask/src/gates/counts.txt";
/// Hash tables have another key in every run, and a thread may have to wait: that is up to 0.5%.
const COUNTS_MARGIN: f64 = 0.03;

/// Fails on a loss; `--write` renews the tables instead. A name asks for one of them alone.
pub fn run(args: &[String]) -> Result<()> {
    let (flags, names): (Vec<&String>, Vec<&String>) = args.iter().partition(|arg| *arg == "--write");
    let writes = !flags.is_empty();
    let (kernels, counts) = match names[..] {
        [] => (true, true),
        [name] if name == "kernels" => (true, false),
        [name] if name == "counts" => (false, true),
        _ => bail!("expected kernels, counts or neither, and --write or not; found {}", args.join(" ")),
    };
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        eprintln!("skipped: instructions are counted on x86-64 Linux");
        return Ok(());
    }
    let compiler = process::output(&mut process::command("rustc", &["--version"]))?.trim().to_owned();
    if kernels {
        kernels_gate(&compiler, writes)?;
    }
    if counts { counts_gate(&compiler, writes) } else { Ok(()) }
}

fn kernels_gate(compiler: &str, write: bool) -> Result<()> {
    if !prepare::programs(&["objdump", "addr2line"], &["binutils"], "the kernels' gate")? {
        return Ok(());
    }
    let mut found = Table::new(compiler);
    for program in examples(&kernels::EXAMPLES, kernels::as_released)? {
        kernels::measure(&program, &mut found)?;
    }
    judge(KERNELS, &found, KERNELS_MARGIN, write)
}

/// Whether it is here; on a continuous-integration machine it is installed.
pub fn valgrind() -> Result<bool> {
    prepare::programs(&["valgrind"], &["valgrind"], "the gate of instruction counts")
}

fn counts_gate(compiler: &str, write: bool) -> Result<()> {
    if !valgrind()? {
        return Ok(());
    }
    // Memory is allocated and copied by the C library.
    let library = process::output(&mut process::command("getconf", &["GNU_LIBC_VERSION"]));
    let library = library.unwrap_or_else(|_| "no glibc".into());
    let mut found = Table::new(&format!("{compiler}, {}", library.trim()));
    for program in examples(&[counts::EXAMPLE], counts::as_tested)? {
        counts::measure(&program, &mut found)?;
    }
    judge(COUNTS, &found, COUNTS_MARGIN, write)
}

/// The programs that these examples became. All of the workspace takes part, so that but for what `change` changes nothing
/// is compiled otherwise than for the tests.
fn examples(names: &[&str], change: impl FnOnce(&mut Command)) -> Result<Vec<PathBuf>> {
    let mut build = process::cargo(&["build", "--quiet", "--workspace"]);
    change(build.args(names.iter().flat_map(|name| ["--example", name])));
    let mut built = process::programs(&mut build)?;
    let program = |name: &&str| built.remove(*name).with_context(|| format!("cargo built no example {name}"));
    names.iter().map(program).collect()
}

fn judge(file: &str, found: &Table, margin: f64, write: bool) -> Result<()> {
    let path = process::root().join(file);
    if write {
        return std::fs::write(&path, found.to_text()).with_context(|| format!("could not write {file}"));
    }
    let known = std::fs::read_to_string(&path).with_context(|| format!("could not read {file}"))?;
    let known = Table::parse(&known).with_context(|| file.to_owned())?;
    if known.compiler != found.compiler {
        eprintln!(
            "skipped: {file} is of {}, but this is {}: cargo xtask gates --write",
            known.compiler, found.compiler
        );
        return Ok(());
    }
    let differences = known.compare(found, margin);
    for news in &differences.news {
        eprintln!("{news}");
    }
    if !differences.news.is_empty() {
        eprintln!("fewer or others than in {file}: cargo xtask gates --write renews it");
    }
    if !differences.losses.is_empty() {
        bail!(
            "more instructions than in {file}, or work that is gone:\n  {}\nwhere that is meant: cargo xtask gates --write",
            differences.losses.join("\n  ")
        );
    }
    eprintln!("{} counts of {file} hold", known.len());
    Ok(())
}
