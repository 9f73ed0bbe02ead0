//! Safetensors: one file, or a folder with `model.safetensors` or the shards that
//! `model.safetensors.index.json` names.
//!
//! Tensors stay in the mapped files. A tensor of a dtype that Folio does not read (complex numbers,
//! for example) does not affect the others: it is an error only when it is requested.

mod header;
mod index;
mod writer;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::shown;
use crate::{Error, Format, Mapped, Result, TensorView, WeightSource};
use header::{Dtype, Header};
pub use writer::{SHARD_BYTES, Stored, Writer, Written};

/// The tensors of a model, from one file or many.
#[derive(Debug)]
pub struct Safetensors {
    place: PathBuf,
    shards: Vec<Shard>,
    /// Name -> (shard, tensor). A sharded model has exactly the tensors that its index lists.
    by_name: HashMap<String, (usize, usize)>,
}

#[derive(Debug)]
struct Shard {
    map: Arc<Mapped>,
    tensors: Vec<Tensor>,
    metadata: Vec<(String, String)>,
}

/// `bytes` is inside the shard's map and has exactly the length for `dtype` and `shape`.
#[derive(Debug)]
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

impl Safetensors {
    /// Opens a `.safetensors` file, or a model folder.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Self::from_map(Mapped::open(path)?);
        }
        let index = path.join("model.safetensors.index.json");
        match index.is_file() {
            true => Self::open_sharded(path, &index),
            false => Self::from_map(Mapped::open(&path.join("model.safetensors"))?),
        }
    }

    /// One file's tensors, from an existing map.
    pub fn from_map(map: Arc<Mapped>) -> Result<Self> {
        let place = map.path().to_owned();
        let shard = Shard::read(map)?;
        let by_name = shard.tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), (0, at))).collect();
        Ok(Self { place, by_name, shards: vec![shard] })
    }

    fn open_sharded(folder: &Path, index: &Path) -> Result<Self> {
        let index = index::read(index)?;
        let mut shards = Vec::new();
        let mut by_name = HashMap::new();
        for (file, listed) in index.files {
            let shard_path = folder.join(&file);
            if !shard_path.exists() {
                let problem = format!("lists shard {}, which is not in the folder", shown(&file));
                return Err(Error::Header { path: index.path, field: "weight_map", problem });
            }
            let shard = Shard::read(Mapped::open(&shard_path)?)?;
            let here: HashMap<&str, usize> =
                shard.tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.as_str(), at)).collect();
            for name in listed {
                let Some(at) = here.get(name.as_str()) else {
                    let problem = format!("the index says it is in {}, but it is not there", shown(&file));
                    return Err(Error::Tensor { path: index.path, name: shown(&name), problem });
                };
                by_name.insert(name, (shards.len(), *at));
            }
            shards.push(shard);
        }
        Ok(Self { place: index.path, shards, by_name })
    }

    /// The free-form strings of `__metadata__`, of the first file.
    pub fn metadata(&self) -> &[(String, String)] {
        self.shards.first().map_or(&[], |shard| &shard.metadata)
    }

    /// The stored tensor of any dtype, for copying without reading its values.
    pub fn stored(&self, name: &str) -> Option<Stored<'_>> {
        let (shard, tensor) = self.find(name)?;
        let bytes = &shard.map.bytes()[tensor.bytes.clone()];
        Some(Stored { dtype: tensor.dtype.name, shape: tensor.shape.clone(), bytes })
    }

    fn find(&self, name: &str) -> Option<(&Shard, &Tensor)> {
        let (shard, tensor) = *self.by_name.get(name)?;
        let shard = &self.shards[shard];
        Some((shard, &shard.tensors[tensor]))
    }
}

impl Shard {
    fn read(map: Arc<Mapped>) -> Result<Self> {
        let Header { tensors, metadata } = Header::parse(map.path(), map.bytes())?;
        Ok(Self { map, tensors, metadata })
    }

    fn view<'a>(&'a self, tensor: &'a Tensor) -> Option<TensorView<'a>> {
        let format: Format = tensor.dtype.format?;
        let bytes = &self.map.bytes()[tensor.bytes.clone()];
        Some(TensorView { name: &tensor.name, format, shape: tensor.shape.clone(), bytes })
    }
}

impl WeightSource for Safetensors {
    fn names(&self) -> Vec<&str> {
        let mut names = Vec::with_capacity(self.by_name.len());
        for (at, shard) in self.shards.iter().enumerate() {
            let listed = |name: &str| self.by_name.get(name).is_some_and(|place| place.0 == at);
            names.extend(shard.tensors.iter().map(|tensor| tensor.name.as_str()).filter(|name| listed(name)));
        }
        names
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (shard, tensor) = self.find(name)?;
        shard.view(tensor)
    }

    fn require(&self, name: &str) -> Result<TensorView<'_>> {
        let Some((shard, tensor)) = self.find(name) else {
            return Err(Error::MissingTensor { place: self.place.display().to_string(), name: shown(name) });
        };
        shard.view(tensor).ok_or_else(|| Error::Unsupported {
            path: shard.map.path().to_owned(),
            name: shown(name),
            dtype: tensor.dtype.name.to_owned(),
        })
    }

    fn release(&self, name: &str) {
        if let Some((shard, tensor)) = self.find(name) {
            shard.map.release(tensor.bytes.clone());
        }
    }

    fn check(&self) -> Result<()> {
        self.shards.iter().try_for_each(|shard| shard.map.check())
    }

    fn rest(&self) {
        self.shards.iter().for_each(|shard| shard.map.rest());
    }
}
