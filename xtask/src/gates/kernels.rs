//! The gate of the CPU kernels: instructions in the inner loop for each byte of weights, read from
//! the disassembly.
//!
//! It disassembles two examples, compiled as for the tests, but without the standard library's
//! checks of unsafe code's promises: releases do not have them, and they would dominate a kernel's
//! loops.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::loops::{self, Loop};
use super::table::{Count, Table};
use crate::process;

/// Together they have all products and all attention, for every instruction set of this
/// architecture.
pub const EXAMPLES: [&str; 2] = ["matmul", "attention"];
/// The mangled path of the backend.
const CPU: &str = "12folio_device3cpu";
/// Functions that are inner loops and are inlined into their callers; their parameters name their
/// types.
const INLINED: [&str; 3] = ["part", "score", "accumulate"];
/// Functions of these modules are kernels themselves.
const KERNELS: &str = "folio_device::cpu::matmul::";

/// Makes the loops those of a release, instruction by instruction.
pub fn as_released(build: &mut Command) {
    let profile = "profile.dev.package.folio-device";
    build.args(["--config", &format!("{profile}.debug-assertions=false")]);
    build.args(["--config", &format!("{profile}.overflow-checks=true")]);
    // A release is optimized across the pieces that a crate is divided into, the tests are not.
    build.args(["--config", "profile.dev.lto=false"]);
    // That compiles the kernels' dependencies once more as well, but none of their code is
    // examined.
    build.args(["--config", "profile.dev.opt-level=0"]);
    // Incremental compilation divides the code differently, and the division decides what is
    // inlined.
    build.env("CARGO_INCREMENTAL", "0");
}

/// A kernel and its variant.
type Name = (String, String);

/// The inner loops of a program, by kernel and variant.
pub fn measure(program: &Path, table: &mut Table) -> Result<()> {
    let mut objdump = process::command("objdump", &["-d", "-j", ".text", "-M", "intel", "--no-show-raw-insn"]);
    let loops = loops::find(&process::output(objdump.arg(program))?, CPU);
    ensure!(!loops.is_empty(), "{} has no loop that multiplies", program.display());
    let mut resolve = process::command("addr2line", &["-a", "-f", "-i", "-C", "-e"]);
    let products = loops.iter().flat_map(|found| &found.products);
    resolve.arg(program).args(products.map(|address| format!("{address:#x}")));
    let printed = process::output(&mut resolve)?;
    let names: BTreeMap<u64, Name> =
        frames(&printed)?.into_iter().filter_map(|(address, frames)| Some((address, name(&frames)?))).collect();
    let mut longest: BTreeMap<&Name, &Loop> = BTreeMap::new();
    for found in &loops {
        let Some(name) = most_frequent(found.products.iter().filter_map(|address| names.get(address))) else {
            continue;
        };
        // Takes the loop that does most at a time; the others are its tails. If paths differ, takes
        // the longer one.
        let size = |found: &Loop| (found.products.len(), found.instructions);
        let kept = longest.entry(name).or_insert(found);
        if size(found) > size(kept) {
            *kept = found;
        }
    }
    for ((kernel, variant), found) in longest {
        // If all reads are broadcasts or constants, there are no bytes to divide by.
        let per = if found.bytes > 0 { found.bytes } else { found.products.len() };
        table.insert(kernel, variant, Count { instructions: found.instructions as u64, per: per as u64 });
    }
    Ok(())
}

/// The compiler may have merged equal ends of two kernels, so a single product may belong to the
/// other one.
fn most_frequent<'a>(names: impl Iterator<Item = &'a Name>) -> Option<&'a Name> {
    let mut counts: BTreeMap<&Name, usize> = BTreeMap::new();
    names.for_each(|name| *counts.entry(name).or_default() += 1);
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(name, _)| name)
}

