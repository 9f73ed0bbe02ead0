//! API keys as they are written down: a file with one key a line, or a list in an environment
//! variable.
//!
//! A line is `KEY [name=alice] [weight=3] [max-in-flight=32] [priority=-5..5] [salt=TEXT|none]`;
//! KEY is the secret itself or its hash as `sha256:HEX`; `#` begins a comment. A secret is hashed
//! as it is read and not kept, and no error repeats any of it.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::{Place, SetupError};

pub const MOST_KEYS: usize = 10_000;
pub const SECRET_CHARS_LEAST: usize = 16;
pub const SECRET_CHARS_MOST: usize = 512;
const FILE_BYTES_MOST: u64 = 16 << 20;
const WEIGHT_MOST: u32 = 1000;

/// Which part of the prefix cache a key's requests use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Salt {
    /// The key's own, unless it is the only key.
    #[default]
    Own,
    /// Shared with all keys whose salt is `none`.
    None,
    /// Shared with all keys of the same text.
    Text(String),
}

#[derive(Clone)]
pub struct Key {
    pub name: Arc<str>,
    /// SHA-256 of the secret.
    pub digest: [u8; 32],
    pub weight: u32,
    /// `None`: the server's default for a key.
    pub max_in_flight: Option<usize>,
    /// Range that its requests' priorities are clamped to.
    pub priorities: RangeInclusive<i32>,
    pub salt: Salt,
    place: Place,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, weight, max_in_flight, priorities, salt, .. } = self;
        write!(f, "Key {{ name: {name:?}, weight: {weight}, max_in_flight: {max_in_flight:?}, ")?;
        write!(f, "priorities: {priorities:?}, salt: {salt:?}, .. }}")
    }
}

/// All keys; names and secrets are unique.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    keys: Vec<Key>,
    /// Name and digest -> which key has it.
    names: HashMap<Arc<str>, usize>,
    digests: HashMap<[u8; 32], usize>,
}

impl Keys {
    pub fn none() -> Self {
        Self::default()
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Key> {
        self.keys.iter()
    }

    /// Adds the keys of a file. Returns a warning to print when others than the file's owner may
    /// read it.
    pub fn add_file(&mut self, path: &Path) -> Result<Option<String>, SetupError> {
        let unreadable = |source| SetupError::Unreadable { path: path.into(), source };
        let file = File::open(path).map_err(unreadable)?;
        let warning = warn_if_shared(path, &file.metadata().map_err(unreadable)?);
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MOST + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        let text = String::from_utf8(bytes).ok().filter(|text| text.len() as u64 <= FILE_BYTES_MOST);
        self.add_text(&text.ok_or(SetupError::NotText { path: path.into(), most: FILE_BYTES_MOST })?)?;
        Ok(warning)
    }

    /// Adds the keys of a key file's text. A file without keys is an error: it must not leave the
    /// server open.
    pub fn add_text(&mut self, text: &str) -> Result<(), SetupError> {
        let before = self.len();
        for (index, line) in text.lines().enumerate() {
            let mut words = line.split_ascii_whitespace().take_while(|word| !word.starts_with('#'));
            if let Some(key) = words.next() {
                self.add(Place::Line(index + 1), key, words)?;
            }
        }
        if self.len() == before { Err(SetupError::NoKeys("the key file")) } else { Ok(()) }
    }

    /// Adds the keys of an environment variable: secrets with commas between them.
    pub fn add_list(&mut self, list: &str) -> Result<(), SetupError> {
        let before = self.len();
        for (index, key) in list.split(',').map(str::trim).enumerate().filter(|(_, key)| !key.is_empty()) {
            self.add(Place::Entry(index + 1), key, std::iter::empty())?;
        }
        if self.len() == before { Err(SetupError::NoKeys("the list of API keys")) } else { Ok(()) }
    }

    fn add<'a>(&mut self, place: Place, key: &str, options: impl Iterator<Item = &'a str>) -> Result<(), SetupError> {
        if self.len() == MOST_KEYS {
            return Err(SetupError::TooManyKeys(MOST_KEYS));
        }
        let wrong = |reason| SetupError::Key { place, reason };
        let digest = read_digest(key).map_err(wrong)?;
        let name = format!("key-{}", self.len() + 1).into();
        let priorities = i32::MIN..=i32::MAX;
        let mut key = Key { name, digest, weight: 1, max_in_flight: None, priorities, salt: Salt::Own, place };
        let mut seen = Vec::new();
        for option in options {
            let (option, value) = option.split_once('=').ok_or(UNKNOWN_OPTION).map_err(wrong)?;
            if seen.contains(&option) {
                return Err(wrong("an option is given twice"));
            }
            seen.push(option);
            key.set(option, value).map_err(wrong)?;
        }
        if self.names.insert(key.name.clone(), self.len()).is_some() {
            return Err(SetupError::NameTaken { place });
        }
        if let Some(first) = self.digests.insert(digest, self.len()) {
            return Err(SetupError::SameKey { place, first: self.keys[first].place });
        }
        self.keys.push(key);
        Ok(())
    }
}

