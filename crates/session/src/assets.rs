//! Everything a model consists of, opened: weights and spec, tokenizer, chat template, generation
//! defaults.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_engine::SamplingDefaults;
use folio_formats::gguf::Gguf;
use folio_model::{AtLoad, OpenModel, Overrides, Wanted};
use folio_text::{ChatTemplate, SpecialTokens, Tokenizer, TokenizerConfig};
use lzma_rust2::LzmaReader;

use crate::embedded::{self, EmbeddedModel};
use crate::files::read_optional;
use crate::generation::{self, Generation};
use crate::model_ref::{HubName, ModelRef};
use crate::naming::{self, Name};
use crate::options::{GenerationOptions, LoadFormat, Options};
use crate::vocab;

/// More bytes than any tokenizer unpacks to, and more memory than unpacking needs.
const MOST_UNPACKED: u64 = 256 << 20;
const MOST_UNPACKING_KIB: u32 = 128 << 10;

pub struct Assets {
    pub name: String,
    /// Its commit, if the hub's cache has it.
    pub commit: Option<String>,
    pub model: OpenModel,
    /// Random models and bare weight files have none.
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub template: Option<Arc<ChatTemplate>>,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    pub defaults: SamplingDefaults,
    /// Generation settings of the model that have no effect, in one line.
    pub note: Option<String>,
    /// Special tokens for any chat template.
    special: SpecialTokens,
    /// Generation settings of the model's own files.
    generation: Generation,
    /// The name by which it was opened.
    source: Option<String>,
    place: ModelRef,
    overrides: Overrides,
    /// Whether its weights have shapes and no values.
    without_weights: bool,
}

impl Assets {
    /// Opens a model: a folder, a .gguf file, a name in the cache of the hub, or none for the
    /// built-in model. With a dummy load format only what describes the model is read.
    pub fn open(model: Option<&str>, options: &Options) -> Result<Self> {
        let place = ModelRef::resolve(model, options.folders.hub.as_deref())?;
        if options.device.load_format == LoadFormat::Auto {
            return Self::open_at(place, model, options.wanted());
        }
        let ModelRef::Folder(folder) = &place else {
            bail!("--load-format dummy needs a model folder, of which config.json is read");
        };
        let wanted = options.wanted();
        let assets = Self::in_folder(folder, folio_model::open_without_weights(folder, &wanted)?)?;
        Ok(Self { without_weights: true, ..assets.named_by(place, model, wanted) })
    }

    /// Opens the model at a place, named `model`.
    pub(crate) fn open_at(place: ModelRef, model: Option<&str>, wanted: Wanted) -> Result<Self> {
        let assets = match &place {
            ModelRef::Embedded => Self::embedded(&wanted),
            ModelRef::Folder(folder) => Self::folder(folder, &wanted),
            ModelRef::Gguf(path) => Self::gguf_file(path, &wanted),
        };
        Ok(assets?.named_by(place, model, wanted))
    }

    /// Stores how the model was opened. A model of the hub has its name there, not that of the
    /// folder or file that it was downloaded to.
    fn named_by(mut self, place: ModelRef, model: Option<&str>, wanted: Wanted) -> Self {
        if let Some(hub) = model.and_then(HubName::of_argument) {
            self.name = hub.name();
        }
        Self { source: model.map(str::to_string), place, overrides: wanted.overrides, ..self }
    }

    /// The same model for a shorter context, because position encodings may depend on it.
    pub(crate) fn reopen(self, max_context: usize) -> Result<Self> {
        let wanted = Wanted { max_context: Some(max_context), overrides: self.overrides };
        let source = self.source.as_deref();
        let mut anew = match &self.place {
            ModelRef::Folder(folder) if self.without_weights => {
                let model = folio_model::open_without_weights(folder, &wanted)?;
                let assets = Self::in_folder(folder, model)?.named_by(self.place.clone(), source, wanted);
                Self { without_weights: true, ..assets }
            }
            place => Self::open_at(place.clone(), source, wanted)?,
        };
        anew.model.at_load = self.model.at_load;
        // Flags may have replaced some of its own.
        (anew.template, anew.eos, anew.defaults, anew.note) = (self.template, self.eos, self.defaults, self.note);
        Ok(anew)
    }

