//! The few words of JSON Schema that answers are described with.

use serde_json::{Map, Value, json};

/// A schema that stands under its name with the others.
pub fn named(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// An object with these fields and no others.
pub fn object<const R: usize, const O: usize>(required: [(&str, Value); R], optional: [(&str, Value); O]) -> Value {
    let names: Vec<Value> = required.iter().map(|(name, _)| (*name).into()).collect();
    let fields = required.into_iter().chain(optional).map(|(name, schema)| (name.to_owned(), schema));
    let mut object = json!({
        "type": "object", "properties": fields.collect::<Map<_, _>>(), "additionalProperties": false,
    });
    // OpenAPI's older readers take no empty list.
    if !names.is_empty() {
        object["required"] = Value::Array(names);
    }
    object
}

/// An object with these fields and perhaps others.
pub fn open_object<const R: usize>(required: [(&str, Value); R]) -> Value {
    let mut object = object(required, []);
    object["additionalProperties"] = json!(true);
    object
}

pub fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

pub fn empty_list() -> Value {
    json!({"type": "array", "maxItems": 0})
}

/// An object whose values are all of one kind.
pub fn map_of(values: Value) -> Value {
    json!({"type": "object", "additionalProperties": values})
}

pub fn or_null(schema: Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

pub fn either(first: Value, second: Value) -> Value {
    json!({"anyOf": [first, second]})
}

pub fn text() -> Value {
    json!({"type": "string"})
}

/// A text that always begins so.
pub fn id(prefix: &str) -> Value {
    json!({"type": "string", "pattern": format!("^{prefix}[0-9A-Za-z_-]+$")})
}

pub fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

pub fn number() -> Value {
    json!({"type": "number"})
}

/// Schema of a number from 0 to 1.
pub fn share() -> Value {
    json!({"type": "number", "minimum": 0, "maximum": 1})
}

pub fn flag() -> Value {
    json!({"type": "boolean"})
}

pub fn null() -> Value {
    json!({"type": "null"})
}

/// Schema of a string that is always this word.
pub fn word(word: &str) -> Value {
    json!({"type": "string", "const": word})
}

pub fn one_of(words: &[&str]) -> Value {
    json!({"type": "string", "enum": words})
}
