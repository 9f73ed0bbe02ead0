//! Composed values: arrays, objects, alternatives, maps.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::{Fields, Kind, Wrong, describe_object, read_object};
use crate::json::Raw;

pub struct ListOf<K> {
    kind: K,
    least: usize,
    most: usize,
}

impl<K> ListOf<K> {
    pub fn between(kind: K, least: usize, most: usize) -> Self {
        Self { kind, least, most }
    }
}

impl<K: Kind> Kind for ListOf<K> {
    type Value = Vec<K::Value>;

    fn read_raw(&self, raw: Raw<'_>) -> Result<Self::Value, Wrong> {
        let Some(items) = raw.items() else { return Err(Wrong::new("must be an array")) };
        let count = items.clone().count();
        if !(self.least..=self.most).contains(&count) {
            return Err(Wrong::new(format!("must be an array of {} to {}", self.least, self.most)));
        }
        // Counted first, so that no vector is copied while it grows.
        let mut list = Vec::with_capacity(count);
        for (index, item) in items.enumerate() {
            list.push(self.kind.read_raw(item).map_err(|wrong| wrong.below(&format!("[{index}]")))?);
        }
        Ok(list)
    }

    fn schema(&self) -> Value {
        json!({"type": "array", "items": self.kind.schema(), "minItems": self.least, "maxItems": self.most})
    }

    fn example(&self) -> Self::Value {
        (0..self.least).map(|_| self.kind.example()).collect()
    }
}

/// An object with fields of its own, as `read` reads them.
pub struct Object<F>(pub F);

impl<T, F: Fn(&mut Fields) -> Result<T, Wrong>> Kind for Object<F> {
    type Value = T;

    fn read_raw(&self, raw: Raw<'_>) -> Result<T, Wrong> {
        match raw.entries() {
            Some(object) => read_object(object, &self.0),
            None => Err(Wrong::new("must be an object")),
        }
    }

    fn schema(&self) -> Value {
        describe_object(&self.0).1
    }

    fn example(&self) -> T {
        describe_object(&self.0).0
    }
}

/// The first kind that takes the JSON type at hand. `when` tells, without looking deeper, whether
/// that is the first.
pub struct Either<A, B> {
    pub when: fn(&Value) -> bool,
    pub then: A,
    pub or: B,
}

pub enum OneOf<A, B> {
    First(A),
    Second(B),
}

impl<A: Kind, B: Kind> Kind for Either<A, B> {
    type Value = OneOf<A::Value, B::Value>;

    fn read_raw(&self, raw: Raw<'_>) -> Result<Self::Value, Wrong> {
        match (self.when)(&raw.outline()) {
            true => self.then.read_raw(raw).map(OneOf::First),
            false => self.or.read_raw(raw).map(OneOf::Second),
        }
    }

    fn schema(&self) -> Value {
        json!({"anyOf": [self.then.schema(), self.or.schema()]})
    }

    fn example(&self) -> Self::Value {
        OneOf::First(self.then.example())
    }
}

/// One string or an array of strings.
pub fn one_or_many<K: Kind + Copy>(kind: K, most: usize) -> Mapped<Either<K, ListOf<K>>, Vec<K::Value>> {
    let either = Either { when: Value::is_string, then: kind, or: ListOf::between(kind, 0, most) };
    Mapped {
        kind: either,
        map: |value| match value {
            OneOf::First(one) => vec![one],
            OneOf::Second(many) => many,
        },
    }
}

/// A kind whose values are turned into others.
pub struct Mapped<K: Kind, T> {
    pub kind: K,
    pub map: fn(K::Value) -> T,
}

impl<K: Kind, T> Kind for Mapped<K, T> {
    type Value = T;

    fn read_raw(&self, raw: Raw<'_>) -> Result<T, Wrong> {
        self.kind.read_raw(raw).map(self.map)
    }

    fn schema(&self) -> Value {
        self.kind.schema()
    }

    fn example(&self) -> T {
        (self.map)(self.kind.example())
    }
}

/// An object of numbers, keyed by token ids.
#[derive(Clone, Copy)]
pub struct PerToken<K> {
    pub kind: K,
    pub vocab_size: usize,
    pub most: usize,
}

