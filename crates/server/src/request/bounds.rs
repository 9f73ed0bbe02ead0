//! What this server, with this model, lets a client ask.

use serde_json::{Value, json};

use crate::Limits;
use crate::fields::{Kind, Wrong};

#[derive(Clone, Debug)]
pub struct Bounds {
    pub limits: Limits,
    /// What a request that gives a `model` must give one of.
    pub model_names: ModelNames,
    /// The longest sequence, prompt and answer together.
    pub max_model_len: usize,
    /// Token ids lie below this.
    pub vocab_size: usize,
    /// Sequences that run at once.
    pub max_seqs: usize,
    pub defaults: SamplingDefaults,
}

/// What a model is called.
#[derive(Clone, Debug)]
pub struct ModelNames {
    /// The first is the one that answers name.
    pub listed: Vec<String>,
    /// It answers to these too, and tells nobody: they may be paths on this machine.
    pub unlisted: Vec<String>,
}

impl ModelNames {
    /// The same name as it is kept here, if it is one.
    pub fn find(&self, name: &str) -> Option<&str> {
        self.listed.iter().chain(&self.unlisted).find(|known| *known == name).map(String::as_str)
    }
}

impl From<Vec<String>> for ModelNames {
    fn from(listed: Vec<String>) -> Self {
        Self { listed, unlisted: Vec::new() }
    }
}

/// What requests get that do not say: from the model's generation_config.json.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
}

impl Bounds {
    /// The field `model`, whose value is whether it is served here.
    pub fn model(&self) -> ModelName<'_> {
        ModelName(&self.model_names)
    }
}

pub struct ModelName<'a>(&'a ModelNames);

impl Kind for ModelName<'_> {
    type Value = bool;

    fn read(&self, value: Value) -> Result<bool, Wrong> {
        match value.as_str() {
            Some(name) => Ok(self.0.find(name).is_some()),
            None => Err(Wrong::new("must be a text")),
        }
    }

    fn schema(&self) -> Value {
        json!({"type": "string", "enum": self.0.listed})
    }

    fn example(&self) -> bool {
        true
    }
}
