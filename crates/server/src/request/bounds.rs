//! The bounds of requests to this server, with this model.

use folio_engine::SamplingDefaults;
use serde_json::{Value, json};

use crate::Limits;
use crate::fields::{Fields, Kind, Wrong};

#[derive(Clone, Debug)]
pub struct Bounds {
    pub limits: Limits,
    /// Names that a request's `model` may have.
    pub model_names: ModelNames,
    /// The longest sequence, prompt and answer together.
    pub max_model_len: usize,
    /// Token ids lie below this.
    pub vocab_size: usize,
    /// Sequences that run at once.
    pub max_seqs: usize,
    pub defaults: SamplingDefaults,
}

/// The names of a model.
#[derive(Clone, Debug)]
pub struct ModelNames {
    /// The first is the name in answers.
    pub listed: Vec<String>,
    /// Names that it answers to without listing them: they may be paths on this machine.
    pub unlisted: Vec<String>,
}

impl ModelNames {
    /// The known name that equals `name`.
    pub fn find(&self, name: &str) -> Option<&str> {
        self.listed.iter().chain(&self.unlisted).find(|known| *known == name).map(String::as_str)
    }
}

impl From<Vec<String>> for ModelNames {
    fn from(listed: Vec<String>) -> Self {
        Self { listed, unlisted: Vec::new() }
    }
}

impl Bounds {
    /// Reads the field `model`, which may be left out. A name that is not served here is refused.
    pub fn check_model(&self, fields: &mut Fields) -> Result<(), Wrong> {
        fields.optional("model", ModelName(&self.model_names), "Name of the model, as /v1/models lists it.").map(|_| ())
    }
}

struct ModelName<'a>(&'a ModelNames);

impl Kind for ModelName<'_> {
    type Value = ();

    fn read(&self, value: Value) -> Result<(), Wrong> {
        let name = value.as_str().ok_or_else(|| Wrong::new("must be a string"))?;
        self.0.find(name).map(|_| ()).ok_or_else(Wrong::no_such_model)
    }

    fn schema(&self) -> Value {
        json!({"type": "string", "enum": self.0.listed})
    }

    fn example(&self) {}
}
