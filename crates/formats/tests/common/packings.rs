//! What `tests/golden/quantized/packings.py` wrote down.

use lzma_rust2::LzmaReader;
use serde_json::Value;

pub const TENSORS: &[u8] = include_bytes!("../../../../tests/golden/quantized/packings.safetensors");
const CASES: &[u8] = include_bytes!("../../../../tests/golden/quantized/packings.json.lzma");

pub fn golden() -> Value {
    let text = LzmaReader::new_mem_limit(CASES, 128 << 10, None).expect("packings.json.lzma");
    serde_json::from_reader(std::io::BufReader::new(text)).expect("packings.json.lzma")
}
