//! Writes GGUF version 3: metadata, then tensors, each aligned to 32 bytes.

use std::borrow::Cow;
use std::io::{self, Write};

use super::{Array, DEFAULT_ALIGNMENT, MAGIC, Value};
use crate::Format;

/// Collects a file's content; nothing is written before [`Writer::write_to`].
#[derive(Debug, Default)]
pub struct Writer<'a> {
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor<'a>>,
}

#[derive(Debug)]
struct Tensor<'a> {
    name: String,
    type_id: u32,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

impl<'a> Writer<'a> {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        assert!(self.metadata.iter().all(|(known, _)| known != key), "{key} is set twice");
        self.metadata.push((key.to_owned(), value.into()));
        self
    }

    /// Adds a tensor; `shape` is outermost first. Panics if the bytes do not belong to the shape, or the name is taken.
    pub fn tensor(
        &mut self,
        name: &str,
        format: Format,
        shape: &[usize],
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> &mut Self {
        let bytes = bytes.into();
        let values = shape.iter().product::<usize>() as u64;
        assert_eq!(format.bytes_for(values).ok(), Some(bytes.len() as u64), "{name}: {shape:?} of {format}");
        assert!(self.tensors.iter().all(|known| known.name != name), "{name} is added twice");
        let type_id = format.gguf_id().unwrap_or_else(|| panic!("{name}: GGUF has no {format}"));
        self.tensors.push(Tensor { name: name.to_owned(), type_id, shape: shape.to_vec(), bytes });
        self
    }

    pub fn num_tensors(&self) -> usize {
        self.tensors.len()
    }

    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let mut head = Vec::new();
        head.extend(MAGIC);
        head.extend(3u32.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(key, &mut head);
            head.extend(value.id().to_le_bytes());
            put_value(value, &mut head);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            put_string(&tensor.name, &mut head);
            head.extend((tensor.shape.len() as u32).to_le_bytes());
            for dim in tensor.shape.iter().rev() {
                head.extend((*dim as u64).to_le_bytes());
            }
            head.extend(tensor.type_id.to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset = (offset + tensor.bytes.len() as u64).next_multiple_of(DEFAULT_ALIGNMENT);
        }
        pad(&mut head);
        out.write_all(&head)?;
        let mut zeros = Vec::new();
        for tensor in &self.tensors {
            out.write_all(&tensor.bytes)?;
            zeros.resize(tensor.bytes.len().next_multiple_of(DEFAULT_ALIGNMENT as usize) - tensor.bytes.len(), 0);
            out.write_all(&zeros)?;
        }
        Ok(())
    }

    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write_to(&mut out).expect("writing to memory");
        out
    }
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
}

fn put_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::U8(value) => out.push(*value),
        Value::I8(value) => out.extend(value.to_le_bytes()),
        Value::U16(value) => out.extend(value.to_le_bytes()),
        Value::I16(value) => out.extend(value.to_le_bytes()),
        Value::U32(value) => out.extend(value.to_le_bytes()),
        Value::I32(value) => out.extend(value.to_le_bytes()),
        Value::F32(value) => out.extend(value.to_le_bytes()),
        Value::Bool(value) => out.push(u8::from(*value)),
        Value::String(text) => put_string(text, out),
        Value::Array(array) => put_array(array, out),
        Value::U64(value) => out.extend(value.to_le_bytes()),
        Value::I64(value) => out.extend(value.to_le_bytes()),
        Value::F64(value) => out.extend(value.to_le_bytes()),
    }
}

fn put_array(array: &Array, out: &mut Vec<u8>) {
    out.extend(array.id().to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(items) => out.extend(items),
        Array::I8(items) => out.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::U16(items) => out.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::I16(items) => out.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::U32(items) => out.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::I32(items) => out.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::F32(items) => out.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::Bool(items) => out.extend(items.iter().map(|item| u8::from(*item))),
        Array::String(items) => items.iter().for_each(|item| put_string(item, out)),
        Array::Array(items) => items.iter().for_each(|item| put_array(item, out)),
        Array::U64(items) => out.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::I64(items) => out.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::F64(items) => out.extend(items.iter().flat_map(|item| item.to_le_bytes())),
    }
}
