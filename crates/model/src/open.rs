//! From a path to a described model: a Hugging Face folder (config.json beside safetensors) or a
//! GGUF file.

use std::path::Path;
use std::sync::Arc;

use folio_formats::gguf::Gguf;
use folio_formats::packing::{self, Packing};
use folio_formats::safetensors::Safetensors;
use folio_formats::{TensorView, WeightSource};

use crate::dummy::DummyWeights;
use crate::families::Family;
use crate::names::Part;
use crate::{AtLoad, Config, Error, ModelSpec, Names, NormPlacement, Result, Wanted, gguf};

/// Hundreds of times the longest published one.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// A model whose weights are still in their file.
pub struct OpenModel {
    pub spec: ModelSpec,
    pub weights: Box<dyn WeightSource>,
    /// Names of the weights' tensors.
    pub names: Names,
    /// Checkpoint layout of its linear layers, if another tool quantized them.
    pub packing: Option<Box<dyn Packing>>,
    /// Format of its layers' plain weights after loading; `None` leaves them unchanged.
    pub at_load: Option<AtLoad>,
    /// The GGUF file it came from, which has the tokenizer in its metadata too.
    pub gguf: Option<Arc<Gguf>>,
}

/// Opens a model folder or a `.gguf` file.
pub fn open(path: &Path) -> Result<OpenModel> {
    open_with(path, &Wanted::default())
}

/// Opens a model like [`open`], with requests that go beyond the files.
pub fn open_with(path: &Path, wanted: &Wanted) -> Result<OpenModel> {
    if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) {
        return OpenModel::from_gguf_with(Gguf::open(path)?, wanted);
    }
    // The configuration first: it is the smaller file and gives the clearer refusal.
    let described = Described::of(&config_of(path, wanted)?)?;
    Ok(described.with(Box::new(Safetensors::open(path)?)))
}

/// Opens a folder from which only config.json is read: its weights have shapes and no
/// values, for a device that generates them.
pub fn open_without_weights(folder: &Path, wanted: &Wanted) -> Result<OpenModel> {
    let mut config = config_of(folder, wanted)?;
    config.remove("quantization_config");
    let described = Described::of(&config)?;
    let weights = DummyWeights::of(&described.spec);
    let weights = weights.map_err(|source| Error::Read { path: folder.to_owned(), source })?;
    Ok(described.with(Box::new(weights)))
}

fn config_of(folder: &Path, wanted: &Wanted) -> Result<Config> {
    let path = folder.join("config.json");
    if !path.is_file() {
        return Err(Error::NotAModel { path: folder.to_owned() });
    }
    let mut config =
        Config::from_json(&path.display().to_string(), &read_config(&path)?)?.with_max_context(wanted.max_context);
    read_quantization_beside(folder, &mut config)?;
    Ok(config.overridden(&wanted.overrides))
}

/// ModelOpt describes its quantization in a separate file; newer versions repeat it in config.json,
/// which then counts.
fn read_quantization_beside(folder: &Path, config: &mut Config) -> Result<()> {
    let path = folder.join("hf_quant_config.json");
    if config.has("quantization_config") || !path.is_file() {
        return Ok(());
    }
    let described = Config::from_json(&path.display().to_string(), &read_config(&path)?)?;
    let Some(mut quantization) = described.value("quantization").cloned() else { return Ok(()) };
    // Without an algorithm only the KV cache is quantized, which is the server's decision.
    if quantization.get("quant_algo").is_some_and(|algorithm| !algorithm.is_null()) {
        quantization["quant_method"] = "modelopt".into();
        config.set("quantization_config", quantization);
    }
    Ok(())
}

fn read_config(path: &Path) -> Result<String> {
    let wrong = |source| Error::Read { path: path.to_owned(), source };
    let bytes = std::fs::metadata(path).map_err(wrong)?.len();
    if bytes > MAX_CONFIG_BYTES {
        let reason = format!("{bytes} bytes are more than the {MAX_CONFIG_BYTES} a configuration may have");
        return Err(Error::Json { file: path.display().to_string(), reason });
    }
    std::fs::read_to_string(path).map_err(wrong)
}

impl OpenModel {
    /// From the text of a config.json and weights from any source.
    pub fn from_config(config_json: &str, weights: Box<dyn WeightSource>) -> Result<Self> {
        Self::from_parsed(&Config::from_json("config.json", config_json)?, weights)
    }

    /// From a configuration that may request another context.
    pub fn from_parsed(config: &Config, weights: Box<dyn WeightSource>) -> Result<Self> {
        Ok(Described::of(config)?.with(weights))
    }

