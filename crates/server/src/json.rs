//! Access to JSON in place: a body is checked once as a whole, then read where it is.
//!
//! A tree of a body's values takes up to a hundred times the bytes that it was written in. Fields
//! are read from the text instead, and only their values are held. A key has one value: of two
//! values under one key every parser picks its own, so a proxy may have checked another one than
//! the server would use.

use std::borrow::Cow;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

use memchr::memchr2;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Whether these bytes are one JSON value without doubled names, at any depth. Nothing of it is
/// kept.
pub fn check(bytes: &[u8]) -> Result<(), serde_json::Error> {
    let mut names = Names { hasher: RandomState::new(), open: Vec::new() };
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    Checked(&mut names).deserialize(&mut deserializer)?;
    deserializer.end()
}

/// Hashes of the names of all objects that are open.
struct Names {
    hasher: RandomState,
    open: Vec<u64>,
}

struct Checked<'a>(&'a mut Names);

impl<'de> DeserializeSeed<'de> for Checked<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Checked<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Checked(self.0))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let first = self.0.open.len();
        while let Some(hash) = entries.next_key_seed(Hashed(&self.0.hasher))? {
            self.0.open.push(hash);
            entries.next_value_seed(Checked(self.0))?;
        }
        let own = &mut self.0.open[first..];
        own.sort_unstable();
        let is_doubled = own.windows(2).any(|pair| pair[0] == pair[1]);
        self.0.open.truncate(first);
        if is_doubled { Err(A::Error::custom("an object has a duplicate key")) } else { Ok(()) }
    }
}

/// A name is compared by its hash, keyed anew for each body.
struct Hashed<'a>(&'a RandomState);

impl<'de> DeserializeSeed<'de> for Hashed<'_> {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u64, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Hashed<'_> {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<u64, E> {
        Ok(self.0.hash_one(name))
    }
}

/// One value in place. For text that was not checked it returns some value, and never panics.
#[derive(Clone, Copy, Debug)]
pub struct Raw<'a>(&'a str);

impl<'a> Raw<'a> {
    pub fn new(text: &'a str) -> Self {
        Self(text.trim_ascii())
    }

    pub fn len(self) -> usize {
        self.0.len()
    }

    pub fn is_null(self) -> bool {
        self.0 == "null"
    }

    pub fn is_text(self) -> bool {
        self.0.starts_with('"')
    }

    pub fn is_list(self) -> bool {
        self.0.starts_with('[')
    }

    /// The values of a list.
    pub fn items(self) -> Option<Items<'a>> {
        self.is_list().then_some(Items { text: self.0, at: 1 })
    }

    /// Names and values of an object.
    pub fn entries(self) -> Option<Entries<'a>> {
        self.0.starts_with('{').then_some(Entries(Items { text: self.0, at: 1 }))
    }

    /// The value, all of it. For what is known to be small.
    pub fn whole(self) -> Value {
        serde_json::from_str(self.0).unwrap_or(Value::Null)
    }

    /// The value, where it is a list or an object an empty one.
    pub fn shallow(self) -> Value {
        match self.0.as_bytes() {
            [b'[', ..] => Value::Array(Vec::new()),
            [b'{', ..] => Value::Object(Map::new()),
            [b'"', ..] => self.text().map_or(Value::Null, |text| Value::String(text.into_owned())),
            // By far the most frequent: token ids.
            digits @ [b'1'..=b'9', ..] if digits.len() < 19 && digits.iter().all(u8::is_ascii_digit) => {
                digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')).into()
            }
            _ => self.whole(),
        }
    }

    /// The same with an empty text for a text: what it is rather than what it says.
    pub fn outline(self) -> Value {
        if self.is_text() { Value::String(String::new()) } else { self.shallow() }
    }

    /// Like [`Self::shallow`], but of an object the first entries, their values shallow in their
    /// turn.
    pub fn outer(self, most: usize) -> Value {
        match self.entries() {
            Some(entries) => {
                let entries = entries.take(most).map(|(name, value)| (name.into_owned(), value.shallow()));
                Value::Object(entries.collect())
            }
            None => self.shallow(),
        }
    }

    fn text(self) -> Option<Cow<'a, str>> {
        let inner = self.0.strip_prefix('"')?.strip_suffix('"')?;
        match inner.contains('\\') {
            false => Some(Cow::Borrowed(inner)),
            true => serde_json::from_str(self.0).ok().map(Cow::Owned),
        }
    }
}

#[derive(Clone)]
pub struct Items<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Items<'a> {
    /// The value behind blanks and `mark`; none at the end.
    fn value_after(&mut self, mark: u8) -> Option<Raw<'a>> {
        let bytes = self.text.as_bytes();
        while bytes.get(self.at).is_some_and(|byte| byte.is_ascii_whitespace() || *byte == mark) {
            self.at += 1;
        }
        if matches!(bytes.get(self.at)?, b']' | b'}') {
            return None;
        }
        let start = self.at;
        self.at = end_of_value(bytes, start);
        self.text.get(start..self.at).filter(|text| !text.is_empty()).map(Raw)
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Raw<'a>;

    fn next(&mut self) -> Option<Raw<'a>> {
        self.value_after(b',')
    }
}

