//! Scalar values: booleans, numbers, strings, words of an enumeration.

use serde_json::{Value, json};

use super::{Kind, Wrong};
use crate::json::Raw;

#[derive(Clone, Copy)]
pub struct Flag;

impl Kind for Flag {
    type Value = bool;

    fn read(&self, value: Value) -> Result<bool, Wrong> {
        value.as_bool().ok_or_else(|| Wrong::new("must be true or false"))
    }

    fn schema(&self) -> Value {
        json!({"type": "boolean"})
    }

    fn example(&self) -> bool {
        false
    }
}

/// An integer; JSON may write it as 2 or as 2.0.
#[derive(Clone, Copy)]
pub struct Whole {
    least: i64,
    most: i64,
}

impl Whole {
    pub fn between(least: i64, most: i64) -> Self {
        Self { least, most }
    }
}

impl Kind for Whole {
    type Value = i64;

    fn read(&self, value: Value) -> Result<i64, Wrong> {
        // Beyond 2^53 a float says nothing exact.
        let exact =
            |float: f64| (float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0).then_some(float as i64);
        let number = value.as_i64().or_else(|| value.as_f64().filter(|_| !value.is_u64()).and_then(exact));
        number.filter(|number| (self.least..=self.most).contains(number)).ok_or_else(|| {
            let Self { least, most } = self;
            Wrong::new(match (*least, *most) {
                (i64::MIN, i64::MAX) => "must be a 64-bit integer".into(),
                _ => format!("must be an integer from {least} to {most}"),
            })
        })
    }

    fn schema(&self) -> Value {
        json!({"type": "integer", "minimum": self.least, "maximum": self.most})
    }

    fn example(&self) -> i64 {
        self.least
    }
}

/// A field kind: a count, within bounds.
#[derive(Clone, Copy)]
pub struct Count(Whole);

impl Count {
    pub fn between(least: usize, most: usize) -> Self {
        let whole = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        Self(Whole::between(whole(least), whole(most)))
    }
}

impl Kind for Count {
    type Value = usize;

    fn read(&self, value: Value) -> Result<usize, Wrong> {
        self.0.read(value).map(|number| number as usize)
    }

    fn schema(&self) -> Value {
        self.0.schema()
    }

    fn example(&self) -> usize {
        self.0.example() as usize
    }
}

/// The id of a token that the model knows.
#[derive(Clone, Copy)]
pub struct TokenId {
    pub vocab_size: usize,
}

impl Kind for TokenId {
    type Value = u32;

    fn read(&self, value: Value) -> Result<u32, Wrong> {
        let most = self.vocab_size.saturating_sub(1);
        Count::between(0, most).read(value).map(|id| id as u32)
    }

    fn schema(&self) -> Value {
        Count::between(0, self.vocab_size.saturating_sub(1)).schema()
    }

    fn example(&self) -> u32 {
        0
    }
}

/// A field kind: a finite number, within bounds.
#[derive(Clone, Copy)]
pub struct Number {
    least: f64,
    most: f64,
    /// Whether `least` itself is too little.
    is_open: bool,
}

impl Number {
    pub fn between(least: f64, most: f64) -> Self {
        Self { least, most, is_open: false }
    }

    pub fn above(least: f64, most: f64) -> Self {
        Self { least, most, is_open: true }
    }
}

impl Kind for Number {
    type Value = f32;

    fn read(&self, value: Value) -> Result<f32, Wrong> {
        let Self { least, most, is_open } = *self;
        let fits = |number: &f64| (least..=most).contains(number) && !(is_open && *number <= least);
        // A number above the bound stays above it when it is rounded.
        let rounded = |number: f64| (number as f32).max(if is_open { (least as f32).next_up() } else { f32::MIN });
        value.as_f64().filter(fits).map(rounded).ok_or_else(|| {
            Wrong::new(match is_open {
                true => format!("must be a number above {least} and at most {most}"),
                false => format!("must be a number from {least} to {most}"),
            })
        })
    }

    fn schema(&self) -> Value {
        let bound = if self.is_open { "exclusiveMinimum" } else { "minimum" };
        json!({"type": "number", bound: self.least, "maximum": self.most})
    }

    fn example(&self) -> f32 {
        self.most as f32
    }
}

/// A string, measured in characters.
#[derive(Clone, Copy)]
pub struct Text {
    least: usize,
    most: usize,
}

impl Text {
    pub fn between(least: usize, most: usize) -> Self {
        Self { least, most }
    }

    /// A string that is only bounded by the length of the body.
    pub fn any() -> Self {
        Self { least: 0, most: usize::MAX }
    }
}

impl Kind for Text {
    type Value = String;

