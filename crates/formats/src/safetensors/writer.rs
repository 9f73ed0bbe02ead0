//! Writes a model's tensors into a folder, one after the other, in shards of at most a given size.
//!
//! A shard's header stands before its tensors and is known only after them, so tensors are
//! collected in a spool file that becomes the shard when it is full. Shards have temporary names
//! until [`Writer::finish`], when their number is known: an interrupted run leaves nothing that
//! reads as a model.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::header::Dtype;
use crate::{Error, Result};

/// A shard of this size is closed, unless it holds a single larger tensor. transformers uses the
/// same size.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// A tensor as a safetensors file holds it, of any type.
#[derive(Clone, Debug)]
pub struct Stored<'a> {
    /// The file's spelling: `BF16`, `I32`, `F8_E4M3`.
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: &'a [u8],
}

#[derive(Debug)]
pub struct Writer {
    folder: PathBuf,
    shard_bytes: u64,
    spool: Spool,
    /// Tensor names of the finished shards, in the files' order.
    shards: Vec<Vec<String>>,
    names: HashSet<String>,
    bytes_total: u64,
}

/// Result of [`Writer::finish`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub files: Vec<String>,
    /// Bytes of tensors, headers not counted.
    pub bytes: u64,
    pub num_tensors: usize,
}

#[derive(Debug)]
struct Spool {
    path: PathBuf,
    file: BufWriter<File>,
    tensors: Vec<Spooled>,
    bytes: u64,
}

#[derive(Debug)]
struct Spooled {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    start: u64,
    bytes: u64,
}

impl Writer {
    /// Writes into an existing folder without a model.
    pub fn create(folder: &Path, shard_bytes: u64) -> Result<Self> {
        let spool = Spool::create(folder, 0)?;
        let (folder, shards, names) = (folder.to_owned(), Vec::new(), HashSet::new());
        Ok(Self { folder, shard_bytes, spool, shards, names, bytes_total: 0 })
    }

    /// Adds a tensor; `dtype` is safetensors' spelling. Panics if the bytes do not match the shape,
    /// or the name exists.
    pub fn tensor(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) -> Result<()> {
        let dtype = Dtype::find(dtype).unwrap_or_else(|| panic!("{name}: safetensors has no dtype {dtype}"));
        let bits = shape.iter().map(|dim| *dim as u64).product::<u64>() * dtype.bits();
        assert_eq!(bits, 8 * bytes.len() as u64, "{name}: {shape:?} of {}", dtype.name);
        assert!(self.names.insert(name.to_owned()), "{name} is added twice");
        if !self.spool.tensors.is_empty() && self.spool.bytes + bytes.len() as u64 > self.shard_bytes {
            self.close_shard()?;
        }
        self.bytes_total += bytes.len() as u64;
        self.spool.push(name, dtype, shape, bytes)
    }

    /// Bytes of tensors so far.
    pub fn bytes_written(&self) -> u64 {
        self.bytes_total
    }

    /// Gives the shards their names and writes the index, if there is more than one.
    pub fn finish(mut self) -> Result<Written> {
        if !self.spool.tensors.is_empty() || self.shards.is_empty() {
            self.close_shard()?;
        }
        self.spool.remove()?;
        let count = self.shards.len();
        let mut files = Vec::new();
        let mut weight_map = Map::new();
        for (shard, names) in self.shards.iter().enumerate() {
            let file = match count {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", shard + 1),
            };
            weight_map.extend(names.iter().map(|name| (name.clone(), Value::from(file.clone()))));
            files.push(file);
        }
        // The index is renamed first: a folder with shards and no index would read as no model,
        // with an index as a broken one.
        let num_tensors = weight_map.len();
        if count > 1 {
            let index = json!({ "metadata": { "total_size": self.bytes_total }, "weight_map": weight_map });
            let path = self.folder.join("model.safetensors.index.json");
            fs::write(&path, format!("{index:#}\n")).map_err(|source| Error::Io { path, source })?;
        }
        for (shard, file) in files.iter().enumerate() {
            let path = self.folder.join(file);
            fs::rename(part_path(&self.folder, shard), &path).map_err(|source| Error::Io { path, source })?;
        }
        Ok(Written { files, bytes: self.bytes_total, num_tensors })
    }

    fn close_shard(&mut self) -> Result<()> {
        let path = part_path(&self.folder, self.shards.len());
        let full = std::mem::replace(&mut self.spool, Spool::create(&self.folder, self.shards.len() + 1)?);
        self.shards.push(full.write_shard(&path)?);
        Ok(())
    }
}

fn part_path(folder: &Path, shard: usize) -> PathBuf {
    folder.join(format!("shard-{:05}.part", shard + 1))
}

impl Spool {
    fn create(folder: &Path, shard: usize) -> Result<Self> {
        let path = folder.join(format!("spool-{:05}.part", shard + 1));
        let file = File::options().create(true).truncate(true).read(true).write(true).open(&path);
        let file = file.map_err(|source| Error::Io { path: path.clone(), source })?;
        Ok(Self { path, file: BufWriter::with_capacity(1 << 20, file), tensors: Vec::new(), bytes: 0 })
    }

    fn push(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|source| Error::Io { path: self.path.clone(), source })?;
        let (start, length) = (self.bytes, bytes.len() as u64);
        self.tensors.push(Spooled { name: name.to_owned(), dtype, shape: shape.to_vec(), start, bytes: length });
        self.bytes += length;
        Ok(())
    }

    fn remove(self) -> Result<()> {
        drop(self.file);
        fs::remove_file(&self.path).map_err(|source| Error::Io { path: self.path, source })
    }

    fn write_shard(mut self, path: &Path) -> Result<Vec<String>> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let mut tensors = std::mem::take(&mut self.tensors);
        if !aligned(&tensors) {
            // Readers need a tensor to start at a multiple of its value's size: the widest come
            // first.
            tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bits()));
        }
        self.file.flush().map_err(io)?;
        let mut data = self.file.get_ref();
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path).map_err(io)?);
        out.write_all(&header(&tensors)).map_err(io)?;
        for tensor in &tensors {
            data.seek(SeekFrom::Start(tensor.start)).map_err(io)?;
            io::copy(&mut data.take(tensor.bytes), &mut out).map_err(io)?;
        }
        let file = out.into_inner().map_err(|error| io(error.into_error()))?;
        // Before the final name says that it is complete.
        file.sync_all().map_err(io)?;
        self.remove()?;
        Ok(tensors.into_iter().map(|tensor| tensor.name).collect())
    }
}

fn aligned(tensors: &[Spooled]) -> bool {
    tensors.iter().all(|tensor| (8 * tensor.start).is_multiple_of(tensor.dtype.bits()))
}

/// Length and JSON, padded with spaces so that the data starts at a multiple of 8.
fn header(tensors: &[Spooled]) -> Vec<u8> {
    // transformers requires a mark that the tensors are PyTorch's.
    let mut entries = Map::from_iter([("__metadata__".to_owned(), json!({ "format": "pt" }))]);
    let mut at = 0;
    for tensor in tensors {
        let offsets = [at, at + tensor.bytes];
        at = offsets[1];
        let entry = json!({ "dtype": tensor.dtype.name, "shape": tensor.shape, "data_offsets": offsets });
        entries.insert(tensor.name.clone(), entry);
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.extend(json);
    out
}