impl<K: Kind> Kind for PerToken<K> {
    type Value = Vec<(u32, K::Value)>;

    fn read_raw(&self, raw: Raw<'_>) -> Result<Self::Value, Wrong> {
        let Some(entries) = raw.entries() else { return Err(Wrong::new("must be an object of token ids and numbers")) };
        if entries.clone().nth(self.most).is_some() {
            return Err(Wrong::new(format!("must have at most {} tokens", self.most)));
        }
        let entry = |(token, value): (Cow<'_, str>, Raw<'_>)| {
            // In canonical form: "007" and "+7" would be other keys of the same token.
            let id = token.parse::<u32>().ok().filter(|id| (*id as usize) < self.vocab_size && id.to_string() == token);
            let id =
                id.ok_or_else(|| Wrong::new(format!("must have keys that are token ids below {}", self.vocab_size)))?;
            Ok((id, self.kind.read_raw(value).map_err(|wrong| wrong.below(&format!(".{id}")))?))
        };
        entries.map(entry).collect()
    }

    fn schema(&self) -> Value {
        json!({
            "type": "object", "maxProperties": self.most, "propertyNames": {"pattern": below(self.vocab_size)},
            "additionalProperties": self.kind.schema(),
        })
    }

    fn example(&self) -> Self::Value {
        Vec::new()
    }
}

/// A regular expression for the decimal numbers below `limit`, which is at least 1.
fn below(limit: usize) -> String {
    let most = limit.saturating_sub(1).to_string();
    let mut forms = Vec::new();
    // Fewer digits than the largest, without a leading zero.
    match most.len() {
        1 => {}
        2 => forms.push("[0-9]".to_owned()),
        digits => forms.push(format!("[0-9]|[1-9][0-9]{{1,{}}}", digits - 2)),
    }
    // As many digits: equal up to a place, less there, anything after it.
    for (place, digit) in most.bytes().enumerate() {
        let least = if place == 0 && most.len() > 1 { b'1' } else { b'0' };
        if digit > least {
            let rest = most.len() - place - 1;
            let tail = if rest > 0 { format!("[0-9]{{{rest}}}") } else { String::new() };
            forms.push(format!("{}[{}-{}]{tail}", &most[..place], least as char, (digit - 1) as char));
        }
    }
    forms.push(most);
    format!("^({})$", forms.join("|"))
}

/// An object of scalar values under keys of the client's choice.
#[derive(Clone, Copy)]
pub struct PlainMap {
    pub most: usize,
    /// Bytes of all keys and values together.
    pub most_bytes: usize,
    pub reserved: &'static [&'static str],
}

impl Kind for PlainMap {
    type Value = Map<String, Value>;

    fn read_raw(&self, raw: Raw<'_>) -> Result<Self::Value, Wrong> {
        self.read(raw.outer(self.most.saturating_add(1)))
    }

    fn read(&self, value: Value) -> Result<Self::Value, Wrong> {
        let Value::Object(map) = value else {
            return Err(Wrong::new("must be an object of strings, numbers, booleans and nulls"));
        };
        if map.len() > self.most {
            return Err(Wrong::new(format!("must have at most {} fields", self.most)));
        }
        if map.values().any(|value| value.is_array() || value.is_object()) {
            return Err(Wrong::new("must have only strings, numbers, booleans and nulls as values"));
        }
        if map.keys().any(|name| self.reserved.contains(&name.as_str())) {
            return Err(Wrong::new(format!("must not set: {}", self.reserved.join(", "))));
        }
        let bytes: usize = map.iter().map(|(name, value)| name.len() + value.as_str().map_or(8, str::len)).sum();
        if bytes > self.most_bytes {
            return Err(Wrong::new(format!("must have at most {} bytes", self.most_bytes)));
        }
        Ok(map)
    }

    fn schema(&self) -> Value {
        json!({
            "type": "object", "maxProperties": self.most,
            "propertyNames": {"not": {"enum": self.reserved}},
            "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
        })
    }

    fn example(&self) -> Self::Value {
        Map::new()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Count, Flag, Number, Text};
    use super::*;