const UNKNOWN_OPTION: &str =
    "expected name=, weight=, max-in-flight=, priority= or salt= after the key (a key has no spaces)";

impl Key {
    fn set(&mut self, option: &str, value: &str) -> Result<(), &'static str> {
        match option {
            "name" => self.name = read_name(value)?.into(),
            "weight" => {
                let weight = value.parse().ok().filter(|weight| (1..=WEIGHT_MOST).contains(weight));
                self.weight = weight.ok_or("expected a weight from 1 to 1000")?;
            }
            "max-in-flight" => {
                let most = value.parse().ok().filter(|most| (1..=1_000_000).contains(most));
                self.max_in_flight = Some(most.ok_or("expected a max-in-flight from 1 to 1000000")?);
            }
            "priority" => self.priorities = read_priorities(value)?,
            "salt" => self.salt = read_salt(value)?,
            _ => return Err(UNKNOWN_OPTION),
        }
        Ok(())
    }
}

fn read_digest(key: &str) -> Result<[u8; 32], &'static str> {
    if let Some(hex) = key.strip_prefix("sha256:") {
        return from_hex(hex).ok_or("expected 64 hexadecimal digits after sha256:");
    }
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("a key is made of printable ASCII characters without spaces");
    }
    if !(SECRET_CHARS_LEAST..=SECRET_CHARS_MOST).contains(&key.len()) {
        return Err("a key has 16 to 512 characters");
    }
    Ok(Sha256::digest(key).into())
}

fn from_hex(hex: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    if hex.len() != 64 || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, start) in digest.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(hex.get(start..start + 2)?, 16).ok()?;
    }
    Some(digest)
}

fn read_name(name: &str) -> Result<&str, &'static str> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    if (1..=64).contains(&name.len()) && name.bytes().all(sound) {
        return Ok(name);
    }
    Err("a name is made of 1 to 64 letters, digits, _, . and -")
}

/// One number allows that one alone.
fn read_priorities(range: &str) -> Result<RangeInclusive<i32>, &'static str> {
    let (least, most) = range.split_once("..").unwrap_or((range, range));
    match (least.parse(), most.parse()) {
        (Ok(least), Ok(most)) if least <= most => Ok(least..=most),
        _ => Err("expected a priority, or two with .. between them and the lower one first, such as -5..5"),
    }
}

fn read_salt(salt: &str) -> Result<Salt, &'static str> {
    match salt {
        "none" => Ok(Salt::None),
        text if (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Ok(Salt::Text(text.into()))
        }
        _ => Err("a salt is none or a string of 1 to 64 printable ASCII characters"),
    }
}

#[cfg(unix)]
fn warn_if_shared(path: &Path, metadata: &std::fs::Metadata) -> Option<String> {
    use std::os::unix::fs::PermissionsExt;
    let mode = metadata.permissions().mode() & 0o777;
    let shared = mode & 0o044 != 0;
    shared.then(|| format!("the key file {} can be read by others (mode {mode:o}); chmod 600 it", path.display()))
}

#[cfg(not(unix))]
fn warn_if_shared(_path: &Path, _metadata: &std::fs::Metadata) -> Option<String> {
    None
}

#[cfg(test)]
mod tests;