/// Parses addr2line's output: an address, then functions and places in turns, from the innermost
/// outwards.
fn frames(printed: &str) -> Result<BTreeMap<u64, Vec<&str>>> {
    let mut all = BTreeMap::new();
    let mut lines = printed.lines().peekable();
    while let Some(address) = lines.next() {
        let address = address.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
        let address = address.context("addr2line printed no address")?;
        let frames: &mut Vec<&str> = all.entry(address).or_default();
        while let Some(function) = lines.next_if(|line| !line.starts_with("0x")) {
            frames.push(function);
            lines.next();
        }
    }
    Ok(all)
}

/// Kernel and variant: types name the first, numbers (the tile's height and width) the second. The
/// outermost function has its parameters; the innermost gets the outermost's path instead of its
/// own.
fn name(frames: &[&str]) -> Option<Name> {
    let base = |function: &str| function.split('<').next().unwrap_or_default().to_owned();
    let inlined = frames.iter().find(|function| INLINED.contains(&base(function).as_str()));
    let function = inlined.or(frames.last())?;
    let kernel = if inlined.is_some() { base(function) } else { frames.first()?.strip_prefix(KERNELS)?.to_owned() };
    let parameters = function.split_once('<').and_then(|(_, rest)| rest.strip_suffix('>')).unwrap_or("1");
    let (numbers, types): (Vec<&str>, Vec<&str>) =
        parameters.split(", ").partition(|parameter| parameter.parse::<usize>().is_ok());
    let kernel = [kernel].into_iter().chain(types.into_iter().map(short)).collect::<Vec<_>>().join(" ");
    Some((kernel, numbers.join("x")))
}

/// Shortens `folio_device::cpu::kv::scaled::Scaled<folio_device::cpu::kv::scaled::Int8>` to
/// `Scaled<Int8>`, with the module in front if it is the instruction set.
fn short(path: &str) -> String {
    let last = |path: &str| path.rsplit("::").next().unwrap_or_default().to_owned();
    let name = path.split('<').map(last).collect::<Vec<_>>().join("<");
    let sets = ["avx512", "avx2", "neon", "scalar"];
    match sets.iter().find(|set| path.contains(&format!("::{set}::"))) {
        Some(set) => format!("{set}::{name}"),
        None => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
0x0000000000001026
folio_device::cpu::matmul::avx512::f32_rows
/core_arch/src/x86/avx512f.rs:2
part<folio_device::cpu::matmul::avx512::Sixteen, folio_device::cpu::matmul::tile::F32, 14, 2>
/crates/device/src/cpu/matmul/tile.rs:215
f32_rows<14>
/crates/device/src/cpu/matmul/avx512.rs:100
0x0000000000002000
folio_device::cpu::matmul::avx512::bf16_rows
/core_arch/src/x86/avx512bf16.rs:3
bf16_rows<14>
/crates/device/src/cpu/matmul/avx512.rs:140
0x0000000000002800
folio_device::cpu::matmul::integer::avx512_row::bytes
/crates/device/src/cpu/matmul/integer/avx512_row.rs:90
0x0000000000003000
folio_device::cpu::norm::rms
??:0
";

    #[test]
    fn kernels_are_named_by_their_parameters() {
        let frames = frames(PRINTED).unwrap();
        let name = |address: u64| name(&frames[&address]);
        let pair = |kernel: &str, variant: &str| Some((kernel.to_owned(), variant.to_owned()));
        assert_eq!(name(0x1026), pair("part avx512::Sixteen F32", "14x2"));
        assert_eq!(name(0x2000), pair("avx512::bf16_rows", "14"));
        assert_eq!(name(0x2800), pair("integer::avx512_row::bytes", "1"));
        assert_eq!(name(0x3000), None);
        let names = [pair("a", "1"), pair("b", "1"), pair("b", "1")].map(|name| name.unwrap());
        assert_eq!(most_frequent(names.iter()), Some(&names[1]));
        assert_eq!(short("folio_device::cpu::kv::scaled::Scaled<folio_device::cpu::kv::scaled::Int8>"), "Scaled<Int8>");
    }
}
