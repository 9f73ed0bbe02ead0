//! One description of a request's fields that both reads them and documents them.
//!
//! A request type says once, in [`Request::read`], which fields it has, with their kinds and
//! bounds. Run over a client's object, that gives the request or a refusal that names the field;
//! run over nothing, it gives the JSON schema that /openapi.json prints. So the two cannot
//! disagree. A field that no reader asks for is refused by name.

mod kinds;
mod nested;

use std::borrow::Cow;

pub use kinds::*;
pub use nested::*;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::json::{Entries, Raw};

/// No object that is read field by field has as many.
const MOST_FIELDS: usize = 256;

/// Longest value of an unsupported field that is compared with its harmless values.
const HARMLESS_BYTES: usize = 1024;

/// A value that a client can send. Kinds whose arrays and objects matter are read where they lie;
/// for all others it is enough to say what a value is read as.
pub trait Kind {
    type Value;

    /// Reads a value whose arrays and objects are empty placeholders.
    fn read(&self, value: Value) -> Result<Self::Value, Wrong> {
        self.read_raw(Raw::new(&value.to_string()))
    }

    fn read_raw(&self, raw: Raw<'_>) -> Result<Self::Value, Wrong> {
        self.read(raw.shallow())
    }

    fn schema(&self) -> Value;

    /// Some valid value: what a reader gets that runs for its description alone.
    fn example(&self) -> Self::Value;
}

/// The reason why a value is refused, and its place below the request.
#[derive(Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Names and indices on the way down, each with its separator before it.
    path: String,
    reason: Reason,
}

#[derive(Debug, PartialEq, Eq)]
enum Reason {
    Message(String),
    NoSuchModel,
}

impl Wrong {
    pub fn new(message: impl Into<String>) -> Self {
        Self { path: String::new(), reason: Reason::Message(message.into()) }
    }

    /// The value names a model that is not served here.
    pub fn no_such_model() -> Self {
        Self { path: String::new(), reason: Reason::NoSuchModel }
    }

    pub fn below(self, part: &str) -> Self {
        Self { path: format!("{part}{}", self.path), ..self }
    }
}

impl From<Wrong> for ApiError {
    fn from(wrong: Wrong) -> Self {
        let field = wrong.path.trim_start_matches('.');
        match wrong.reason {
            Reason::Message(message) => {
                ApiError::Invalid { field: (!field.is_empty()).then(|| field.to_owned()), message }
            }
            Reason::NoSuchModel => ApiError::NoSuchModel,
        }
    }
}

/// Fields of one object: those of a client, or those that are being described.
pub struct Fields<'a>(Mode<'a>);

enum Mode<'a> {
    /// Fields that no reader has asked for yet.
    Reading(Vec<(Cow<'a, str>, Raw<'a>)>),
    Describing {
        properties: Map<String, Value>,
        required: Vec<Value>,
    },
}

/// Something that a client asks for.
pub trait Request: Sized {
    type Bounds: ?Sized;

    fn read(fields: &mut Fields, bounds: &Self::Bounds) -> Result<Self, Wrong>;
}

/// Reads a client's object as a request.
pub fn read_raw<R: Request>(object: Entries<'_>, bounds: &R::Bounds) -> Result<R, ApiError> {
    Ok(read_object(object, |fields| R::read(fields, bounds))?)
}

/// Reads fields from a small JSON object that was parsed already.
pub fn read<R: Request>(object: Map<String, Value>, bounds: &R::Bounds) -> Result<R, ApiError> {
    let text = Value::Object(object).to_string();
    read_raw(Raw::new(&text).entries().expect("an object"), bounds)
}

/// JSON schema of a request.
pub fn schema<R: Request>(bounds: &R::Bounds) -> Value {
    describe_object(|fields| R::read(fields, bounds)).1
}

fn read_object<T>(object: Entries<'_>, read: impl Fn(&mut Fields) -> Result<T, Wrong>) -> Result<T, Wrong> {
    let entries: Vec<_> = object.take(MOST_FIELDS + 1).collect();
    if entries.len() > MOST_FIELDS {
        return Err(Wrong::new(format!("must have at most {MOST_FIELDS} fields")));
    }
    let mut fields = Fields(Mode::Reading(entries));
    let value = read(&mut fields)?;
    match fields.0 {
        Mode::Reading(rest) => match rest.first() {
            Some((name, _)) => Err(Wrong::new("unknown field").below(&format!(".{}", shown(name)))),
            None => Ok(value),
        },
        Mode::Describing { .. } => Ok(value),
    }
}

fn describe_object<T>(read: impl Fn(&mut Fields) -> Result<T, Wrong>) -> (T, Value) {
    let mut fields = Fields(Mode::Describing { properties: Map::new(), required: Vec::new() });
    let Ok(example) = read(&mut fields) else { panic!("a reader refuses the examples of its own fields") };
    let Mode::Describing { properties, required } = fields.0 else { unreachable!("the mode never changes") };
    let mut schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
    if !required.is_empty() {
        schema["required"] = Value::Array(required);
    }
    (example, schema)
}

/// An unknown field's name is shown only if it looks like one.
fn shown(name: &str) -> &str {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.len() <= 64 && name.chars().all(is_plain) { name } else { "(unreadable)" }
}

