//! A model's settings as typed fields: config.json, or GGUF metadata under the same names.
//!
//! Absent and `null` are the same. Every refusal names the file and the field in the user's
//! spelling.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::{Error, Overrides, Result};

#[derive(Clone, Debug)]
pub struct Config {
    file: String,
    fields: Map<String, Value>,
    /// Field -> the key it was read from, if the two differ (GGUF).
    aliases: HashMap<String, String>,
    /// Path of this object in the file: `text_config.`, `rope_scaling.`.
    path: String,
    /// The requested context length, if it differs from the model's own; it decides
    /// length-dependent scalings.
    max_context: Option<usize>,
    /// Whether the file's context length already includes the scaling of positions (GGUF).
    states_context: bool,
}

impl Config {
    /// Reads a JSON object; `file` is its name in errors.
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        let reason = |reason: String| Error::Json { file: file.to_owned(), reason };
        match serde_json::from_str(text).map_err(|e| reason(e.to_string()))? {
            Value::Object(fields) => Ok(Self::from_fields(file, fields, HashMap::new())),
            _ => Err(reason("the top level is not an object".to_owned())),
        }
    }

    pub(crate) fn from_fields(file: &str, fields: Map<String, Value>, aliases: HashMap<String, String>) -> Self {
        Self { file: file.to_owned(), fields, aliases, path: String::new(), max_context: None, states_context: false }
    }

    /// Takes the context length as the file states it, without applying its scaling.
    pub(crate) fn with_stated_context(mut self) -> Self {
        self.states_context = true;
        self
    }

    pub(crate) fn states_context(&self) -> bool {
        self.states_context
    }

    /// Requests a context other than the model's own.
    pub fn with_max_context(mut self, max_context: Option<usize>) -> Self {
        self.max_context = max_context;
        self
    }

    pub(crate) fn max_context_asked(&self) -> Option<usize> {
        self.max_context
    }

    /// A refusal of one field.
    pub(crate) fn refuse(&self, field: &str, problem: impl Into<String>) -> Error {
        Error::Field { file: self.file.clone(), field: self.full_name(field), problem: problem.into() }
    }

    pub(crate) fn family_error(&self, field: &str, found: &str, supported: String) -> Error {
        let field = self.full_name(field);
        Error::Family { file: self.file.clone(), field, found: found.to_owned(), supported }
    }

    fn full_name(&self, field: &str) -> String {
        self.aliases.get(field).cloned().unwrap_or_else(|| format!("{}{field}", self.path))
    }

    pub(crate) fn value(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// Whether the file has the field, even as `null`: a class default does not apply then.
    pub(crate) fn mentions(&self, field: &str) -> bool {
        self.fields.contains_key(field)
    }

    pub(crate) fn has(&self, field: &str) -> bool {
        self.value(field).is_some()
    }

    /// Sets a field that the file leaves out to the family's own default.
    pub(crate) fn set_default(&mut self, field: &str, value: Value) {
        self.fields.entry(field).or_insert(value);
    }

    pub(crate) fn set(&mut self, field: &str, value: Value) {
        self.fields.insert(field.to_owned(), value);
    }

    pub(crate) fn remove(&mut self, field: &str) {
        self.fields.remove(field);
    }

    /// Replaces settings of the file by requested ones.
    pub(crate) fn overridden(mut self, overrides: &Overrides) -> Self {
        overrides.apply(&mut self.fields);
        self.states_context &= !overrides.scale_positions();
        self
    }

    fn typed<'a, T>(&'a self, field: &str, kind: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match read(value) {
            Some(typed) => Ok(Some(typed)),
            None => Err(self.refuse(field, format!("is {}, but must be {kind}", short(value)))),
        }
    }

    pub(crate) fn usize(&self, field: &str) -> Result<Option<usize>> {
        // Some writers put integers as 4096.0.
        let whole = |v: &Value| v.as_u64().or_else(|| v.as_f64().and_then(whole_number));
        self.typed(field, "a whole number", |v| whole(v).and_then(|n| usize::try_from(n).ok()))
    }

    pub(crate) fn f64(&self, field: &str) -> Result<Option<f64>> {
        self.typed(field, "a number", |v| v.as_f64().filter(|n| n.is_finite()))
    }

    pub(crate) fn f64_or(&self, field: &str, default: f64) -> Result<f64> {
        Ok(self.f64(field)?.unwrap_or(default))
    }

    pub(crate) fn bool_or(&self, field: &str, default: bool) -> Result<bool> {
        Ok(self.typed(field, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(crate) fn str(&self, field: &str) -> Result<Option<&str>> {
        self.typed(field, "a string", Value::as_str)
    }

    pub(crate) fn list(&self, field: &str) -> Result<Option<&Vec<Value>>> {
        self.typed(field, "a list", Value::as_array)
    }

    /// A list of numbers.
    pub(crate) fn numbers(&self, field: &str) -> Result<Option<Vec<f64>>> {
        let number = |v: &Value| v.as_f64().filter(|n| n.is_finite());
        self.typed(field, "a list of numbers", |v| v.as_array()?.iter().map(number).collect())
    }

    /// A nested object, as a separate config.
    pub(crate) fn object(&self, field: &str) -> Result<Option<Config>> {
        let fields = self.typed(field, "an object", Value::as_object)?;
        Ok(fields.map(|fields| Config {
            file: self.file.clone(),
            fields: fields.clone(),
            aliases: self.aliases.clone(),
            path: format!("{}{field}.", self.path),
            max_context: self.max_context,
            states_context: self.states_context,
        }))
    }

    pub(crate) fn need_usize(&self, field: &str) -> Result<usize> {
        self.usize(field)?.ok_or_else(|| self.refuse(field, "is missing"))
    }

    pub(crate) fn need_f64(&self, field: &str) -> Result<f64> {
        self.f64(field)?.ok_or_else(|| self.refuse(field, "is missing"))
    }

    /// A size: at least 1, at most `most`.
    pub(crate) fn size(&self, field: &str, most: usize) -> Result<usize> {
        self.in_range(field, self.need_usize(field)?, most)
    }

    pub(crate) fn size_or(&self, field: &str, default: usize, most: usize) -> Result<usize> {
        self.in_range(field, self.usize(field)?.unwrap_or(default), most)
    }

    fn in_range(&self, field: &str, value: usize, most: usize) -> Result<usize> {
        match value {
            n if (1..=most).contains(&n) => Ok(n),
            n => Err(self.refuse(field, format!("is {n}, but must lie between 1 and {most}"))),
        }
    }

    /// Refuses a switch that changes the computation in an unsupported way.
    pub(crate) fn must_be_off(&self, field: &str) -> Result<()> {
        match self.value(field) {
            None | Some(Value::Bool(false)) => Ok(()),
            Some(value) => Err(self.refuse(field, format!("is {}, which is not supported", short(value)))),
        }
    }
}

fn whole_number(value: f64) -> Option<u64> {
    (value.fract() == 0.0 && (0.0..9.0e15).contains(&value)).then_some(value as u64)
}

/// A value for an error message, shortened for a terminal.
pub(crate) fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}
