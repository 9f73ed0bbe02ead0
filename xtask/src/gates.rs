//! `cargo xtask gates`: speed that a busy machine cannot blur. It counts instructions, not seconds:
//! those of the CPU kernels' inner loops, and those that the code around the model takes for fixed
//! work. The counts are compared with committed tables. A table holds for one compiler and one C
//! library, so a change of either renews it in the same commit.

mod counts;
mod kernels;
mod loops;
mod table;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::skips::Skips;
use crate::{prepare, process};
use table::Table;

/// Relative to the repository's root.
const KERNELS: &str = "xtask/src/gates/kernels.txt";
/// One instruction more is a loss in loops of up to 66, which nearly all of the products are.
const KERNELS_MARGIN: f64 = 0.015;
const COUNTS: &str = "xtask/src/gates/counts.txt";
/// Hash tables have another key in every run, and a thread may have to wait: up to 0.5%.
const COUNTS_MARGIN: f64 = 0.03;

const STAGE: &str = "gates";

/// Fails on a loss; `--write` renews the tables instead. A name selects one of them.
pub fn run(args: &[String]) -> Result<Skips> {
    let (flags, names): (Vec<&String>, Vec<&String>) = args.iter().partition(|arg| *arg == "--write");
    let writes = !flags.is_empty();
    let (kernels, counts) = match names[..] {
        [] => (true, true),
        [name] if name == "kernels" => (true, false),
        [name] if name == "counts" => (false, true),
        _ => bail!("expected kernels, counts or neither, and --write or not; found {}", args.join(" ")),
    };
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        return Skips::stage(STAGE, "instructions are counted on x86-64 Linux");
    }
    let compiler = process::output(&mut process::command("rustc", &["--version"]))?.trim().to_owned();
    let mut skips = Skips::none();
    if kernels {
        skips.add(kernels_gate(&compiler, writes)?);
    }
    if counts {
        skips.add(counts_gate(&compiler, writes)?);
    }
    if writes && !skips.is_empty() {
        bail!("could not renew every table:\n{}", skips.to_text());
    }
    Ok(skips)
}

fn kernels_gate(compiler: &str, write: bool) -> Result<Skips> {
    if let Some(skips) = prepare::programs("gates of kernels", &["objdump", "addr2line"], &["binutils"])? {
        return Ok(skips);
    }
    let mut found = Table::new(compiler);
    let known = known(KERNELS, compiler, write)?;
    for program in examples(&kernels::EXAMPLES, kernels::as_released)? {
        kernels::measure(&program, &mut found)?;
    }
    finish(KERNELS, known, &found, KERNELS_MARGIN)?;
    Ok(Skips::none())
}

/// `None`: valgrind is here. A machine of continuous integration installs it.
pub fn valgrind() -> Result<Option<Skips>> {
    prepare::programs("gates of counts", &["valgrind"], &["valgrind"])
}

fn counts_gate(compiler: &str, write: bool) -> Result<Skips> {
    if let Some(skips) = valgrind()? {
        return Ok(skips);
    }
    // The C library allocates and copies memory.
    let library = process::output(&mut process::command("getconf", &["GNU_LIBC_VERSION"]));
    let library = library.unwrap_or_else(|_| "no glibc".into());
    let mut found = Table::new(&format!("{compiler}, {}", library.trim()));
    let known = known(COUNTS, &found.compiler, write)?;
    for program in examples(&[counts::EXAMPLE], counts::as_tested)? {
        counts::measure(&program, &mut found)?;
    }
    finish(COUNTS, known, &found, COUNTS_MARGIN)?;
    Ok(Skips::none())
}

/// The programs of these examples. The whole workspace takes part in the build, so that only what
/// `change` changes is compiled otherwise than for the tests.
fn examples(names: &[&str], change: impl FnOnce(&mut Command)) -> Result<Vec<PathBuf>> {
    let mut build = process::cargo(&["build", "--quiet", "--workspace"]);
    change(build.args(names.iter().flat_map(|name| ["--example", name])));
    let mut built = process::programs(&mut build)?;
    let program = |name: &&str| built.remove(*name).with_context(|| format!("cargo built no example {name}"));
    names.iter().map(program).collect()
}

/// The committed table, read before anything is measured. `None`: it is to be written anew.
fn known(file: &str, compiler: &str, write: bool) -> Result<Option<Table>> {
    if write {
        return Ok(None);
    }
    let text = std::fs::read_to_string(process::root().join(file)).with_context(|| format!("could not read {file}"))?;
    let known = Table::parse(&text).with_context(|| file.to_owned())?;
    check_compiler(file, &known.compiler, compiler)?;
    Ok(Some(known))
}

/// A gate without a table for this compiler would check nothing.
fn check_compiler(file: &str, known: &str, found: &str) -> Result<()> {
    if known != found {
        bail!(
            "{file} was counted with {known}, and this machine has {found}: \
             renew the tables in this commit: cargo xtask gates --write"
        );
    }
    Ok(())
}

/// Compares with the known table, or writes the table.
fn finish(file: &str, known: Option<Table>, found: &Table, margin: f64) -> Result<()> {
    let Some(known) = known else {
        let path = process::root().join(file);
        return std::fs::write(path, found.to_text()).with_context(|| format!("could not write {file}"));
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_compiler_or_c_library_fails() {
        let known = "rustc 1.95.0, glibc 2.36";
        assert!(check_compiler(COUNTS, known, known).is_ok());
        for found in ["rustc 1.96.0, glibc 2.36", "rustc 1.95.0, glibc 2.41", "rustc 1.95.0, no glibc"] {
            let error = check_compiler(COUNTS, known, found).unwrap_err().to_string();
            assert!(error.contains("renew the tables in this commit: cargo xtask gates --write"), "{error}");
            assert!(error.contains(known) && error.contains(found), "{error}");
        }
    }

    #[test]
    fn committed_tables_are_of_one_compiler_and_not_empty() {
        for file in [KERNELS, COUNTS] {
            let text = std::fs::read_to_string(process::root().join(file)).unwrap();
            let compiler = text.lines().next().unwrap().trim_start_matches("# ");
            let table = known(file, compiler, false).unwrap().expect("a table");
            assert!(table.len() > 6, "{file}: {} counts", table.len());
            assert!(known(file, "rustc 0.1", false).is_err());
            assert!(known(file, "rustc 0.1", true).unwrap().is_none());
        }
    }
}