    fn read(&self, value: Value) -> Result<String, Wrong> {
        let Self { least, most } = *self;
        let Value::String(text) = value else { return Err(Wrong::new("must be a string")) };
        // Bytes bound characters from above: a string that is short in bytes is not counted.
        let fits = text.len() >= least && (text.len() <= most || text.chars().count() <= most);
        match fits && (least <= 1 || text.chars().count() >= least) {
            true => Ok(text),
            false if most == usize::MAX => Err(Wrong::new(format!("must have at least {least} characters"))),
            false => Err(Wrong::new(format!("must have {least} to {most} characters"))),
        }
    }

    fn schema(&self) -> Value {
        let mut schema = json!({"type": "string"});
        if self.least > 0 {
            schema["minLength"] = self.least.into();
        }
        if self.most < usize::MAX {
            schema["maxLength"] = self.most.into();
        }
        schema
    }

    fn example(&self) -> String {
        "a".repeat(self.least)
    }
}

/// A string of visible ASCII characters that is only compared.
#[derive(Clone, Copy)]
pub struct Opaque {
    pub most: usize,
}

impl Kind for Opaque {
    type Value = String;

    fn read(&self, value: Value) -> Result<String, Wrong> {
        match value {
            Value::String(text)
                if (1..=self.most).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic()) =>
            {
                Ok(text)
            }
            _ => Err(Wrong::new(format!("must be a string of 1 to {} visible ASCII characters", self.most))),
        }
    }

    fn schema(&self) -> Value {
        json!({"type": "string", "pattern": format!("^[!-~]{{1,{}}}$", self.most), "minLength": 1, "maxLength": self.most})
    }

    fn example(&self) -> String {
        "a".into()
    }
}

/// A field kind: one of several words.
#[derive(Clone, Copy)]
pub struct Word(pub &'static [&'static str]);

impl Kind for Word {
    type Value = &'static str;

    fn read(&self, value: Value) -> Result<&'static str, Wrong> {
        let found = value.as_str().and_then(|word| self.0.iter().find(|known| **known == word));
        found.copied().ok_or_else(|| Wrong::new(format!("must be one of: {}", self.0.join(", "))))
    }

    fn schema(&self) -> Value {
        json!({"type": "string", "enum": self.0})
    }

    fn example(&self) -> &'static str {
        self.0[0]
    }
}

/// Any JSON value; its content is ignored. Its depth and size are bounded with the body's.
#[derive(Clone, Copy)]
pub struct Anything;

impl Kind for Anything {
    type Value = ();

    fn read_raw(&self, _: Raw<'_>) -> Result<(), Wrong> {
        Ok(())
    }

    fn schema(&self) -> Value {
        json!({})
    }

    fn example(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_to_their_bounds() {
        let whole = |value: Value| Whole::between(-1, 10).read(value).ok();
        assert_eq!([whole(json!(-1)), whole(json!(10)), whole(json!(3.0))], [Some(-1), Some(10), Some(3)]);
        for bad in
            [json!(-2), json!(11), json!(3.5), json!(1e300), json!(u64::MAX), json!("3"), json!(null), json!(true)]
        {
            assert_eq!(whole(bad.clone()), None, "{bad}");
        }
        assert_eq!(Whole::between(i64::MIN, i64::MAX).read(json!(i64::MIN)).ok(), Some(i64::MIN));
        let top_p = |value: Value| Number::above(0.0, 1.0).read(value).ok();
        assert_eq!([top_p(json!(1)), top_p(json!(0.5))], [Some(1.0), Some(0.5)]);
        assert!(top_p(json!(1e-60)).is_some_and(|number| number > 0.0));
        for bad in [json!(0), json!(-0.0), json!(1.01), json!(1e308), json!("1")] {
            assert_eq!(top_p(bad.clone()), None, "{bad}");
        }
    }

    #[test]
    fn texts_are_measured_in_characters() {
        let text = |text: &str| Text::between(1, 3).read(json!(text)).is_ok();
        assert!(text("日本語") && text("abc") && !text("abcd") && !text("日本語!") && !text(""));
        let opaque = |text: &str| Opaque { most: 3 }.read(json!(text)).is_ok();
        assert!(opaque("a-9") && !opaque("") && !opaque("abcd") && !opaque("é") && !opaque("a b"));
        assert_eq!(Word(&["text", "json"]).read(json!("text")), Ok("text"));
        assert!(Word(&["text"]).read(json!("json")).is_err());
        assert!(TokenId { vocab_size: 4 }.read(json!(3)).is_ok() && TokenId { vocab_size: 4 }.read(json!(4)).is_err());
    }
}
