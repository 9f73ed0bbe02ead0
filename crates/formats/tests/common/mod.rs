//! Builds small weight files byte by byte, good and bad.
#![allow(dead_code)]

use folio_formats::gguf::{Array, Value, Writer};
use folio_formats::quant::encode;
use folio_formats::{Format, Gguf, Mapped, Result, Safetensors};

pub const NAME: &str = "some/model.bin";

pub fn open_gguf(bytes: Vec<u8>) -> Result<Gguf> {
    Gguf::from_map(Mapped::from_vec(NAME, bytes))
}

pub fn open_safetensors(bytes: Vec<u8>) -> Result<Safetensors> {
    Safetensors::from_map(Mapped::from_vec(NAME, bytes))
}

/// A GGUF file as its parts; the default is a good one with a tensor `t` of four F32 values.
pub struct RawGguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub num_tensors: u64,
    pub num_keys: u64,
    pub keys: Vec<u8>,
    pub tensors: Vec<u8>,
    pub align: usize,
    pub data: usize,
}

impl Default for RawGguf {
    fn default() -> Self {
        let tensors = tensor("t", &[4], 0, 0);
        Self { magic: *b"GGUF", version: 3, num_tensors: 1, num_keys: 0, keys: vec![], tensors, align: 32, data: 16 }
    }
}

impl RawGguf {
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.num_tensors.to_le_bytes());
        out.extend(self.num_keys.to_le_bytes());
        out.extend(&self.keys);
        out.extend(&self.tensors);
        out.resize(out.len().next_multiple_of(self.align) + self.data, 0);
        out
    }
}

pub fn string(text: &[u8]) -> Vec<u8> {
    [(text.len() as u64).to_le_bytes().as_slice(), text].concat()
}

/// A metadata pair: key, type number, the value's bytes.
pub fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&string(name.as_bytes()), kind.to_le_bytes().as_slice(), value].concat()
}

/// The start of an array: element type and count.
pub fn array(kind: u32, count: u64) -> Vec<u8> {
    [kind.to_le_bytes().as_slice(), &count.to_le_bytes()].concat()
}

/// A row of the tensor table; `dims` innermost first.
pub fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = string(name.as_bytes());
    out.extend((dims.len() as u32).to_le_bytes());
    out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

/// A file with every kind of value and a few kinds of tensor.
pub fn good_gguf() -> Vec<u8> {
    let mut writer = Writer::new();
    writer
        .set("general.architecture", "llama")
        .set("general.alignment", 32u32)
        .set("t.u8", 1u8)
        .set("t.i8", -1i8)
        .set("t.u16", 2u16)
        .set("t.i16", -2i16)
        .set("t.i32", -3i32)
        .set("t.u64", 4u64)
        .set("t.i64", -4i64)
        .set("t.f32", 0.5f32)
        .set("t.f64", 0.25f64)
        .set("t.bool", true)
        .set("t.strings", vec!["a".to_owned(), String::new(), "ccc".to_owned()])
        .set("t.floats", vec![1.0f32, 2.0])
        .set("t.bools", vec![true, false])
        .set("t.counts", vec![3u32, 4])
        .set("t.nested", Value::Array(Array::Array(vec![Array::I32(vec![1, 2]), Array::I32(vec![])])));
    let values: Vec<f32> = (0..64).map(|i| i as f32 * 0.25 - 8.0).collect();
    let bytes = |format, values: &[f32]| encode(format, values).unwrap();
    writer.tensor("norm", Format::F32, &[3], bytes(Format::F32, &values[..3]));
    writer.tensor("matrix", Format::BF16, &[2, 5], bytes(Format::BF16, &values[..10]));
    writer.tensor("blocks", Format::Q8_0, &[2, 32], bytes(Format::Q8_0, &values));
    writer.to_vec()
}

pub fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.resize(out.len() + data, 0);
    out
}

pub const GOOD_HEADER: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"F8_E4M3FNUZ","shape":[3],"data_offsets":[32,35]},"d":{"dtype":"I64","shape":[],"data_offsets":[35,43]}}"#;

pub fn good_safetensors() -> Vec<u8> {
    safetensors(GOOD_HEADER, 43)
}
