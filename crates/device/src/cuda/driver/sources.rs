//! The kernels' sources, all of them, as they were when this was built.
//!
//! A file `name_sm90.cu` is for compute capability 9.0 alone; all others compile for every architecture.

use sha2::{Digest, Sha256};

#[derive(Clone, Copy, Debug)]
pub struct Source {
    pub name: &'static str,
    pub text: &'static str,
}

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        &[$(Source { name: $name, text: include_str!(concat!("../kernels/", $name)) }),*]
    };
}

/// Sorted by name. A new file is one line here.
pub const SOURCES: &[Source] = sources!["common.cuh", "probe.cu",];

/// What NVRTC is told besides the architecture, one option a line.
const OPTIONS: &str = include_str!("../kernels/options.txt");

pub fn options() -> impl Iterator<Item = &'static str> {
    OPTIONS.lines().map(str::trim).filter(|line| !line.is_empty())
}

impl Source {
    pub fn is_header(&self) -> bool {
        self.name.ends_with(".cuh")
    }

    /// Whether it is compiled for this architecture.
    pub fn is_for(&self, architecture: &str) -> bool {
        !self.is_header() && (architecture == "sm_90a" || !self.name.ends_with("_sm90.cu"))
    }
}

/// Of all sources and options. What was compiled from other sources has another.
pub fn hash() -> [u8; 32] {
    let mut hasher = Sha256::new();
    for (name, text) in SOURCES.iter().map(|source| (source.name, source.text)).chain([("options.txt", OPTIONS)]) {
        for part in [name, text] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_file_is_listed_once_and_in_order() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernels");
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut found: Vec<String> = names.filter(|name| name.ends_with(".cu") || name.ends_with(".cuh")).collect();
        found.sort();
        let listed: Vec<&str> = SOURCES.iter().map(|source| source.name).collect();
        assert_eq!(listed, found, "crates/device/src/cuda/driver/sources.rs and the folder of kernels differ");
    }
}
