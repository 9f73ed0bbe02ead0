//! Metadata by key, with typed getters whose errors name the file and the key.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::{Array, Value};
use crate::error::shown;
use crate::{Error, Result};

/// Keys in file order, each once.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    path: PathBuf,
    pairs: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

/// A Rust type that a metadata value can be read as. Integers convert if the number fits.
pub trait FromValue<'a>: Sized {
    const EXPECTED: &'static str;
    fn from_value(value: &'a Value) -> Option<Self>;
}

impl Metadata {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// Adds a key; `false` if it exists already.
    pub(super) fn add(&mut self, key: String, value: Value) -> bool {
        if self.by_key.contains_key(&key) {
            return false;
        }
        self.by_key.insert(key.clone(), self.pairs.len());
        self.pairs.push((key, value));
        true
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn pairs(&self) -> &[(String, Value)] {
        &self.pairs
    }

    /// The value as stored.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|at| &self.pairs[*at].1)
    }

    /// The value of a key that may be absent; an error if it is of another type.
    pub fn find<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match T::from_value(value) {
            Some(value) => Ok(Some(value)),
            None => {
                let found = match value.as_integer() {
                    Some(number) => number.to_string(),
                    None => value.type_name().to_owned(),
                };
                Err(self.error(key, format!("expected {}, found {found}", T::EXPECTED)))
            }
        }
    }

    /// The value of a required key.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        self.find(key)?.ok_or_else(|| self.error(key, format!("missing, expected {}", T::EXPECTED)))
    }

    pub fn u32(&self, key: &str) -> Result<u32> {
        self.get(key)
    }

    pub fn f32(&self, key: &str) -> Result<f32> {
        self.get(key)
    }

    pub fn str(&self, key: &str) -> Result<&str> {
        self.get(key)
    }

    pub fn bool(&self, key: &str) -> Result<bool> {
        self.get(key)
    }

    pub fn array(&self, key: &str) -> Result<&Array> {
        self.get(key)
    }

    pub fn strings(&self, key: &str) -> Result<&[String]> {
        self.get(key)
    }

    /// An error about `key` of this file, for a check made elsewhere.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::Metadata { path: self.path.clone(), key: shown(key), problem: problem.into() }
    }
}

macro_rules! integers {
    ($($type:ty, $one:literal, $many:literal;)*) => {$(
        impl FromValue<'_> for $type {
            const EXPECTED: &'static str = $one;
            fn from_value(value: &Value) -> Option<Self> {
                <$type>::try_from(value.as_integer()?).ok()
            }
        }
        impl FromValue<'_> for Vec<$type> {
            const EXPECTED: &'static str = $many;
            fn from_value(value: &Value) -> Option<Self> {
                let Value::Array(array) = value else { return None };
                array.integers()?.into_iter().map(|number| number.try_into().ok()).collect()
            }
        }
    )*};
}

integers! {
    u32, "an integer of 32 bits, not negative", "an array of integers of 32 bits, not negative";
    i32, "an integer of 32 bits", "an array of integers of 32 bits";
    u64, "an integer, not negative", "an array of integers, not negative";
    i64, "an integer of 64 bits", "an array of integers of 64 bits";
    usize, "a count", "an array of counts";
}

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a float";
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::F32(value) => Some(*value),
            Value::F64(value) => Some(*value as f32),
            _ => None,
        }
    }
}

impl FromValue<'_> for f64 {
    const EXPECTED: &'static str = "a float";
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::F32(value) => Some((*value).into()),
            Value::F64(value) => Some(*value),
            _ => None,
        }
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Bool(value) = value { Some(*value) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::String(value) = value { Some(value) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a Array {
    const EXPECTED: &'static str = "an array";
    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(array) = value { Some(array) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [String] {
    const EXPECTED: &'static str = "an array of strings";
    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::String(items)) = value { Some(items) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [f32] {
    const EXPECTED: &'static str = "an array of f32";
    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::F32(items)) = value { Some(items) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a [bool] {
    const EXPECTED: &'static str = "an array of bools";
    fn from_value(value: &'a Value) -> Option<Self> {
        if let Value::Array(Array::Bool(items)) = value { Some(items) } else { None }
    }
}