    pub fn from_gguf(gguf: Gguf) -> Result<Self> {
        Self::from_gguf_with(gguf, &Wanted::default())
    }

    pub fn from_gguf_with(gguf: Gguf, wanted: &Wanted) -> Result<Self> {
        let (spec, names) = gguf::describe(&gguf, wanted)?;
        let gguf = Arc::new(gguf);
        Ok(Self {
            spec,
            weights: Box::new(Shared(gguf.clone())),
            names,
            packing: None,
            at_load: None,
            gguf: Some(gguf),
        })
    }
}

impl OpenModel {
    /// The same model with other weights under the same names, none of them packed.
    pub fn with_weights(&self, weights: Box<dyn WeightSource>) -> Self {
        Self { spec: self.spec.clone(), weights, names: self.names.clone(), packing: None, at_load: None, gguf: None }
    }
}

/// Everything that is read from a configuration.
struct Described {
    spec: ModelSpec,
    packing: Option<Box<dyn Packing>>,
    interleaved_experts: bool,
}

impl Described {
    fn of(config: &Config) -> Result<Self> {
        let family = Family::of(config)?;
        let spec = family.spec(config)?;
        let packing = match config.value("quantization_config") {
            None => None,
            Some(described) => packing::open(described).map_err(|error| match error {
                folio_formats::Error::Scheme { field, problem } => {
                    config.refuse(&format!("quantization_config.{field}"), problem)
                }
                other => other.into(),
            })?,
        };
        Ok(Self { spec, packing, interleaved_experts: family.interleaved_experts })
    }

    fn with(self, weights: Box<dyn WeightSource>) -> OpenModel {
        let Self { mut spec, packing, interleaved_experts } = self;
        let names = Names::hugging_face(&*weights, interleaved_experts);
        spec.tied_head = spec.tied_head && !has_own_head(&names, &*weights, packing.as_deref());
        OpenModel { spec, weights, names, packing, at_load: None, gguf: None }
    }
}

/// Whether the checkpoint has an output matrix that differs from the embedding table. It is then
/// used in spite of the configuration, as in transformers: some fine-tunes were saved untied under
/// a configuration that says tied.
fn has_own_head(names: &Names, weights: &dyn WeightSource, packing: Option<&dyn Packing>) -> bool {
    let stems = names.candidates(Part::Head, 0, NormPlacement::PRE);
    if packing.is_some_and(|packing| stems.iter().any(|stem| packing.holds(weights, stem))) {
        return true;
    }
    let find = |part| {
        let stems = names.candidates(part, 0, NormPlacement::PRE);
        stems.iter().map(|stem| format!("{stem}.weight")).find(|name| weights.contains(name))
    };
    let (Some(head), Some(embedding)) = (find(Part::Head), find(Part::Embedding)) else { return false };
    // A matrix of an unsupported type counts as different: loading it gives the error.
    let (Some(head), Some(embedding)) = (weights.tensor(&head), weights.tensor(&embedding)) else { return true };
    let differs = (head.format, &head.shape, head.bytes) != (embedding.format, &embedding.shape, embedding.bytes);
    weights.release(head.name);
    weights.release(embedding.name);
    differs
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

    fn check(&self) -> folio_formats::Result<()> {
        self.0.check()
    }

    fn rest(&self) {
        self.0.rest();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An embedding, and an output matrix of an unsupported type.
    struct UnreadHead;

    impl WeightSource for UnreadHead {
        fn names(&self) -> Vec<&str> {
            vec!["model.embed_tokens.weight", "lm_head.weight"]
        }

        fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
            let format = folio_formats::Format::F32;
            (name == self.names()[0]).then_some(TensorView {
                name: "model.embed_tokens.weight",
                format,
                shape: vec![1, 1],
                bytes: &[0; 4],
            })
        }

        fn require(&self, name: &str) -> folio_formats::Result<TensorView<'_>> {
            let (path, dtype) = ("model.safetensors".into(), "F64".to_owned());
            let unread = folio_formats::Error::Unsupported { path, name: name.to_owned(), dtype };
            let missing =
                || folio_formats::Error::MissingTensor { place: "model.safetensors".to_owned(), name: name.to_owned() };
            self.tensor(name).ok_or_else(|| if self.names().contains(&name) { unread } else { missing() })
        }

        fn release(&self, _: &str) {}
    }

    #[test]
    fn a_head_that_cannot_be_read_is_not_taken_for_a_tied_one() {
        let names = Names::hugging_face(&UnreadHead, false);
        assert!(has_own_head(&names, &UnreadHead, None));
        assert!(!UnreadHead.contains("model.norm.weight") && UnreadHead.contains("lm_head.weight"));
    }
}
