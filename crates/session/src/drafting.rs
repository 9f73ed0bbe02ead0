//! The drafting method of the options, opened: files beside the model if no file is named.
//!
//! Beside `NAME.gguf` lie `NAME.eagle.gguf` and `NAME.medusa.gguf`; a model folder has `eagle` and
//! `medusa` files in it. A sibling is a model of the same name but for its last part, as
//! `folio-rust-7m` is of `folio-rust-42m`, in the same folder, and at most a third of the size. The
//! built-in model has heads and a sibling in the binary.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_device::{BLOCK_TOKENS, Backend};
use folio_engine::speculate::{
    AdaptOptions, Ahead, DraftModel, DraftModelOptions, Drafter, EagleDrafter, EagleOptions, Lookahead,
    LookaheadOptions, MedusaDrafter, MedusaOptions, Ngram, NgramOptions, OnHost, Speculation, Suffix, SuffixOptions,
    Synthetic, TranslatedModel, Translation,
};
use folio_formats::WeightSource;
use folio_formats::gguf::Gguf;
use folio_formats::safetensors::Safetensors;
use folio_model::{Decoder, DecoderLimits, ModelSpec};
use folio_text::Translator;

use crate::assets::Assets;
use crate::embedded;
use crate::model_ref::ModelRef;
use crate::naming;
use crate::options::{Method, Options};

/// A sibling pays only if it is much smaller than the model.
const SIBLING_SHARE: u64 = 3;

/// Most tokens to draft at once if no flag says so.
const MOST_GUESSED: usize = 32;

const SYNTHETIC_SEED: u64 = 20;

/// A method with all its files.
pub struct Drafting {
    pub method: OpenedMethod,
    /// Most tokens to draft at once, if a flag says so.
    pub tokens: Option<usize>,
    pub fixed: bool,
}

pub enum OpenedMethod {
    Ngram(NgramOptions),
    Suffix,
    Lookahead,
    Draft(Box<Draft>),
    Medusa(Heads),
    Eagle(Heads),
    Synthetic(Synthetic),
}

/// A smaller model.
pub struct Draft {
    pub assets: Assets,
    tokens: Tokens,
}

/// Conversion of a draft model's tokens to the model's.
enum Tokens {
    /// Ids below this are the same in both.
    Shared(usize),
    /// By their text.
    Translated(Arc<Translator>),
}

/// A request's text on its way between two vocabularies.
struct ByText(folio_text::Translation);

impl Translation for ByText {
    fn follow(&mut self, tokens: &[u32]) -> bool {
        self.0.follow(tokens)
    }

    fn tokens(&self) -> &[u32] {
        self.0.tokens()
    }

    fn back(&self, drafted: &[u32], most: usize) -> Vec<u32> {
        self.0.back(drafted, most)
    }
}

/// Another backend on the device of one.
pub type Beside<B> = fn(&B) -> folio_device::Result<B>;

/// A file of heads.
pub struct Heads {
    pub name: String,
    pub weights: Box<dyn WeightSource>,
}

impl Drafting {
    /// None if nothing is to be drafted.
    pub fn open(assets: &Assets, options: &Options) -> Result<Option<Self>> {
        let wanted = &options.speculate;
        let place = Place::of(assets);
        let method = match &wanted.method {
            Method::Off => return Ok(None),
            Method::Auto => auto(assets, &place, options)?,
            Method::Ngram(ngram) => OpenedMethod::Ngram(*ngram),
            Method::Suffix => OpenedMethod::Suffix,
            Method::Lookahead => OpenedMethod::Lookahead,
            Method::Draft(Some(model)) => OpenedMethod::Draft(draft(model, assets, options)?),
            Method::Draft(None) => match place.sibling_draft(assets, options)? {
                Some(draft) => OpenedMethod::Draft(draft),
                None => {
                    bail!("--speculate draft: no smaller sibling lies beside {}; name one: draft:MODEL", assets.name)
                }
            },
            Method::Synthetic(thousandths) => {
                OpenedMethod::Synthetic(Synthetic { agreement: f64::from(*thousandths) / 1e3, seed: SYNTHETIC_SEED })
            }
            Method::Medusa(Some(file)) => OpenedMethod::Medusa(Heads::open(file)?),
            Method::Eagle(Some(file)) => OpenedMethod::Eagle(Heads::open(file)?),
            Method::Medusa(None) => OpenedMethod::Medusa(place.needed("medusa", assets)?),
            Method::Eagle(None) => OpenedMethod::Eagle(place.needed("eagle", assets)?),
        };
        Ok(Some(Self { method, tokens: wanted.tokens, fixed: wanted.fixed }))
    }

