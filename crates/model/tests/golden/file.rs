//! Golden files, and the weights they describe as a [`WeightSource`].

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use folio_formats::{Format, TensorView, WeightSource};
use lzma_rust2::LzmaReader;
use serde::{Deserialize, de::DeserializeOwned};

use crate::generator;

#[derive(Deserialize)]
pub struct Golden {
    #[serde(skip)]
    pub name: String,
    pub seed: u64,
    pub config: serde_json::Value,
    /// The context the model is loaded for; it decides the scalings that depend on length.
    pub max_context: usize,
    pub tensors: Vec<TensorGroup>,
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    pub largest_logit: f64,
    pub scores_std: Vec<f64>,
    /// Logarithm of the sum of exponentials, one per prompt position.
    pub log_sum_exp: Vec<f64>,
    pub top: Vec<Top>,
}

/// Tensors that differ in name alone.
#[derive(Deserialize)]
pub struct TensorGroup {
    kind: Kind,
    /// In safetensors' spelling; F32 numbers and plain bytes by default.
    dtype: Option<String>,
    pub shape: Vec<usize>,
    #[serde(default)]
    scale: f64,
    #[serde(default)]
    mean: f64,
    /// Mask of the random bytes.
    mask: Option<u8>,
    /// Written out, if no rule generates them.
    #[serde(default)]
    values: Vec<i64>,
    pub names: Vec<String>,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Normal,
    Bytes,
    Values,
}

/// The best logits at one position of the prompt.
#[derive(Deserialize)]
pub struct Top {
    pub position: usize,
    pub ids: Vec<usize>,
    pub logits: Vec<f64>,
}

/// The project's folder: the build's or, on a machine that only runs the tests, the one in
/// `FOLIO_TREE` or the current folder.
pub fn tree() -> PathBuf {
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    if built.is_dir() {
        return built;
    }
    std::env::var_os("FOLIO_TREE").map_or_else(|| PathBuf::from("."), PathBuf::from)
}

pub fn folder() -> PathBuf {
    tree().join("tests/golden/models")
}

/// A compressed file of JSON.
pub fn unpack<T: DeserializeOwned>(path: &Path) -> T {
    let packed = fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let text = LzmaReader::new_mem_limit(packed, 128 << 10, None).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_reader(std::io::BufReader::new(text)).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All golden files of model families, by name.
pub fn all() -> Vec<Golden> {
    all_in(&folder())
}

pub fn all_in(folder: &Path) -> Vec<Golden> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok()?.strip_suffix(".json.lzma").map(str::to_owned))
        .collect();
    names.sort();
    names.iter().map(|name| read_in(folder, name)).collect()
}

pub fn read(name: &str) -> Golden {
    read_in(&folder(), name)
}

fn read_in(folder: &Path, name: &str) -> Golden {
    Golden { name: name.to_owned(), ..unpack(&folder.join(format!("{name}.json.lzma"))) }
}

impl Golden {
    /// Largest difference of logits.
    pub fn tolerance(&self) -> f64 {
        1e-4 * self.largest_logit.max(1.0)
    }

    pub fn family(&self) -> &str {
        self.config["model_type"].as_str().expect("a model type")
    }

    /// Whether some weights are in four-bit blocks.
    pub fn packed(&self) -> bool {
        self.tensors.iter().any(|group| group.kind == Kind::Bytes)
    }

    pub fn weights(&self) -> Weights {
        Weights::of(self.seed, &self.tensors)
    }
}

impl TensorGroup {
    fn make(&self, seed: u64, name: &str) -> (Format, Vec<u8>) {
        let default = if self.kind == Kind::Bytes { Format::U8 } else { Format::F32 };
        let format = self.dtype.as_deref().map_or(default, |dtype| Format::from_safetensors(dtype).expect("a dtype"));
        let count = self.shape.iter().product::<usize>();
        let bytes = match self.kind {
            Kind::Normal => {
                let numbers = generator::normal(seed, name, count, self.scale as f32, self.mean as f32);
                match format {
                    // Truncated, not rounded.
                    Format::BF16 => numbers.chunks_exact(4).flat_map(|number| [number[2], number[3]]).collect(),
                    _ => numbers,
                }
            }
            Kind::Bytes => {
                let (modulus, mask) = (self.scale as u64, self.mask.unwrap_or(0xff));
                let drawn = generator::octets(seed, name, count * format.block_bytes(), modulus, 0);
                drawn.into_iter().map(|byte| (byte & mask).wrapping_add(self.mean as u8)).collect()
            }
            Kind::Values => self.values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        (format, bytes)
    }
}

/// Tensors in memory.
#[derive(Default)]
pub struct Weights {
    names: Vec<String>,
    tensors: HashMap<String, Tensor>,
}

#[derive(Clone)]
pub struct Tensor {
    pub format: Format,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Weights {
    pub fn of(seed: u64, groups: &[TensorGroup]) -> Self {
        let mut weights = Self::default();
        for group in groups {
            for name in &group.names {
                let (format, bytes) = group.make(seed, name);
                weights.insert(name, Tensor { format, shape: group.shape.clone(), bytes });
            }
        }
        weights
    }

    pub fn insert(&mut self, name: &str, tensor: Tensor) {
        self.names.push(name.to_owned());
        assert!(self.tensors.insert(name.to_owned(), tensor).is_none(), "{name} is listed twice");
    }

    /// Changes the bytes of one tensor.
    pub fn change(&mut self, name: &str, change: impl FnOnce(&mut [u8])) {
        change(&mut self.tensors.get_mut(name).unwrap_or_else(|| panic!("no tensor {name}")).bytes);
    }

    pub fn get(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.names.iter().map(|name| (name.as_str(), self.get(name)))
    }
}

impl WeightSource for Weights {
    fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, tensor) = self.tensors.get_key_value(name)?;
        Some(TensorView { name, format: tensor.format, shape: tensor.shape.clone(), bytes: &tensor.bytes })
    }

    fn release(&self, _: &str) {}
}
