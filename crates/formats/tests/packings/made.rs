//! Reads the golden files of `tests/golden/quantized/packings.py`.

use std::io::Read;

use folio_formats::{Mapped, Safetensors};
use lzma_rust2::LzmaReader;
use serde_json::Value;

const TENSORS: &[u8] = include_bytes!("../../../../tests/golden/quantized/packings.safetensors.lzma");
const CASES: &[u8] = include_bytes!("../../../../tests/golden/quantized/packings.json.lzma");

pub fn golden() -> Value {
    serde_json::from_slice(&unpacked(CASES)).expect("packings.json.lzma")
}

/// The tensors' file.
pub fn tensors() -> Vec<u8> {
    unpacked(TENSORS)
}

/// The tensors' file, or a changed copy of it.
pub fn source(bytes: Vec<u8>) -> Safetensors {
    Safetensors::from_map(Mapped::from_vec("packings.safetensors", bytes)).expect("packings.safetensors")
}

fn unpacked(packed: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut reader = LzmaReader::new_mem_limit(packed, 128 << 10, None).expect("a compressed file");
    reader.read_to_end(&mut bytes).expect("a compressed file");
    bytes
}