#[derive(Clone)]
pub struct Entries<'a>(Items<'a>);

impl<'a> Iterator for Entries<'a> {
    type Item = (Cow<'a, str>, Raw<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let name = self.0.value_after(b',')?.text()?;
        Some((name, self.0.value_after(b':')?))
    }
}

/// End of the value that begins at `at`.
fn end_of_value(bytes: &[u8], at: usize) -> usize {
    let mut depth = 0usize;
    let mut at = at;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => {
                at = end_of_text(bytes, at + 1);
                if depth == 0 {
                    return at;
                }
                continue;
            }
            b'[' | b'{' => depth += 1,
            b']' | b'}' if depth <= 1 => return at + depth,
            b']' | b'}' => depth -= 1,
            b',' | b':' | b' ' | b'\t' | b'\n' | b'\r' if depth == 0 => return at,
            _ => {}
        }
        at += 1;
    }
    at
}

/// The position behind the quote that ends the string whose first character is at `at`.
fn end_of_text(bytes: &[u8], mut at: usize) -> usize {
    while let Some(found) = bytes.get(at..).and_then(|rest| memchr2(b'"', b'\\', rest)) {
        at += found;
        if bytes[at] == b'"' {
            return at + 1;
        }
        at += 2;
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value, put together from what lies in the text.
    fn read(raw: Raw<'_>) -> Value {
        match (raw.items(), raw.entries()) {
            (Some(items), _) => items.map(read).collect(),
            (_, Some(entries)) => {
                Value::Object(entries.map(|(name, value)| (name.into_owned(), read(value))).collect())
            }
            _ => raw.shallow(),
        }
    }

    #[test]
    fn values_are_read_where_they_lie() {
        for text in [
            r#"{"a": [1, -2, 1.5, 1e300, 18446744073709551615, true, null, "x\n\u00e9\"]", {"a": {}}], "b": ""}"#,
            " [ ] ",
            "[[],[[]],{},[{}] , 0]",
            r#"{"a\"b" : {"" :"}" , "c": ["[", "\\"]},"d":false}"#,
            "[0, -0, 10, 1234567890123456789, 12345678901234567890, 1.0]",
            "3",
            r#""""#,
            r#"" \\\" ""#,
        ] {
            let expected: Value = serde_json::from_str(text).expect("sound");
            assert!(check(text.as_bytes()).is_ok(), "{text}");
            assert_eq!(read(Raw::new(text)), expected, "{text}");
        }
    }

    #[test]
    fn doubled_names_and_other_faults_are_found() {
        for text in [r#"{"a": 1, "a": 1}"#, r#"{"b": [{"a": 1, "\u0061": 2}]}"#, r#"{"a":{"b":1},"c":[],"a":{}}"#] {
            assert!(check(text.as_bytes()).is_err_and(|error| error.is_data()), "{text}");
        }
        for text in [r#"{"a": {"a": {"a": 1}}, "b": {"a": 2}}"#, "[{\"a\":1},{\"a\":1}]"] {
            assert!(check(text.as_bytes()).is_ok(), "{text}");
        }
        for text in ["", "[", "{\"a\"}", "[1 2]", "nul", "\"\\ud800\"", "[]]", "{\"a\": oops"] {
            assert!(check(text.as_bytes()).is_err_and(|error| !error.is_data()), "{text}");
        }
    }

    #[test]
    fn text_that_was_not_checked_harms_nobody() {
        let text = r#"{"a": [1, "x\"", {"b": "é"}], "c": -1.5}"#;
        for (end, _) in text.char_indices() {
            read(Raw::new(&text[..end]));
            read(Raw::new(&text[end..]));
        }
        for text in ["]", "[:]", "{,:,}", "[\"", "\\", "[\"\\", "{\"a\":}", "[}", "{]"] {
            read(Raw::new(text));
        }
    }

    #[test]
    fn outlines_have_no_contents() {
        for (text, shallow, outline) in
            [("[1]", "[]", "[]"), (r#"{"a":1}"#, "{}", "{}"), (r#""ab""#, r#""ab""#, r#""""#), ("1", "1", "1")]
        {
            let raw = Raw::new(text);
            assert_eq!((raw.shallow().to_string(), raw.outline().to_string()), (shallow.into(), outline.into()));
        }
        let outer = Raw::new(r#"{"a": [1], "b": "c", "d": 1}"#).outer(2);
        assert_eq!(outer.to_string(), r#"{"a":[],"b":"c"}"#);
    }
}