    /// The method at work beside a decoder.
    pub fn speculation<B: Backend>(&self, decoder: &mut Decoder<B>, beside: Beside<B>) -> Result<Speculation<B>> {
        let (drafter, most): (Box<dyn Drafter<B>>, usize) = match &self.method {
            OpenedMethod::Ngram(options) => (Box::new(OnHost(Ngram::new(*options))), MOST_GUESSED),
            OpenedMethod::Suffix => {
                let options = suffix_options(decoder.spec(), decoder.limits());
                (Box::new(OnHost(Suffix::new(options))), MOST_GUESSED)
            }
            OpenedMethod::Synthetic(method) => (Box::new(OnHost(*method)), MOST_GUESSED),
            OpenedMethod::Lookahead => (Box::new(Lookahead::new(LookaheadOptions::default())), MOST_GUESSED),
            OpenedMethod::Medusa(heads) => {
                let drafter = MedusaDrafter::load(decoder, &*heads.weights, MedusaOptions::default());
                (Box::new(drafter.with_context(|| format!("the heads {}", heads.name))?), MOST_GUESSED)
            }
            OpenedMethod::Eagle(heads) => {
                let drafter = EagleDrafter::load(decoder, &*heads.weights, EagleOptions::default());
                (Box::new(drafter.with_context(|| format!("the head {}", heads.name))?), MOST_GUESSED)
            }
            OpenedMethod::Draft(draft) => {
                let drafter = self.draft_model(draft, decoder, beside);
                (drafter.with_context(|| format!("the draft model {}", draft.assets.name))?, MOST_GUESSED)
            }
        };
        let most_nodes = self.tokens.unwrap_or(most);
        Ok(Speculation::new(drafter, AdaptOptions { most_nodes, fixed: self.fixed.then_some(most_nodes) }))
    }

    fn draft_model<B: Backend>(
        &self,
        draft: &Draft,
        decoder: &Decoder<B>,
        beside: Beside<B>,
    ) -> Result<Box<dyn Drafter<B>>> {
        let (backend, model, options) = (beside(decoder.backend())?, &draft.assets.model, self.draft_options(draft));
        Ok(match &draft.tokens {
            Tokens::Shared(_) => Box::new(DraftModel::load(backend, model, decoder, options)?),
            Tokens::Translated(pair) => {
                let pair = Arc::clone(pair);
                let begin = Box::new(move || -> Box<dyn Translation> { Box::new(ByText(pair.begin())) });
                Box::new(TranslatedModel::load(backend, model, decoder, options, begin)?)
            }
        })
    }

    pub fn draft_options(&self, draft: &Draft) -> DraftModelOptions {
        let all = DraftModelOptions::default();
        let all = match &draft.tokens {
            Tokens::Shared(shared_tokens) => DraftModelOptions { shared_tokens: *shared_tokens, ..all },
            Tokens::Translated(pair) => DraftModelOptions { stretch: pair.stretch(), ..all },
        };
        DraftModelOptions { most_tokens: self.tokens.unwrap_or(all.most_tokens), ..all }
    }

    /// For a line at the start.
    pub fn describe(&self) -> String {
        match &self.method {
            OpenedMethod::Ngram(_) => "n-grams of the prompt and the answer".into(),
            OpenedMethod::Suffix => "suffixes of prompts and past answers".into(),
            OpenedMethod::Lookahead => "lookahead decoding".into(),
            OpenedMethod::Draft(draft) => match &draft.tokens {
                Tokens::Shared(_) => format!("the draft model {}", draft.assets.name),
                Tokens::Translated(_) => format!("the draft model {}, translated by text", draft.assets.name),
            },
            OpenedMethod::Medusa(heads) => format!("Medusa heads, {}", heads.name),
            OpenedMethod::Eagle(heads) => format!("an EAGLE head, {}", heads.name),
            OpenedMethod::Synthetic(method) => format!("guesses of agreement {}", method.agreement),
        }
    }
}

/// Reads as many tokens of requests as there are blocks for: the plan has counted these.
pub fn suffix_options(spec: &ModelSpec, limits: &DecoderLimits) -> SuffixOptions {
    let group = Ahead::full_group(spec).unwrap_or(0);
    let blocks = limits.blocks.get(group).copied().unwrap_or(0);
    SuffixOptions { request_tokens: blocks * BLOCK_TOKENS, ..SuffixOptions::default() }
}

/// Heads know the model best, a sibling knows its language, and past answers are always available.
fn auto(assets: &Assets, place: &Place, options: &Options) -> Result<OpenedMethod> {
    if let Some(heads) = place.heads("eagle")? {
        return Ok(OpenedMethod::Eagle(heads));
    }
    Ok(place.sibling_draft(assets, options)?.map_or(OpenedMethod::Suffix, OpenedMethod::Draft))
}

/// A model that drafts for `target`.
fn draft(model: &str, target: &Assets, options: &Options) -> Result<Box<Draft>> {
    let open = |max_context: Option<usize>| {
        let place = ModelRef::resolve(Some(model), options.folders.hub.as_deref());
        let assets = place.and_then(|place| Assets::open_at(place, Some(model), max_context.into()));
        assets.with_context(|| format!("--speculate draft:{model}"))
    };
    let draft = paired(model, open(options.max_model_len)?, target)?;
    match (&draft.tokens, options.max_model_len) {
        // The same text may be more tokens for the draft model than the model's context has.
        (Tokens::Translated(_), Some(_)) => Ok(Box::new(Draft { assets: open(None)?, ..*draft })),
        _ => Ok(draft),
    }
}