    #[test]
    fn a_wrong_part_is_named_by_its_path() {
        let item = Object(|fields: &mut Fields| fields.required("size", Count::between(1, 9), ""));
        let list = ListOf::between(item, 1, 2);
        let message = |value: Value| crate::ApiError::from(list.read(value).expect_err("refused")).to_string();
        assert_eq!(message(json!([{"size": 1}, {"size": 0}])), "[1].size: must be an integer from 1 to 9");
        assert_eq!(message(json!([])), "must be an array of 1 to 2");
        assert_eq!(message(json!([3])), "[0]: must be an object");
        assert_eq!(list.read(json!([{"size": 1}])).ok(), Some(vec![1]));
        assert_eq!(list.schema()["items"]["required"], json!(["size"]));
    }

    #[test]
    fn one_text_or_many() {
        let stop = one_or_many(Text::between(1, 3), 2);
        assert_eq!(stop.read(json!("a")).ok(), Some(vec!["a".to_owned()]));
        assert_eq!(stop.read(json!(["a", "b"])).ok().map(|texts| texts.len()), Some(2));
        assert!(
            stop.read(json!(["a", "b", "c"])).is_err() && stop.read(json!(7)).is_err() && stop.read(json!("")).is_err()
        );
        assert!(Either { when: Value::is_boolean, then: Flag, or: Count::between(0, 1) }.read(json!("x")).is_err());
    }

    #[test]
    fn tokens_are_named_by_their_ids() {
        let bias = PerToken { kind: Number::between(-100.0, 100.0), vocab_size: 120, most: 2 };
        assert_eq!(bias.read(json!({"119": -100, "0": 1})).ok(), Some(vec![(119, -100.0), (0, 1.0)]));
        for bad in
            [json!({"120": 1}), json!({"-1": 1}), json!({"07": 1}), json!({"7": 101}), json!({"a": 1}), json!([])]
        {
            assert!(bias.read(bad.clone()).is_err(), "{bad}");
        }
        assert!(bias.read(json!({"1": 1, "2": 1, "3": 1})).is_err());
    }

    /// The pattern's alternatives are read one by one: digits, classes and counts are all it has.
    #[test]
    fn the_pattern_takes_just_the_numbers_below() {
        fn matches(form: &str, text: &str) -> bool {
            let Some(first) = form.chars().next() else { return text.is_empty() };
            let (low, high, rest) = match first {
                '[' => (form.as_bytes()[1], form.as_bytes()[3], &form[5..]),
                digit => (digit as u8, digit as u8, &form[1..]),
            };
            let (least, most, rest) = match rest.strip_prefix('{').and_then(|rest| rest.split_once('}')) {
                Some((counts, rest)) => {
                    let (least, most) = counts.split_once(',').unwrap_or((counts, counts));
                    (least.parse().expect("a count"), most.parse().expect("a count"), rest)
                }
                None => (1, 1, rest),
            };
            let run = text.bytes().take_while(|byte| (low..=high).contains(byte)).count();
            (least..=most.min(run)).any(|taken: usize| matches(rest, &text[taken..]))
        }
        for limit in [1, 2, 9, 10, 11, 99, 100, 101, 120, 1000, 1010, 12345] {
            let pattern = below(limit);
            let forms = pattern.trim_start_matches("^(").trim_end_matches(")$");
            for number in (0..300).chain(limit.saturating_sub(300)..limit + 300) {
                let found = forms.split('|').any(|form| matches(form, &number.to_string()));
                assert_eq!(found, number < limit, "{number} of {limit}: {pattern}");
            }
            assert!(!forms.split('|').any(|form| matches(form, "007")), "{pattern}");
        }
    }

    #[test]
    fn plain_maps_hold_plain_values() {
        let map = PlainMap { most: 2, most_bytes: 40, reserved: &["messages"] };
        assert!(map.read(json!({"enable_thinking": true, "a": "b"})).is_ok());
        for bad in
            [json!({"messages": 1}), json!({"a": []}), json!({"a": 1, "b": 2, "c": 3}), json!({"a": "x".repeat(50)})]
        {
            assert!(map.read(bad.clone()).is_err(), "{bad}");
        }
    }
}
