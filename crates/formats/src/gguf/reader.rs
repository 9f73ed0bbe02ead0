//! Reads a GGUF file: header, metadata, tensor table, and the position of each tensor's bytes.
//!
//! Every length is checked against the rest of the file before anything is allocated for it. Memory
//! is bounded by the file's size too: items that take more room in memory than in the file
//! (strings, nested arrays) are counted.

use std::collections::HashSet;
use std::path::Path;

use super::{Array, DEFAULT_ALIGNMENT, MAGIC, Metadata, Tensor, TensorType, Value};
use crate::error::shown;
use crate::{Error, MAX_TENSORS, Result};

const MAX_KEYS: u64 = 1 << 16;
const MAX_KEY_BYTES: u64 = 1 << 16;
const MAX_TENSOR_NAME_BYTES: u64 = 512;
const MAX_DIMS: u32 = 4;
const MAX_ALIGNMENT: u64 = 4096;
const MAX_NESTING: usize = 8;
/// Most strings in arrays and arrays in arrays, over the whole file: ten times the largest
/// vocabulary.
const MAX_ITEMS: u64 = 1 << 22;

/// An error's text, before the file and the field are named.
type Parsed<T> = std::result::Result<T, String>;

pub(super) fn parse(path: &Path, file: &[u8]) -> Result<(Metadata, Vec<Tensor>)> {
    let wrong = |field| move |problem| Error::Header { path: path.to_owned(), field, problem };
    let mut cursor = Cursor { file, at: 0, items: 0 };
    let magic: [u8; 4] = cursor.array().map_err(wrong("magic"))?;
    if magic != MAGIC {
        return Err(wrong("magic")(format!("expected GGUF, found {:?}", shown(&String::from_utf8_lossy(&magic)))));
    }
    check_version(cursor.u32().map_err(wrong("version"))?).map_err(wrong("version"))?;
    let num_tensors = cursor.u64().map_err(wrong("tensor count"))?;
    if num_tensors > MAX_TENSORS {
        return Err(wrong("tensor count")(format!("{num_tensors} is more than the {MAX_TENSORS} allowed")));
    }
    let num_keys = cursor.u64().map_err(wrong("metadata count"))?;
    if num_keys > MAX_KEYS {
        return Err(wrong("metadata count")(format!("{num_keys} is more than the {MAX_KEYS} allowed")));
    }
    let metadata = read_metadata(path, &mut cursor, num_keys)?;
    let alignment = alignment(&metadata)?;
    let tensors = read_tensors(path, &mut cursor, num_tensors)?;
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    Ok((metadata, place(path, tensors, data_start, alignment, file.len() as u64)?))
}

fn check_version(version: u32) -> Parsed<()> {
    match version {
        2 | 3 => Ok(()),
        1 => Err("1 is too old: expected 2 or 3".to_owned()),
        _ if matches!(version.swap_bytes(), 1..=3) => Err("the file is big endian, expected little endian".to_owned()),
        _ => Err(format!("expected 2 or 3, found {version}")),
    }
}

fn read_metadata(path: &Path, cursor: &mut Cursor, count: u64) -> Result<Metadata> {
    let mut metadata = Metadata::new(path);
    for number in 0..count {
        let key = cursor.string(MAX_KEY_BYTES).map_err(|problem| Error::Header {
            path: path.to_owned(),
            field: "metadata",
            problem: format!("key {number} of {count}: {problem}"),
        })?;
        let value = cursor.value().map_err(|problem| metadata.error(key, problem))?;
        if !metadata.add(key.to_owned(), value) {
            return Err(metadata.error(key, "appears twice"));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &Metadata) -> Result<u64> {
    let key = "general.alignment";
    let alignment = metadata.find::<u64>(key)?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        let problem = format!("expected a power of two up to {MAX_ALIGNMENT}, found {alignment}");
        return Err(metadata.error(key, problem));
    }
    Ok(alignment)
}

/// A row of the tensor table, before its position in the file is checked.
struct Entry {
    name: String,
    kind: TensorType,
    shape: Vec<usize>,
    bytes: u64,
    offset: u64,
}

fn read_tensors(path: &Path, cursor: &mut Cursor, count: u64) -> Result<Vec<Entry>> {
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for number in 0..count {
        let name = cursor.string(MAX_TENSOR_NAME_BYTES).map_err(|problem| Error::Header {
            path: path.to_owned(),
            field: "tensor table",
            problem: format!("name of tensor {number} of {count}: {problem}"),
        })?;
        let entry = if names.insert(name) { cursor.tensor(name) } else { Err("appears twice".to_owned()) };
        let wrong = |problem| Error::Tensor { path: path.to_owned(), name: shown(name), problem };
        tensors.push(entry.map_err(wrong)?);
    }
    Ok(tensors)
}

/// Turns offsets into ranges of the file: aligned, inside it, and without overlaps.
fn place(path: &Path, entries: Vec<Entry>, data_start: u64, alignment: u64, file_bytes: u64) -> Result<Vec<Tensor>> {
    let wrong = |name: &str, problem| Error::Tensor { path: path.to_owned(), name: shown(name), problem };
    let data_bytes = file_bytes.saturating_sub(data_start);
    let mut tensors = Vec::with_capacity(entries.len());
    for entry in entries {
        if entry.offset % alignment != 0 {
            let problem = format!("offset {} is not a multiple of the alignment {alignment}", entry.offset);
            return Err(wrong(&entry.name, problem));
        }
        let end = match entry.offset.checked_add(entry.bytes) {
            Some(end) if end <= data_bytes => end,
            _ => {
                let problem = format!(
                    "{} bytes at offset {} end beyond the {data_bytes} bytes of data",
                    entry.bytes, entry.offset
                );
                return Err(wrong(&entry.name, problem));
            }
        };
        let bytes = (data_start + entry.offset) as usize..(data_start + end) as usize;
        tensors.push(Tensor { name: entry.name, kind: entry.kind, shape: entry.shape, bytes });
    }
    let mut order: Vec<&Tensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.bytes.start);
    if let Some(pair) = order.windows(2).find(|pair| pair[1].bytes.start < pair[0].bytes.end) {
        return Err(wrong(&pair[1].name, format!("overlaps tensor {}", shown(&pair[0].name))));
    }
    Ok(tensors)
}

struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
    /// Strings and arrays read inside arrays so far.
    items: u64,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.file.len() - self.at) as u64
    }

    fn take(&mut self, bytes: u64) -> Parsed<&'a [u8]> {
        if bytes > self.left() {
            return Err(format!("needs {bytes} bytes, but the file ends after {}", self.left()));
        }
        let start = self.at;
        self.at += bytes as usize;
        Ok(&self.file[start..self.at])
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64)?);
        Ok(bytes)
    }

    fn u32(&mut self) -> Parsed<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Parsed<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn string(&mut self, longest: u64) -> Parsed<&'a str> {
        let bytes = self.u64()?;
        if bytes > longest {
            return Err(format!("a string of {bytes} bytes, at most {longest} are allowed"));
        }
        let bytes = self.take(bytes)?;
        std::str::from_utf8(bytes).map_err(|problem| format!("a string is not UTF-8: {problem}"))
    }

    fn bool(&mut self) -> Parsed<bool> {
        match self.array::<1>()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(format!("expected a bool, found the byte {other}")),
        }
    }

    fn value(&mut self) -> Parsed<Value> {
        let id = self.u32()?;
        Ok(match id {
            0 => Value::U8(u8::from_le_bytes(self.array()?)),
            1 => Value::I8(i8::from_le_bytes(self.array()?)),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => Value::Bool(self.bool()?),
            8 => Value::String(self.string(u64::MAX)?.to_owned()),
            9 => Value::Array(self.items(1)?),
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            _ => return Err(format!("unknown value type {id}")),
        })
    }

    /// An array: the elements' type, their number, the elements.
    fn items(&mut self, depth: usize) -> Parsed<Array> {
        let (id, count) = (self.u32()?, self.u64()?);
        Ok(match id {
            0 => Array::U8(self.numbers(count, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(count, f32::from_le_bytes)?),
            7 => {
                self.count_fits(count, 1)?;
                Array::Bool((0..count).map(|_| self.bool()).collect::<Parsed<_>>()?)
            }
            8 => {
                self.count_items(count, 8)?;
                Array::String((0..count).map(|_| Ok(self.string(u64::MAX)?.to_owned())).collect::<Parsed<_>>()?)
            }
            9 if depth == MAX_NESTING => return Err(format!("arrays nested more than {MAX_NESTING} deep")),
            9 => {
                self.count_items(count, 12)?;
                Array::Array((0..count).map(|_| self.items(depth + 1)).collect::<Parsed<_>>()?)
            }
            10 => Array::U64(self.numbers(count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(count, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(count, f64::from_le_bytes)?),
            _ => return Err(format!("unknown array element type {id}")),
        })
    }

    fn numbers<T, const N: usize>(&mut self, count: u64, read: fn([u8; N]) -> T) -> Parsed<Vec<T>> {
        self.count_fits(count, N as u64)?;
        let (chunks, _) = self.take(count * N as u64)?.as_chunks::<N>();
        Ok(chunks.iter().map(|chunk| read(*chunk)).collect())
    }

    fn count_fits(&self, count: u64, smallest: u64) -> Parsed<()> {
        if count > self.left() / smallest {
            return Err(format!("an array of {count} elements, but only {} bytes are left", self.left()));
        }
        Ok(())
    }

    fn count_items(&mut self, count: u64, smallest: u64) -> Parsed<()> {
        self.count_fits(count, smallest)?;
        self.items += count;
        if self.items > MAX_ITEMS {
            return Err(format!("more than {MAX_ITEMS} strings and arrays inside arrays"));
        }
        Ok(())
    }

    /// The rest of a row of the tensor table, after the name.
    fn tensor(&mut self, name: &str) -> Parsed<Entry> {
        let num_dims = self.u32()?;
        if num_dims > MAX_DIMS {
            return Err(format!("expected at most {MAX_DIMS} dimensions, found {num_dims}"));
        }
        let mut dims = (0..num_dims).map(|_| self.u64()).collect::<Parsed<Vec<u64>>>()?;
        let id = self.u32()?;
        let offset = self.u64()?;
        let kind = TensorType::find(id).ok_or_else(|| format!("unknown tensor type {id}"))?;
        let row = dims.first().copied().unwrap_or(1);
        if !row.is_multiple_of(kind.block_len) {
            return Err(format!("rows of {row} values are not whole blocks of {} of {}", kind.block_len, kind.name));
        }
        dims.reverse();
        let bytes = dims
            .iter()
            .try_fold(1u64, |values, dim| values.checked_mul(*dim))
            .and_then(|values| (values / kind.block_len).checked_mul(kind.block_bytes))
            .ok_or_else(|| format!("shape {dims:?} needs more bytes than 64 bits can count"))?;
        if bytes == 0 {
            return Err(format!("shape {dims:?} holds no values"));
        }
        // No dimension is above the byte count, which is checked against the file next.
        let shape = dims.iter().map(|dim| usize::try_from(*dim).map_err(|_| format!("shape {dims:?} is too large")));
        Ok(Entry { name: name.to_owned(), kind, shape: shape.collect::<Parsed<_>>()?, bytes, offset })
    }
}