/// An opened `model` that drafts for `target`.
fn paired(model: &str, assets: Assets, target: &Assets) -> Result<Box<Draft>> {
    let tokens = match (&assets.tokenizer, &target.tokenizer) {
        (Some(ours), Some(theirs)) => match ours.ids_shared_with(theirs) {
            Ok(shared) => Tokens::Shared(shared),
            Err(_) => {
                let pair = Translator::new(Arc::clone(theirs), Arc::clone(ours));
                Tokens::Translated(Arc::new(pair.with_context(|| {
                    format!(
                        "--speculate draft:{model}: its tokens are not those of {}, nor can they be translated",
                        target.name
                    )
                })?))
            }
        },
        // Only the tokens' numbers are known.
        _ => Tokens::Shared(usize::MAX),
    };
    Ok(Box::new(Draft { assets, tokens }))
}

impl Heads {
    /// A file, or the folder of a public checkpoint.
    fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file = if path.is_dir() { path.join("model.safetensors") } else { path.to_owned() };
        let open = || -> Result<Box<dyn WeightSource>> {
            Ok(match file.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) {
                true => Box::new(Gguf::open(&file)?),
                false => Box::new(Safetensors::open(&file)?),
            })
        };
        Ok(Self { weights: open().with_context(|| format!("the heads {name}"))?, name })
    }
}

/// The place of a model, beside which its heads and siblings lie.
enum Place {
    Embedded,
    File(PathBuf),
    Folder(PathBuf),
}

impl Place {
    fn of(assets: &Assets) -> Self {
        match assets.place().clone() {
            ModelRef::Embedded => Self::Embedded,
            ModelRef::Gguf(path) => Self::File(path),
            ModelRef::Folder(path) => Self::Folder(path),
        }
    }

    fn heads(&self, kind: &str) -> Result<Option<Heads>> {
        let beside = match self {
            Self::Embedded => return embedded_heads(kind),
            Self::File(path) => ["gguf", "safetensors"].map(|ending| path.with_extension(format!("{kind}.{ending}"))),
            Self::Folder(path) => ["gguf", "safetensors"].map(|ending| path.join(format!("{kind}.{ending}"))),
        };
        beside.iter().find(|path| path.is_file()).map(|path| Heads::open(path)).transpose()
    }

    fn needed(&self, kind: &str, assets: &Assets) -> Result<Heads> {
        match self.heads(kind)? {
            Some(heads) => Ok(heads),
            None if matches!(self, Self::Embedded) => {
                bail!("--speculate {kind}: this build has no such heads for {}; name a file: {kind}:FILE", assets.name)
            }
            None => bail!("--speculate {kind}: no heads lie beside {}; name a file: {kind}:FILE", assets.name),
        }
    }

    fn sibling_draft(&self, target: &Assets, options: &Options) -> Result<Option<Box<Draft>>> {
        match self {
            Self::Embedded => {
                let Some(model) = embedded::sibling() else { return Ok(None) };
                let assets = Assets::in_binary(&model, &options.max_model_len.into())?;
                paired(model.name, assets, target).map(Some)
            }
            Self::File(_) | Self::Folder(_) => self.sibling()?.map(|model| draft(&model, target, options)).transpose(),
        }
    }

    /// Name of the smallest sibling.
    fn sibling(&self) -> Result<Option<String>> {
        let (Self::File(path) | Self::Folder(path)) = self else { return Ok(None) };
        let own = naming::of(path).name;
        let (Some(folder), Some((family, _))) = (path.parent(), own.rsplit_once('-')) else { return Ok(None) };
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let mut smallest: Option<(u64, String)> = None;
        for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())?.flatten() {
            let other = entry.path();
            let name = naming::of(&other).name;
            let is_kin =
                name != own && name.rsplit_once('-').is_some_and(|(kin, last)| kin == family && !last.contains('.'));
            let is_alike = match self {
                Self::File(_) => other.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")),
                _ => other.join("config.json").is_file(),
            };
            if !is_kin || !is_alike {
                continue;
            }
            let size = bytes(&other);
            if size * SIBLING_SHARE <= bytes(path) && smallest.as_ref().is_none_or(|(least, _)| size < *least) {
                smallest = Some((size, other.to_string_lossy().into_owned()));
            }
        }
        Ok(smallest.map(|(_, path)| path))
    }
}

/// Bytes of a file, or of the weights in a folder.
fn bytes(path: &Path) -> u64 {
    let len = |path: &Path| std::fs::metadata(path).map_or(0, |data| data.len());
    match std::fs::read_dir(path) {
        Ok(entries) => {
            let is_weights = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "safetensors");
            entries.flatten().map(|entry| entry.path()).filter(is_weights).map(|path| len(&path)).sum()
        }
        Err(_) => len(path),
    }
}

fn embedded_heads(kind: &str) -> Result<Option<Heads>> {
    let Some(bytes) = embedded::heads(kind) else { return Ok(None) };
    let name = format!("built in ({kind})");
    Ok(Some(Heads { weights: Box::new(Gguf::from_static(&name, bytes)?), name }))
}

#[cfg(test)]
mod tests;
