//! All sources of the kernels, as they were at build time.
//!
//! A file `name_sm90.cu` is for compute capability 9.0 alone; all others compile for every
//! architecture.

use sha2::{Digest, Sha256};

#[derive(Clone, Copy, Debug)]
pub struct Source {
    pub name: &'static str,
    pub text: &'static str,
}

// `SOURCES`, every file of the folder sorted by name: the build script lists them.
include!(concat!(env!("OUT_DIR"), "/kernel_sources.rs"));

/// NVRTC's options besides the architecture, one per line.
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

/// Hash of all sources and options, to recognize kernels compiled from others.
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
