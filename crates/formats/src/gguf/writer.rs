//! Writes GGUF version 3: metadata, then tensors, each aligned to 32 bytes.
//!
//! [`Writer`] holds a whole file's content; [`FileWriter`] gets the tensors' names, formats and
//! shapes first and then their bytes, one tensor after the other.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::{Array, DEFAULT_ALIGNMENT, MAGIC, Value};
use crate::{Error, Format, Result};

/// Collects a file's content; nothing is written before [`Writer::write_to`].
#[derive(Debug, Default)]
pub struct Writer<'a> {
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor<'a>>,
}

#[derive(Debug)]
struct Tensor<'a> {
    entry: Entry,
    bytes: Cow<'a, [u8]>,
}

/// A row of the tensor table; `shape` is outermost first.
#[derive(Clone, Debug)]
pub struct Entry {
    name: String,
    type_id: u32,
    shape: Vec<usize>,
    bytes: u64,
}

impl Entry {
    /// Panics if the shape is not whole blocks of the format, or GGUF does not have the format.
    pub fn new(name: &str, format: Format, shape: &[usize]) -> Self {
        let values = shape.iter().product::<usize>() as u64;
        let bytes = format.bytes_for(values).unwrap_or_else(|error| panic!("{name}: {shape:?} of {format}: {error}"));
        let type_id = format.gguf_id().unwrap_or_else(|| panic!("{name}: GGUF has no {format}"));
        Self { name: name.to_owned(), type_id, shape: shape.to_vec(), bytes }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
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

    /// Adds a tensor; `shape` is outermost first. Panics if the bytes do not match the shape, or
    /// the name exists.
    pub fn tensor(
        &mut self,
        name: &str,
        format: Format,
        shape: &[usize],
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> &mut Self {
        let bytes = bytes.into();
        let entry = Entry::new(name, format, shape);
        assert_eq!(entry.bytes, bytes.len() as u64, "{name}: {shape:?} of {format}");
        assert!(self.tensors.iter().all(|known| known.entry.name != name), "{name} is added twice");
        self.tensors.push(Tensor { entry, bytes });
        self
    }

    pub fn num_tensors(&self) -> usize {
        self.tensors.len()
    }

    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&head(&self.metadata, self.tensors.iter().map(|tensor| &tensor.entry)))?;
        self.tensors.iter().try_for_each(|tensor| write_padded(&tensor.bytes, out))
    }

    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write_to(&mut out).expect("writing to memory");
        out
    }
}

/// A file that gets its tensors one by one. It has a temporary name until [`FileWriter::finish`].
#[derive(Debug)]
pub struct FileWriter {
    path: PathBuf,
    out: BufWriter<File>,
    entries: std::vec::IntoIter<Entry>,
}

impl FileWriter {
    pub fn create(path: &Path, metadata: &[(String, Value)], entries: Vec<Entry>) -> Result<Self> {
        let part = part_path(path);
        let io = |source| Error::Io { path: part.clone(), source };
        let mut out = BufWriter::with_capacity(1 << 20, File::create(&part).map_err(io)?);
        out.write_all(&head(metadata, entries.iter())).map_err(io)?;
        Ok(Self { path: path.to_owned(), out, entries: entries.into_iter() })
    }

    /// Writes the next tensor of the table. Panics if another tensor is next or the bytes are not
    /// as declared.
    pub fn tensor(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let entry = self.entries.next().unwrap_or_else(|| panic!("{name} is one tensor too many"));
        assert_eq!((entry.name.as_str(), entry.bytes), (name, bytes.len() as u64), "the next tensor");
        let io = |source| Error::Io { path: part_path(&self.path), source };
        write_padded(bytes, &mut self.out).map_err(io)
    }

    /// Panics if tensors are missing.
    pub fn finish(mut self) -> Result<()> {
        assert_eq!(self.entries.len(), 0, "tensors that were declared are missing");
        let io = |source| Error::Io { path: self.path.clone(), source };
        self.out.flush().map_err(io)?;
        self.out.get_ref().sync_all().map_err(io)?;
        std::fs::rename(part_path(&self.path), &self.path).map_err(io)
    }
}

fn part_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// Everything before the first tensor's bytes.
fn head<'e>(metadata: &[(String, Value)], entries: impl ExactSizeIterator<Item = &'e Entry>) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend(3u32.to_le_bytes());
    head.extend((entries.len() as u64).to_le_bytes());
    head.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_string(key, &mut head);
        head.extend(value.id().to_le_bytes());
        put_value(value, &mut head);
    }
    let mut offset = 0u64;
    for entry in entries {
        put_string(&entry.name, &mut head);
        head.extend((entry.shape.len() as u32).to_le_bytes());
        for dim in entry.shape.iter().rev() {
            head.extend((*dim as u64).to_le_bytes());
        }
        head.extend(entry.type_id.to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset = (offset + entry.bytes).next_multiple_of(DEFAULT_ALIGNMENT);
    }
    pad(&mut head);
    head
}

fn write_padded(bytes: &[u8], out: &mut impl Write) -> io::Result<()> {
    const ZEROS: [u8; DEFAULT_ALIGNMENT as usize] = [0; DEFAULT_ALIGNMENT as usize];
    out.write_all(bytes)?;
    out.write_all(&ZEROS[..bytes.len().next_multiple_of(ZEROS.len()) - bytes.len()])
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