impl<'a> Fields<'a> {
    /// Removes and returns the client's value of a field.
    fn take(rest: &mut Vec<(Cow<'a, str>, Raw<'a>)>, name: &str) -> Option<Raw<'a>> {
        let at = rest.iter().position(|(known, _)| known == name)?;
        Some(rest.remove(at).1)
    }

    /// A field that must be there.
    pub fn required<K: Kind>(&mut self, name: &str, kind: K, about: &str) -> Result<K::Value, Wrong> {
        match &mut self.0 {
            Mode::Reading(rest) => match Self::take(rest, name) {
                Some(raw) => kind.read_raw(raw).map_err(|wrong| wrong.below(&format!(".{name}"))),
                None => Err(Wrong::new("this field is required").below(&format!(".{name}"))),
            },
            Mode::Describing { properties, required } => {
                properties.insert(name.into(), described(kind.schema(), about));
                required.push(name.into());
                Ok(kind.example())
            }
        }
    }

    /// A field that may be left out, or null.
    pub fn optional<K: Kind>(&mut self, name: &str, kind: K, about: &str) -> Result<Option<K::Value>, Wrong> {
        match &mut self.0 {
            Mode::Reading(rest) => match Self::take(rest, name).filter(|raw| !raw.is_null()) {
                None => Ok(None),
                Some(raw) => kind.read_raw(raw).map(Some).map_err(|wrong| wrong.below(&format!(".{name}"))),
            },
            Mode::Describing { properties, .. } => {
                properties.insert(name.into(), described(or_null(kind.schema()), about));
                Ok(None)
            }
        }
    }

    /// A field that clients know and this server cannot honour: it may be left out, be null, or say
    /// what is done anyway.
    pub fn refused(&mut self, name: &str, harmless: &[Value], why: &str) -> Result<(), Wrong> {
        match &mut self.0 {
            Mode::Reading(rest) => match Self::take(rest, name).filter(|raw| !raw.is_null()) {
                Some(raw) if raw.len() > HARMLESS_BYTES || !harmless.contains(&raw.whole()) => {
                    Err(Wrong::new(why).below(&format!(".{name}")))
                }
                _ => Ok(()),
            },
            Mode::Describing { properties, .. } => {
                let mut allowed = vec![Value::Null];
                allowed.extend_from_slice(harmless);
                properties.insert(name.into(), json!({"enum": allowed, "description": why}));
                Ok(())
            }
        }
    }

    /// Several such fields at once.
    pub fn all_refused(&mut self, names: &[&str], why: &str) -> Result<(), Wrong> {
        names.iter().try_for_each(|name| self.refused(name, &[], why))
    }
}

fn described(mut schema: Value, about: &str) -> Value {
    if !about.is_empty() {
        schema["description"] = about.into();
    }
    schema
}

fn or_null(mut schema: Value) -> Value {
    match (schema.get("type"), schema.get("enum")) {
        (Some(Value::String(kind)), None) => {
            schema["type"] = json!([kind, "null"]);
            schema
        }
        _ => json!({"anyOf": [schema, {"type": "null"}]}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Order {
        size: usize,
        heat: Option<f32>,
    }

    impl Request for Order {
        type Bounds = usize;

        fn read(fields: &mut Fields, most: &usize) -> Result<Self, Wrong> {
            let size = fields.required("size", Count::between(1, *most), "How many.")?;
            let heat = fields.optional("heat", Number::between(0.0, 2.0), "")?;
            fields.refused("sauce", &[json!("none")], "there is no sauce")?;
            Ok(Self { size, heat })
        }
    }

    fn order(body: Value) -> Result<Order, String> {
        let Value::Object(object) = body else { panic!("an object") };
        read::<Order>(object, &4).map_err(|error| error.to_string())
    }

    #[test]
    fn good_fields_are_read_and_bad_ones_named() {
        assert_eq!(order(json!({"size": 4, "heat": null, "sauce": "none"})), Ok(Order { size: 4, heat: None }));
        assert_eq!(order(json!({"size": 2.0, "heat": 2})), Ok(Order { size: 2, heat: Some(2.0) }));
        for (body, message) in [
            (json!({}), "size: this field is required"),
            (json!({"size": null}), "size: must be an integer from 1 to 4"),
            (json!({"size": 5}), "size: must be an integer from 1 to 4"),
            (json!({"size": 1, "heat": "hot"}), "heat: must be a number from 0 to 2"),
            (json!({"size": 1, "sauce": "red"}), "sauce: there is no sauce"),
            (json!({"size": 1, "spoon": 1}), "spoon: unknown field"),
            (json!({"size": 1, "a b\n": 1}), "(unreadable): unknown field"),
        ] {
            assert_eq!(order(body), Err(message.into()));
        }
    }

    #[test]
    fn the_schema_says_the_same() {
        let schema = schema::<Order>(&4);
        assert_eq!(schema["required"], json!(["size"]));
        assert_eq!(
            schema["properties"]["size"],
            json!({"type": "integer", "minimum": 1, "maximum": 4, "description": "How many."})
        );
        assert_eq!(schema["properties"]["heat"], json!({"type": ["number", "null"], "minimum": 0.0, "maximum": 2.0}));
        assert_eq!(schema["properties"]["sauce"]["enum"], json!([null, "none"]));
        assert_eq!(schema["additionalProperties"], false);
    }
}
