//! Everything a model consists of, opened: weights and spec, tokenizer, chat template, generation defaults.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_formats::gguf::Gguf;
use folio_model::{AtLoad, OpenModel, Overrides, Wanted};
use folio_server::SamplingDefaults;
use folio_text::{ChatTemplate, GgufVocab, SpecialTokens, Tokenizer, TokenizerConfig};
use lzma_rust2::LzmaReader;
use serde_json::Value;

use crate::args::{EngineArgs, LoadFormat};
use crate::drafting::Drafting;
use crate::embedded::{self, EmbeddedModel};
use crate::model_ref::{HubName, ModelRef};
use crate::naming::{self, Name};
use crate::packed::PackedCache;

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
    /// How tokens are guessed ahead, if they are.
    pub drafting: Option<Drafting>,
    /// Where its packed weights are kept, if they are.
    pub packed: Option<PackedCache>,
    /// For whatever template it is given.
    special: SpecialTokens,
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
        let tokenizer = tokenizer_from(model.tokenizer, true).context("the built-in tokenizer")?;
        Self::from_gguf(model.name.to_string(), gguf, Some(tokenizer), wanted)
    }

    fn gguf_file(path: &Path, wanted: &Wanted) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        let has_none = gguf.metadata().value("tokenizer.ggml.tokens").is_none();
        let beside = ["tokenizer.json", "tokenizer.json.lzma"].map(|name| path.with_file_name(name));
        let beside = beside.iter().find(|file| has_none && file.exists());
        let tokenizer = beside.map(|file| read_tokenizer(file)).transpose()?;
        let Name { name, commit } = naming::of(path);
        Ok(Self { commit, ..Self::from_gguf(name, gguf, tokenizer, wanted)? })
    }

    fn from_gguf(name: String, gguf: Gguf, tokenizer: Option<Tokenizer>, wanted: &Wanted) -> Result<Self> {
        let tokenizer = match tokenizer {
            Some(tokenizer) => Some(tokenizer),
            None => gguf_vocab(&gguf)?.map(Tokenizer::from_gguf).transpose()?,
        };
        let token = |key: &str| gguf.u32(key).ok();
        let text = |id: Option<u32>| Some(tokenizer.as_ref()?.decode(&[id?], false));
        let special = SpecialTokens {
            bos: text(token("tokenizer.ggml.bos_token_id")),
            eos: text(token("tokenizer.ggml.eos_token_id")),
            ..SpecialTokens::default()
        };
        let template = gguf.str("tokenizer.chat_template").ok();
        let template = template.map(|source| ChatTemplate::new(source, special.clone())).transpose()?;
        let mut generation = Generation::default();
        if let Ok(json) = gguf.str("folio.generation_config") {
            generation = Generation::parse(json).context("folio.generation_config")?;
        }
        let ends = ["eos", "eot", "eom"].map(|end| format!("tokenizer.ggml.{end}_token_id"));
        generation.eos.extend(ends.iter().filter_map(|key| token(key)));
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
        let template = read_template(folder)?;
        let mut generation = Generation::default();
        for file in ["config.json", "generation_config.json"] {
            if let Some(text) = read_optional(&folder.join(file))? {
                generation.merge(Generation::parse(&text).with_context(|| folder.join(file).display().to_string())?);
            }
        }
        let Name { name, commit } = naming::of(folder);
        Ok(Self { commit, ..Self::new(name, model, tokenizer, template, generation) })
    }

    fn new(
        name: String,
        model: OpenModel,
        tokenizer: Option<Tokenizer>,
        (template, special): (Option<ChatTemplate>, SpecialTokens),
        mut generation: Generation,
    ) -> Self {
        generation.eos.sort_unstable();
        generation.eos.dedup();
        generation.eos.retain(|&id| (id as usize) < model.spec.vocab_size);
        Self {
            name,
            commit: None,
            model,
            tokenizer: tokenizer.map(Arc::new),
            template: template.map(Arc::new),
            eos: generation.eos,
            defaults: generation.sampling,
            drafting: None,
            packed: None,
            special,
            source: None,
            overrides: Overrides::default(),
            without_weights: false,
        }
    }
}

/// What generation_config.json says.
#[derive(Default)]
struct Generation {
    eos: Vec<u32>,
    sampling: SamplingDefaults,
}

impl Generation {
    fn parse(json: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(json)?;
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let eos = match value.get("eos_token_id") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(ids)) => {
                ids.iter().map(id).collect::<Option<_>>().context("eos_token_id: not token ids")?
            }
            Some(one) => vec![id(one).context("eos_token_id: not a token id")?],
        };
        let number = |key| value.get(key).and_then(Value::as_f64).map(|number| number as f32);
        let sampling = SamplingDefaults {
            temperature: number("temperature"),
            top_p: number("top_p"),
            top_k: value.get("top_k").and_then(id).filter(|&k| k > 0),
        };
        Ok(Self { eos, sampling })
    }

    fn merge(&mut self, other: Self) {
        self.eos.extend(other.eos);
        let (mine, theirs) = (self.sampling, other.sampling);
        self.sampling = SamplingDefaults {
            temperature: theirs.temperature.or(mine.temperature),
            top_p: theirs.top_p.or(mine.top_p),
            top_k: theirs.top_k.or(mine.top_k),
        };
    }
}

fn read_optional(path: &Path) -> Result<Option<String>> {
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
    let config = match read_optional(&path)? {
        Some(text) => TokenizerConfig::parse(&text).with_context(|| path.display().to_string())?,
        None => TokenizerConfig::default(),
    };
    let own_file = read_optional(&folder.join("chat_template.jinja"))?;
    let source = own_file.as_deref().or(config.chat_template());
    let template = source.map(|source| ChatTemplate::new(source, config.special_tokens())).transpose()?;
    Ok((template, config.special_tokens()))
}

/// The tokenizer inside a GGUF file, if it has one.
fn gguf_vocab(gguf: &Gguf) -> Result<Option<GgufVocab>> {
    let metadata = gguf.metadata();
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    if metadata.value(&key("tokens")).is_none() {
        return Ok(None);
    }
    let id = |name: &str| metadata.find::<u32>(&key(&format!("{name}_token_id")));
    let flag = |name: &str| metadata.find::<bool>(&key(name));
    let strings = |name: &str| metadata.find::<&[String]>(&key(name));
    Ok(Some(GgufVocab {
        model: metadata.str(&key("model"))?.to_string(),
        pre: metadata.find::<&str>(&key("pre"))?.unwrap_or("default").to_string(),
        tokens: metadata.strings(&key("tokens"))?.to_vec(),
        token_types: metadata.find::<Vec<i32>>(&key("token_type"))?.unwrap_or_default(),
        scores: metadata.find::<&[f32]>(&key("scores"))?.unwrap_or_default().to_vec(),
        merges: strings("merges")?.unwrap_or_default().to_vec(),
        bos: id("bos")?,
        eos: id("eos")?,
        unk: id("unknown")?,
        pad: id("padding")?,
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
        add_space_prefix: flag("add_space_prefix")?,
        ..GgufVocab::default()
    }))
}