    /// Quantizes plain weights while they are loaded, if that is requested.
    pub fn quantize(&mut self, kind: Option<AtLoad>) -> Result<()> {
        let Some(kind) = kind else { return Ok(()) };
        if self.is_quantized() {
            bail!("--quantize {}: {} is quantized already", kind.name(), self.name);
        }
        self.model.at_load = Some(kind);
        Ok(())
    }

    /// Whether the layers' weights are quantized already.
    pub fn is_quantized(&self) -> bool {
        let weights = &self.model.weights;
        let plain = |name: &str| weights.tensor(name).is_some_and(|view| !view.format.is_quantized());
        let in_layers = |name: &&str| name.ends_with("down.weight") || name.ends_with("attn_output.weight");
        self.model.packing.is_some() || weights.names().into_iter().find(in_layers).is_some_and(|name| !plain(name))
    }

    /// Replaces the model's own chat template.
    pub fn set_template(&mut self, source: &str) -> Result<()> {
        self.template = Some(Arc::new(ChatTemplate::new(source, self.special.clone())?));
        Ok(())
    }

    /// The name by which it was opened; none for the built-in model.
    pub fn source(&self) -> Option<&str> {
        self.source.as_deref()
    }

    /// Its place on this machine.
    pub(crate) fn place(&self) -> &ModelRef {
        &self.place
    }

    /// Settings that replaced the model's own.
    pub fn overrides(&self) -> &Overrides {
        &self.overrides
    }

    /// Names, sizes and times of the weight files; empty for the built-in model, whose weights
    /// never change.
    pub fn weights_stamp(&self) -> String {
        match &self.place {
            ModelRef::Folder(path) | ModelRef::Gguf(path) => {
                let encoded = self.model.at_load.map_or("", AtLoad::name);
                format!("{}{encoded}", folio_model::file_stamp(path))
            }
            ModelRef::Embedded => String::new(),
        }
    }

    /// A model with nothing but its weights.
    #[cfg(test)]
    pub fn bare(name: &str, model: OpenModel) -> Self {
        Self::new(name.into(), model, None, (None, SpecialTokens::default()), Generation::default())
    }

    fn embedded(wanted: &Wanted) -> Result<Self> {
        let Some(model) = embedded::model() else {
            bail!("this build has no built-in model; name one: a folder, a .gguf file, or ORG/NAME");
        };
        Self::in_binary(&model, wanted)
    }

    /// A model in the binary.
    pub fn in_binary(model: &EmbeddedModel, wanted: &Wanted) -> Result<Self> {
        let gguf = Gguf::from_static(model.name, model.gguf)?;
        let beside = || tokenizer_from(model.tokenizer, true).map(Some).context("the built-in tokenizer");
        Self::from_gguf(model.name.to_string(), gguf, beside, wanted)
    }

