//! Everything a model consists of, opened: weights and spec, tokenizer, chat template, generation defaults.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_formats::gguf::Gguf;
use folio_model::{AtLoad, OpenModel, Overrides, Wanted};
use folio_server::SamplingDefaults;
use folio_text::{ChatTemplate, SpecialTokens, Tokenizer, TokenizerConfig};
use lzma_rust2::LzmaReader;

use crate::args::{EngineArgs, GenerationArgs, LoadFormat};
use crate::drafting::Drafting;
use crate::embedded::{self, EmbeddedModel};
use crate::generation::{self, Generation};
use crate::model_ref::{HubName, ModelRef};
use crate::naming::{self, Name};
use crate::packed::PackedCache;
use crate::vocab;

/// More than any tokenizer unpacks to, and than unpacking it needs.
const MOST_UNPACKED: u64 = 256 << 20;
const MOST_UNPACKING_KIB: u32 = 128 << 10;

pub struct Assets {
    pub name: String,
    /// Which state of it this is, where the hub's cache tells.
    pub commit: Option<String>,
    pub model: OpenModel,
    /// Random models and bare weight files have none.
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub template: Option<Arc<ChatTemplate>>,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    pub defaults: SamplingDefaults,
    /// What its generation settings ask for and does not happen, in one line.
    pub note: Option<String>,
    /// How tokens are guessed ahead, if they are.
    pub drafting: Option<Drafting>,
    /// Where its packed weights are kept, if they are.
    pub packed: Option<PackedCache>,
    /// For whatever template it is given.
    special: SpecialTokens,
    /// What its own files say of answers.
    generation: Generation,
    /// As the command line named it.
    source: Option<String>,
    overrides: Overrides,
    /// Whether its weights have shapes alone.
    without_weights: bool,
}

impl Assets {
    /// Opens MODEL as the command line names it, for its own context or a shorter one.
    pub fn open(model: Option<&str>, max_context: Option<usize>) -> Result<Self> {
        Self::open_wanted(model, max_context.into())
    }

    fn open_wanted(model: Option<&str>, wanted: Wanted) -> Result<Self> {
        let assets = match ModelRef::resolve(model)? {
            ModelRef::Embedded => Self::embedded(&wanted),
            ModelRef::Folder(folder) => Self::folder(&folder, &wanted),
            ModelRef::Gguf(path) => Self::gguf_file(&path, &wanted),
        };
        Ok(assets?.named_by(model, wanted))
    }

    /// What the command line calls it, and with what it was opened. One of the hub is called as there, not as the folder or
    /// file that it was fetched to.
    fn named_by(mut self, model: Option<&str>, wanted: Wanted) -> Self {
        if let Some(hub) = model.and_then(HubName::of_argument) {
            self.name = hub.name();
        }
        Self { source: model.map(str::to_string), overrides: wanted.overrides, ..self }
    }

    /// The same as the flags want it: with `--load-format dummy` nothing is read but what describes it.
    pub fn open_as(model: Option<&str>, args: &EngineArgs) -> Result<Self> {
        if args.device.load_format == LoadFormat::Auto {
            return Self::open_wanted(model, args.wanted());
        }
        let ModelRef::Folder(folder) = ModelRef::resolve(model)? else {
            bail!("--load-format dummy needs a model folder, of which config.json is read");
        };
        let wanted = args.wanted();
        let assets = Self::in_folder(&folder, folio_model::open_without_weights(&folder, &wanted)?)?;
        Ok(Self { without_weights: true, ..assets.named_by(model, wanted) })
    }

    /// The same model for a shorter context: position encodings may depend on it.
    pub fn reopen(self, max_context: usize) -> Result<Self> {
        let wanted = Wanted { max_context: Some(max_context), overrides: self.overrides };
        let source = self.source.as_deref();
        let mut anew = match ModelRef::resolve(source)? {
            ModelRef::Folder(folder) if self.without_weights => {
                let model = folio_model::open_without_weights(&folder, &wanted)?;
                Self { without_weights: true, ..Self::in_folder(&folder, model)?.named_by(source, wanted) }
            }
            _ => Self::open_wanted(source, wanted)?,
        };
        anew.model.at_load = self.model.at_load;
        anew.drafting = self.drafting;
        anew.packed = self.packed;
        // Flags may have put others in the place of its own.
        (anew.template, anew.eos, anew.defaults, anew.note) = (self.template, self.eos, self.defaults, self.note);
        if let Some(packed) = &anew.packed {
            packed.prepare(&anew.model);
        }
        Ok(anew)
    }

    /// Has plain weights encoded while they are loaded, if that is asked for.
    pub fn quantize(&mut self, kind: Option<AtLoad>) -> Result<()> {
        let Some(kind) = kind else { return Ok(()) };
        if self.is_quantized() {
            bail!("--quantize {}: {} is quantized already", kind.name(), self.name);
        }
        self.model.at_load = Some(kind);
        Ok(())
    }

    /// Whether the layers' weights are codes already.
    pub fn is_quantized(&self) -> bool {
        let weights = &self.model.weights;
        let plain = |name: &str| weights.tensor(name).is_some_and(|view| !view.format.is_quantized());
        let in_layers = |name: &&str| name.ends_with("down.weight") || name.ends_with("attn_output.weight");
        self.model.packing.is_some() || weights.names().into_iter().find(in_layers).is_some_and(|name| !plain(name))
    }

    /// Opens what guesses tokens ahead, if that is asked for.
    pub fn speculate(&mut self, args: &EngineArgs) -> Result<()> {
        self.drafting = Drafting::open(self, args)?;
        Ok(())
    }

    /// Another chat template than its own.
    pub fn set_template(&mut self, source: &str) -> Result<()> {
        self.template = Some(Arc::new(ChatTemplate::new(source, self.special.clone())?));
        Ok(())
    }

    /// As the command line named it; none for the built-in model.
    pub fn source(&self) -> Option<&str> {
        self.source.as_deref()
    }

    /// Settings that took the place of the model's own.
    pub fn overrides(&self) -> &Overrides {
        &self.overrides
    }

    /// Names, sizes and times of the weight files; empty for the built-in model, whose weights never change.
    pub fn weights_stamp(&self) -> String {
        match ModelRef::resolve(self.source.as_deref()) {
            Ok(ModelRef::Folder(path) | ModelRef::Gguf(path)) => {
                let encoded = self.model.at_load.map_or("", AtLoad::name);
                format!("{}{encoded}", folio_model::file_stamp(&path))
            }
            Ok(ModelRef::Embedded) | Err(_) => String::new(),
        }
    }

    /// A model without anything beside its weights.
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

    /// A model that lies in the binary.
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

    /// A GGUF file, and what reads the tokenizer beside it where it is asked for.
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

    /// A model with what lies beside its weights.
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
            drafting: None,
            packed: None,
            special,
            source: None,
            overrides: Overrides::default(),
            without_weights: false,
        };
        assets.generate_by(generation);
        assets
    }

    /// Takes sampling defaults from where the flags say.
    pub fn set_generation(&mut self, args: &GenerationArgs) -> Result<()> {
        self.generate_by(generation::choose(&self.generation, args)?);
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

pub fn read_optional(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
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

/// chat_template.jinja where there is one, else the template in tokenizer_config.json.
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
