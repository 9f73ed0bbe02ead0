//! Reads the golden files of `tests/golden/quantized/gptq_awq_bitsandbytes.py`.

use std::io::Read;
use std::path::Path;

use folio_formats::{Mapped, Safetensors};
use lzma_rust2::LzmaReader;
use serde_json::Value;

/// The cases, and their tensors.
pub fn golden() -> (Value, Safetensors) {
    let json = serde_json::from_slice(&unpacked("json")).expect("cases");
    let tensors = Mapped::from_vec("gptq_awq_bitsandbytes.safetensors", unpacked("safetensors"));
    (json, Safetensors::from_map(tensors).expect("tensors"))
}

fn unpacked(ending: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/quantized");
    let file = std::fs::File::open(folder.join(format!("gptq_awq_bitsandbytes.{ending}.lzma"))).expect("a golden");
    let mut bytes = Vec::new();
    let mut reader = LzmaReader::new_mem_limit(std::io::BufReader::new(file), 128 << 10, None).expect("compressed");
    reader.read_to_end(&mut bytes).expect("compressed");
    bytes
}