    fn gguf_file(path: &Path, wanted: &Wanted) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        let beside = ["tokenizer.json", "tokenizer.json.lzma"].map(|name| path.with_file_name(name));
        let beside = || beside.iter().find(|file| file.exists()).map(|file| read_tokenizer(file)).transpose();
        let Name { name, commit } = naming::of(path);
        Ok(Self { commit, ..Self::from_gguf(name, gguf, beside, wanted)? })
    }

    /// A GGUF file, and the function that reads the tokenizer beside it if it is needed.
    fn from_gguf(
        name: String,
        gguf: Gguf,
        beside: impl FnOnce() -> Result<Option<Tokenizer>>,
        wanted: &Wanted,
    ) -> Result<Self> {
        let (tokenizer, ends) = vocab::of_gguf(&gguf, beside)?;
        let token = |key: &str| gguf.u32(key).ok();
        let text = |id: Option<u32>| Some(tokenizer.as_ref()?.decode(&[id?], false));
        let special = SpecialTokens {
            bos: text(token("tokenizer.ggml.bos_token_id")),
            eos: text(token("tokenizer.ggml.eos_token_id")),
            ..SpecialTokens::default()
        };
        let template = gguf.str("tokenizer.chat_template").ok();
        let template = template.map(|source| ChatTemplate::new(source, special.clone())).transpose()?;
        let mut generation = Generation::of_gguf(&gguf)?;
        generation.ends.extend(ends);
        let model = OpenModel::from_gguf_with(gguf, wanted)?;
        Ok(Self::new(name, model, tokenizer, (template, special), generation))
    }

    fn folder(folder: &Path, wanted: &Wanted) -> Result<Self> {
        if !folder.join("config.json").exists() {
            let gguf = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path());
            let gguf = gguf.filter(|path| path.extension().is_some_and(|ending| ending == "gguf")).min();
            match gguf {
                None if folder.join("adapter_config.json").exists() => {
                    bail!("{} is a LoRA adapter, which folio does not load", folder.display())
                }
                Some(path) => bail!("{} has no config.json; did you mean {}?", folder.display(), path.display()),
                None => bail!("{} has no config.json: it is not a model folder", folder.display()),
            }
        }
        Self::in_folder(folder, folio_model::open_with(folder, wanted)?)
    }

    /// A model with the files beside its weights.
    fn in_folder(folder: &Path, model: OpenModel) -> Result<Self> {
        let tokenizer = folder.join("tokenizer.json");
        let tokenizer = tokenizer.exists().then(|| read_tokenizer(&tokenizer)).transpose()?;
        let (template, special) = read_template(folder)?;
        let mut generation = Generation::of_folder(folder)?;
        let own_end = special.eos.as_deref().and_then(|end| tokenizer.as_ref()?.token_id(end));
        generation.ends.extend(own_end);
        let Name { name, commit } = naming::of(folder);
        Ok(Self { commit, ..Self::new(name, model, tokenizer, (template, special), generation) })
    }

    fn new(
        name: String,
        model: OpenModel,
        tokenizer: Option<Tokenizer>,
        (template, special): (Option<ChatTemplate>, SpecialTokens),
        generation: Generation,
    ) -> Self {
        let mut assets = Self {
            name,
            commit: None,
            model,
            tokenizer: tokenizer.map(Arc::new),
            template: template.map(Arc::new),
            eos: Vec::new(),
            defaults: SamplingDefaults::default(),
            note: None,
            generation: generation.clone(),
            special,
            source: None,
            place: ModelRef::Embedded,
            overrides: Overrides::default(),
            without_weights: false,
        };
        assets.generate_by(generation);
        assets
    }

    /// Takes sampling defaults from the source in the flags.
    pub fn set_generation(&mut self, options: &GenerationOptions) -> Result<()> {
        self.generate_by(generation::choose(&self.generation, options)?);
        Ok(())
    }

    fn generate_by(&mut self, generation: Generation) {
        let spec = &self.model.spec;
        self.note = generation.note(spec.max_context);
        self.defaults = generation.sampling;
        self.eos = generation.ends;
        self.eos.sort_unstable();
        self.eos.dedup();
        self.eos.retain(|&id| (id as usize) < spec.vocab_size);
    }
}

fn read_tokenizer(path: &Path) -> Result<Tokenizer> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let is_compressed = path.extension().is_some_and(|ending| ending == "lzma");
    tokenizer_from(&bytes, is_compressed).with_context(|| path.display().to_string())
}

fn tokenizer_from(json: &[u8], is_compressed: bool) -> Result<Tokenizer> {
    if !is_compressed {
        return Ok(Tokenizer::from_json(json)?);
    }
    let mut unpacked = Vec::new();
    LzmaReader::new_mem_limit(json, MOST_UNPACKING_KIB, None)?.take(MOST_UNPACKED).read_to_end(&mut unpacked)?;
    Ok(Tokenizer::from_json(&unpacked)?)
}

/// chat_template.jinja if it exists, else the template in tokenizer_config.json.
fn read_template(folder: &Path) -> Result<(Option<ChatTemplate>, SpecialTokens)> {
    let path = folder.join("tokenizer_config.json");
    let mut config = match read_optional(&path)? {
        Some(text) => TokenizerConfig::parse(&text).with_context(|| path.display().to_string())?,
        None => TokenizerConfig::default(),
    };
    let map = folder.join("special_tokens_map.json");
    if let Some(text) = read_optional(&map)? {
        config.complete(&text).with_context(|| map.display().to_string())?;
    }
    let own_file = read_optional(&folder.join("chat_template.jinja"))?;
    let source = own_file.as_deref().or(config.chat_template());
    let template = source.map(|source| ChatTemplate::new(source, config.special_tokens())).transpose()?;
    Ok((template, config.special_tokens()))
}

#[cfg(test)]
mod tests;
