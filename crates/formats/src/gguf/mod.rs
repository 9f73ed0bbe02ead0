//! GGUF, versions 2 and 3, little endian: typed metadata and tensors in one file, or in numbered
//! parts of one.
//!
//! Shapes here have the outermost dimension first; GGUF itself stores the innermost first, and
//! reading and writing reverse them.

mod metadata;
mod reader;
mod types;
mod value;
mod writer;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::shown;
use crate::{Error, Mapped, Result, TensorView, WeightSource};
pub use metadata::{FromValue, Metadata};
use types::TensorType;
pub use value::{Array, Value};
pub use writer::{Entry, FileWriter, Writer};

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_PARTS: u64 = 1024;

/// A model in GGUF form, with the metadata of the first part.
#[derive(Debug)]
pub struct Gguf {
    metadata: Metadata,
    parts: Vec<Part>,
    /// Name -> (part, tensor).
    by_name: HashMap<String, (usize, usize)>,
}

#[derive(Debug)]
struct Part {
    map: Arc<Mapped>,
    tensors: Vec<Tensor>,
}

/// `bytes` is inside the part's map and has exactly the length for `kind` and `shape`.
#[derive(Debug)]
struct Tensor {
    name: String,
    kind: TensorType,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

impl Gguf {
    /// Opens a `.gguf` file. If the model has parts (`name-00001-of-00003.gguf`), any part opens
    /// them all.
    pub fn open(path: &Path) -> Result<Self> {
        let gguf = Self::from_map(Mapped::open(path)?)?;
        let parts = gguf.metadata.find::<u64>("split.count")?.unwrap_or(1);
        if parts <= 1 { Ok(gguf) } else { Self::open_parts(path, parts) }
    }

    /// A model that is part of the program; `name` stands in for a path in errors.
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Self> {
        Self::from_map(Mapped::from_static(name, bytes))
    }

    /// One file's metadata and tensors, from an existing map.
    pub fn from_map(map: Arc<Mapped>) -> Result<Self> {
        let (metadata, tensors) = reader::parse(map.path(), map.bytes())?;
        let by_name = tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), (0, at))).collect();
        Ok(Self { metadata, parts: vec![Part { map, tensors }], by_name })
    }

    fn open_parts(path: &Path, count: u64) -> Result<Self> {
        let wrong = |problem| Error::Metadata { path: path.to_owned(), key: "split.count".to_owned(), problem };
        if count > MAX_PARTS {
            return Err(wrong(format!("{count} parts are more than the {MAX_PARTS} allowed")));
        }
        let stem = part_stem(path, count)
            .ok_or_else(|| wrong(format!("{count} parts, but the file is not named NAME-00001-of-{count:05}.gguf")))?;
        let mut whole: Option<Self> = None;
        for number in 1..=count {
            let path = path.with_file_name(part_name(&stem, number, count));
            let part = Self::from_map(Mapped::open(&path)?)?;
            match &mut whole {
                None => whole = Some(part),
                Some(whole) => whole.add_part(part)?,
            }
        }
        whole.ok_or_else(|| wrong("no parts".to_owned()))
    }

    fn add_part(&mut self, other: Self) -> Result<()> {
        let at = self.parts.len();
        for (name, (_, tensor)) in other.by_name {
            if self.by_name.contains_key(&name) {
                let problem = "is in an earlier part too".to_owned();
                return Err(Error::Tensor { path: other.metadata.path().to_owned(), name: shown(&name), problem });
            }
            self.by_name.insert(name, (at, tensor));
        }
        self.parts.extend(other.parts);
        Ok(())
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    pub fn u32(&self, key: &str) -> Result<u32> {
        self.metadata.u32(key)
    }

    pub fn f32(&self, key: &str) -> Result<f32> {
        self.metadata.f32(key)
    }

    pub fn str(&self, key: &str) -> Result<&str> {
        self.metadata.str(key)
    }

    pub fn bool(&self, key: &str) -> Result<bool> {
        self.metadata.bool(key)
    }

    pub fn array(&self, key: &str) -> Result<&Array> {
        self.metadata.array(key)
    }

    /// The file, or the name that stands in for one.
    pub fn path(&self) -> &Path {
        self.metadata.path()
    }

    fn find(&self, name: &str) -> Option<(&Part, &Tensor)> {
        let (part, tensor) = *self.by_name.get(name)?;
        let part = &self.parts[part];
        Some((part, &part.tensors[tensor]))
    }
}

/// `name` of `name-00002-of-00003.gguf`, if the path has this form and the count agrees.
fn part_stem(path: &Path, count: u64) -> Option<String> {
    let rest = path.file_name()?.to_str()?.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (stem, number) = rest.rsplit_once('-')?;
    (number.len() == 5 && number.bytes().all(|byte| byte.is_ascii_digit())).then(|| stem.to_owned())
}

fn part_name(stem: &str, number: u64, count: u64) -> PathBuf {
    PathBuf::from(format!("{stem}-{number:05}-of-{count:05}.gguf"))
}

impl Part {
    fn view<'a>(&'a self, tensor: &'a Tensor) -> Option<TensorView<'a>> {
        let format = tensor.kind.format()?;
        let bytes = &self.map.bytes()[tensor.bytes.clone()];
        Some(TensorView { name: &tensor.name, format, shape: tensor.shape.clone(), bytes })
    }
}

impl WeightSource for Gguf {
    fn names(&self) -> Vec<&str> {
        self.parts.iter().flat_map(|part| &part.tensors).map(|tensor| tensor.name.as_str()).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (part, tensor) = self.find(name)?;
        part.view(tensor)
    }

    fn require(&self, name: &str) -> Result<TensorView<'_>> {
        let Some((part, tensor)) = self.find(name) else {
            return Err(Error::MissingTensor { place: self.path().display().to_string(), name: shown(name) });
        };
        part.view(tensor).ok_or_else(|| Error::Unsupported {
            path: part.map.path().to_owned(),
            name: shown(name),
            dtype: tensor.kind.name.to_owned(),
        })
    }

    fn release(&self, name: &str) {
        if let Some((part, tensor)) = self.find(name) {
            part.map.release(tensor.bytes.clone());
        }
    }

    fn check(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.map.check())
    }

    fn rest(&self) {
        self.parts.iter().for_each(|part| part.map.rest());
    }
}
