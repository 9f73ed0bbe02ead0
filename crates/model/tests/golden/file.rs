//! Golden files, and the weights they describe as a [`WeightSource`].

use std::{collections::HashMap, fs, path::PathBuf};

use folio_model::formats::{Format, TensorView, WeightSource};
use serde::Deserialize;

use crate::generator;

#[derive(Deserialize)]
pub struct Golden {
    #[serde(skip)]
    pub name: String,
    pub seed: u64,
    pub config: serde_json::Value,
    /// The context the model is loaded for; it settles the scalings that depend on length.
    pub max_context: usize,
    pub tensors: Vec<TensorGroup>,
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    pub largest_logit: f64,
    pub scores_std: Vec<f64>,
    /// One a prompt position.
    pub log_sum_exp: Vec<f64>,
    pub top: Vec<Top>,
}

/// Tensors that differ in name alone.
#[derive(Deserialize)]
pub struct TensorGroup {
    kind: Kind,
    pub shape: Vec<usize>,
    scale: f64,
    mean: f64,
    pub names: Vec<String>,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Normal,
    Bytes,
}

/// The best logits at one position of the prompt.
#[derive(Deserialize)]
pub struct Top {
    pub position: usize,
    pub ids: Vec<usize>,
    pub logits: Vec<f64>,
}

pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models")
}

/// All golden files of model families, by name.
pub fn all() -> Vec<Golden> {
    let entries = fs::read_dir(folder()).expect("tests/golden/models");
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok()?.strip_suffix(".json").map(str::to_owned))
        .filter(|name| name != "eval")
        .collect();
    names.sort();
    names.iter().map(|name| read(name)).collect()
}

pub fn read(name: &str) -> Golden {
    let path = folder().join(format!("{name}.json"));
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let golden: Golden = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Golden { name: name.to_owned(), ..golden }
}

impl Golden {
    /// Logits may differ by this much.
    pub fn tolerance(&self) -> f64 {
        1e-4 * self.largest_logit.max(1.0)
    }

    pub fn family(&self) -> &str {
        self.config["model_type"].as_str().expect("a model type")
    }

    /// Some weights lie in four-bit blocks.
    pub fn packed(&self) -> bool {
        self.tensors.iter().any(|group| group.kind == Kind::Bytes)
    }

    pub fn weights(&self) -> Weights {
        let mut weights = Weights::default();
        for group in &self.tensors {
            let count = group.shape.iter().product();
            for name in &group.names {
                let (format, bytes) = match group.kind {
                    Kind::Normal => {
                        let (scale, mean) = (group.scale as f32, group.mean as f32);
                        (Format::F32, generator::normal(self.seed, name, count, scale, mean))
                    }
                    Kind::Bytes => {
                        let (modulus, offset) = (group.scale as u64, group.mean as u64);
                        (Format::U8, generator::octets(self.seed, name, count, modulus, offset))
                    }
                };
                weights.insert(name, Tensor { format, shape: group.shape.clone(), bytes });
            }
        }
        weights
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
    pub fn insert(&mut self, name: &str, tensor: Tensor) {
        self.names.push(name.to_owned());
        assert!(self.tensors.insert(name.to_owned(), tensor).is_none(), "{name} is listed twice");
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
