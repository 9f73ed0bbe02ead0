//! From a path to a described model: a Hugging Face folder (config.json beside safetensors) or a GGUF file.

use std::path::Path;
use std::sync::Arc;

use folio_formats::gguf::Gguf;
use folio_formats::safetensors::Safetensors;
use folio_formats::{TensorView, WeightSource};

use crate::families::Family;
use crate::{Config, Error, ModelSpec, Names, Result, gguf};

/// A model whose weights are still in their file.
pub struct OpenModel {
    pub spec: ModelSpec,
    pub weights: Box<dyn WeightSource>,
    /// How the weights' tensors are called.
    pub names: Names,
    /// The GGUF file it came from, whose metadata holds the tokenizer too.
    pub gguf: Option<Arc<Gguf>>,
}

/// Opens a model folder or a `.gguf` file.
pub fn open(path: &Path) -> Result<OpenModel> {
    open_with(path, None)
}

/// The same, for a context other than the model's own; encodings whose formula depends on length follow it.
pub fn open_with(path: &Path, max_context: Option<usize>) -> Result<OpenModel> {
    if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) {
        return OpenModel::from_gguf_with(Gguf::open(path)?, max_context);
    }
    let config_path = path.join("config.json");
    if !config_path.is_file() {
        return Err(Error::NotAModel { path: path.to_owned() });
    }
    let text =
        std::fs::read_to_string(&config_path).map_err(|source| Error::Read { path: config_path.clone(), source })?;
    let config = Config::from_json(&config_path.display().to_string(), &text)?.with_max_context(max_context);
    // The configuration first: it is the smaller file and gives the clearer refusal.
    let family = Family::of(&config)?;
    let spec = family.spec(&config)?;
    let weights = Box::new(Safetensors::open(path)?);
    Ok(OpenModel::hugging_face(family, spec, weights))
}

impl OpenModel {
    /// From the text of a config.json and weights from anywhere.
    pub fn from_config(config_json: &str, weights: Box<dyn WeightSource>) -> Result<Self> {
        Self::from_parsed(&Config::from_json("config.json", config_json)?, weights)
    }

    /// From a configuration that may ask for another context.
    pub fn from_parsed(config: &Config, weights: Box<dyn WeightSource>) -> Result<Self> {
        let family = Family::of(config)?;
        Ok(Self::hugging_face(family, family.spec(config)?, weights))
    }

    pub fn from_gguf(gguf: Gguf) -> Result<Self> {
        Self::from_gguf_with(gguf, None)
    }

    pub fn from_gguf_with(gguf: Gguf, max_context: Option<usize>) -> Result<Self> {
        let (spec, names) = gguf::describe(&gguf, max_context)?;
        let gguf = Arc::new(gguf);
        Ok(Self { spec, weights: Box::new(Shared(gguf.clone())), names, gguf: Some(gguf) })
    }

    fn hugging_face(family: &Family, spec: ModelSpec, weights: Box<dyn WeightSource>) -> Self {
        let names = Names::hugging_face(&*weights, family.interleaved_experts);
        Self { spec, weights, names, gguf: None }
    }
}

/// One GGUF file, as weights and as metadata.
struct Shared(Arc<Gguf>);

impl WeightSource for Shared {
    fn names(&self) -> Vec<&str> {
        self.0.names()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.0.tensor(name)
    }

    fn require(&self, name: &str) -> folio_formats::Result<TensorView<'_>> {
        self.0.require(name)
    }

    fn release(&self, name: &str) {
        self.0.release(name);
    }
}
