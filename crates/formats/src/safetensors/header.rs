//! The JSON header of one safetensors file, checked whole before any tensor is handed out.
//!
//! The file is eight bytes of header length, the header, then the tensors' bytes: back to back,
//! with no holes, to the file's end.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::Tensor;
use crate::error::shown;
use crate::{Error, Format, MAX_TENSORS, Result};

const MAX_HEADER_BYTES: u64 = 100_000_000;
const MAX_DIMS: usize = 16;

/// A dtype of the specification; `format` is `None` if Folio does not read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dtype {
    pub name: &'static str,
    bits: u64,
    pub format: Option<Format>,
}

/// Every dtype of the safetensors specification with the bits of a value.
const DTYPES: &[(&str, u64)] = &[
    ("BOOL", 8),
    ("U8", 8),
    ("I8", 8),
    ("I16", 16),
    ("I32", 32),
    ("I64", 64),
    ("F16", 16),
    ("BF16", 16),
    ("F32", 32),
    ("F64", 64),
    ("U16", 16),
    ("U32", 32),
    ("U64", 64),
    ("C64", 64),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E5M2FNUZ", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E8M0", 8),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("F4", 4),
];

impl Dtype {
    /// Bits of a value.
    pub(super) fn bits(self) -> u64 {
        self.bits
    }

    pub(super) fn find(name: &str) -> Option<Self> {
        let (name, bits) = *DTYPES.iter().find(|(known, _)| *known == name)?;
        Some(Self { name, bits, format: Format::from_safetensors(name) })
    }
}

pub(super) struct Header {
    /// Tensors in the order of the file's bytes.
    pub tensors: Vec<Tensor>,
    pub metadata: Vec<(String, String)>,
}

impl Header {
    pub(super) fn parse(path: &Path, file: &[u8]) -> Result<Self> {
        let wrong = |field, problem| Error::Header { path: path.to_owned(), field, problem };
        let Some((length, rest)) = file.split_first_chunk::<8>() else {
            return Err(wrong("header length", format!("expected 8 bytes, the file has {}", file.len())));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER_BYTES {
            return Err(wrong("header length", format!("{length} is more than the {MAX_HEADER_BYTES} allowed")));
        }
        if length > rest.len() as u64 {
            return Err(wrong("header length", format!("{length}, but the file ends {} bytes later", rest.len())));
        }
        let (json, data) = rest.split_at(length as usize);
        let raw: RawHeader =
            serde_json::from_slice(json).map_err(|problem| wrong("header", format!("not as expected: {problem}")))?;
        let first_byte = 8 + length as usize;
        let mut tensors = Vec::with_capacity(raw.tensors.len());
        for (name, raw) in raw.tensors {
            let placed = place(&raw, data.len() as u64).map_err(|problem| Error::Tensor {
                path: path.to_owned(),
                name: shown(&name),
                problem,
            })?;
            let bytes = first_byte + placed.0 as usize..first_byte + placed.1 as usize;
            tensors.push(Tensor { name, dtype: placed.2, shape: raw.shape.0, bytes });
        }
        tensors.sort_by_key(|tensor| (tensor.bytes.start, tensor.bytes.end));
        check_back_to_back(path, &tensors, first_byte, file.len())?;
        Ok(Self { tensors, metadata: raw.metadata })
    }
}

/// Begin, end and dtype of a tensor, if all three agree with its shape and are inside `data_bytes`.
fn place(raw: &RawTensor, data_bytes: u64) -> std::result::Result<(u64, u64, Dtype), String> {
    let dtype = Dtype::find(&raw.dtype).ok_or_else(|| format!("unknown dtype {:?}", shown(&raw.dtype)))?;
    let RawOffsets(begin, end) = raw.data_offsets;
    if begin > end || end > data_bytes {
        return Err(format!("data_offsets [{begin}, {end}] lie outside the {data_bytes} bytes of data"));
    }
    let bits = raw.shape.0.iter().try_fold(dtype.bits, |bits, dim| bits.checked_mul(*dim as u64));
    let need = match bits {
        Some(bits) if bits % 8 == 0 => bits / 8,
        Some(bits) => return Err(format!("shape {:?} of {} is {bits} bits, no whole bytes", raw.shape.0, dtype.name)),
        None => return Err(format!("shape {:?} has more values than 64 bits can count", raw.shape.0)),
    };
    if need != end - begin {
        let found = end - begin;
        return Err(format!("shape {:?} of {} needs {need} bytes, but has {found}", raw.shape.0, dtype.name));
    }
    Ok((begin, end, dtype))
}

fn check_back_to_back(path: &Path, tensors: &[Tensor], first_byte: usize, file_bytes: usize) -> Result<()> {
    let mut at = first_byte;
    for tensor in tensors {
        let start = tensor.bytes.start;
        if start != at {
            let how = if start < at { "overlaps the one before it" } else { "leaves a hole before it" };
            let problem = format!("{how}: expected to start at byte {at} of the file, found {start}");
            return Err(Error::Tensor { path: path.to_owned(), name: shown(&tensor.name), problem });
        }
        at = tensor.bytes.end;
    }
    if at != file_bytes {
        let problem = format!("the tensors end at byte {at}, but the file has {file_bytes}");
        return Err(Error::Header { path: path.to_owned(), field: "data", problem });
    }
    Ok(())
}

#[derive(Default)]
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: Vec<(String, String)>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: RawShape,
    data_offsets: RawOffsets,
}

#[derive(serde::Deserialize)]
struct RawOffsets(u64, u64);

struct RawShape(Vec<usize>);

/// A JSON object as pairs in order, each key once, at most `MAX_TENSORS` of them.
pub(super) struct Pairs<T>(pub Vec<(String, T)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                let mut keys = Keys::default();
                while let Some(key) = map.next_key::<String>()? {
                    keys.add(&key)?;
                    match key.as_str() {
                        "__metadata__" => header.metadata = map.next_value::<Pairs<String>>()?.0,
                        _ => header.tensors.push((key, map.next_value()?)),
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Read)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Read<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Read<T> {
            type Value = Pairs<T>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Pairs<T>, A::Error> {
                let mut pairs = Vec::new();
                let mut keys = Keys::default();
                while let Some(key) = map.next_key::<String>()? {
                    keys.add(&key)?;
                    pairs.push((key, map.next_value()?));
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Read(std::marker::PhantomData))
    }
}

impl<'de> Deserialize<'de> for RawShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = RawShape;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a list of at most {MAX_DIMS} dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<RawShape, A::Error> {
                let mut shape = Vec::new();
                while let Some(dim) = seq.next_element::<usize>()? {
                    if shape.len() == MAX_DIMS {
                        return Err(de::Error::invalid_length(MAX_DIMS + 1, &self));
                    }
                    shape.push(dim);
                }
                Ok(RawShape(shape))
            }
        }
        deserializer.deserialize_seq(Read)
    }
}

#[derive(Default)]
struct Keys(HashSet<String>);

impl Keys {
    fn add<E: de::Error>(&mut self, key: &str) -> std::result::Result<(), E> {
        if !self.0.insert(key.to_owned()) {
            return Err(E::custom(format!("{:?} appears twice", shown(key))));
        }
        match self.0.len() as u64 > MAX_TENSORS {
            true => Err(E::custom(format!("more than {MAX_TENSORS} entries"))),
            false => Ok(()),
        }
    }
}
