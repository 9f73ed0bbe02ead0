//! Lists the kernels' sources, so that a new file needs no registration.

use std::fmt::Write;
use std::path::Path;

const FOLDER: &str = "src/cuda/kernels";

fn main() {
    println!("cargo:rerun-if-changed={FOLDER}");
    let folder = Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join(FOLDER);
    let entries = std::fs::read_dir(&folder).expect("the folder of kernels").flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| name.ends_with(".cu") || name.ends_with(".cuh"));
    names.sort();
    let mut out = String::from("pub const SOURCES: &[Source] = &[\n");
    for name in &names {
        let path = folder.join(name);
        writeln!(out, "    Source {{ name: {name:?}, text: include_str!({path:?}) }},").expect("a string grows");
    }
    out.push_str("];\n");
    let target = Path::new(&std::env::var("OUT_DIR").expect("cargo sets it")).join("kernel_sources.rs");
    std::fs::write(target, out).expect("the build's folder can be written");
}
