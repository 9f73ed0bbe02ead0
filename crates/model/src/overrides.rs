//! Requests that go beyond a model's files: another context, and settings in place of the
//! configuration's.

use serde_json::{Map, Value};

/// Options for opening a model; by default as its files describe it.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// A context other than the model's own; encodings whose formula depends on length follow it.
    pub max_context: Option<usize>,
    pub overrides: Overrides,
}

impl From<Option<usize>> for Wanted {
    fn from(max_context: Option<usize>) -> Self {
        Self { max_context, ..Self::default() }
    }
}

/// Fields of config.json that replace those of the file; a GGUF file's settings have the same
/// names.
///
/// Inner objects are merged, as in vLLM's `--hf-overrides`, except for those that describe one
/// thing as a whole: a scaling of positions and a quantization are replaced. A scaling that does
/// not name the base keeps the file's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    fields: Map<String, Value>,
    /// For the model that generates text, wherever its configuration is.
    rope_scaling: Option<Map<String, Value>>,
}

const SCALINGS: [&str; 2] = ["rope_scaling", "rope_parameters"];
const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];
/// Fields that describe positions before any scaling, and so stay with another one.
const BASE: [&str; 2] = ["rope_theta", "partial_rotary_factor"];
const ORIGINAL: &str = "original_max_position_embeddings";

impl Overrides {
    pub fn new(fields: Map<String, Value>, rope_scaling: Option<Map<String, Value>>) -> Self {
        Self { fields, rope_scaling }
    }

    pub fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.rope_scaling.is_none()
    }

    /// Whether the scaling of positions differs from the file's.
    pub(crate) fn scale_positions(&self) -> bool {
        self.rope_scaling.is_some() || SCALINGS.iter().any(|name| self.fields.contains_key(*name))
    }

    /// The overrides that may change how weights are read, as text; those of positions do not.
    pub fn about_weights(&self) -> String {
        let of_positions = |name: &str| {
            SCALINGS.contains(&name) || BASE.contains(&name) || [ORIGINAL, "max_position_embeddings"].contains(&name)
        };
        let mut fields = self.fields.clone();
        fields.retain(|name, _| !of_positions(name));
        if fields.is_empty() { String::new() } else { Value::Object(fields).to_string() }
    }

    pub(crate) fn apply(&self, fields: &mut Map<String, Value>) {
        for (name, value) in &self.fields {
            set(fields, name, value);
        }
        let Some(scaling) = &self.rope_scaling else { return };
        match fields.get_mut("text_config") {
            Some(Value::Object(text)) => set_scaling(text, scaling.clone()),
            _ => set_scaling(fields, scaling.clone()),
        }
    }
}

fn set(fields: &mut Map<String, Value>, name: &str, value: &Value) {
    match (fields.get_mut(name), value) {
        (_, Value::Object(scaling)) if SCALINGS.contains(&name) => set_scaling(fields, scaling.clone()),
        (_, Value::Null) if SCALINGS.contains(&name) => set_scaling(fields, Map::new()),
        (Some(Value::Object(held)), Value::Object(given)) if name != "quantization_config" => {
            given.iter().for_each(|(name, value)| set(held, name, value));
        }
        _ => {
            fields.insert(name.to_owned(), value.clone());
            if BASE.contains(&name) {
                set_base(fields, name, value);
            }
        }
    }
}

/// Sets the base, also in transformers 5's place, the object that describes positions.
fn set_base(fields: &mut Map<String, Value>, name: &str, value: &Value) {
    for scaling in SCALINGS {
        let Some(Value::Object(held)) = fields.get_mut(scaling) else { continue };
        if let Some(base) = held.get_mut(name) {
            *base = value.clone();
        }
        if let Some(Value::Object(full)) = held.get_mut("full_attention") {
            full.insert(name.to_owned(), value.clone());
        }
    }
}

/// Replaces the scaling, in transformers 4's or 5's form.
fn set_scaling(fields: &mut Map<String, Value>, given: Map<String, Value>) {
    let held: Vec<Map<String, Value>> =
        SCALINGS.iter().filter_map(|name| fields.remove(*name)).filter_map(object).collect();
    if let Some(original) = given.get(ORIGINAL)
        && fields.contains_key(ORIGINAL)
    {
        fields.insert(ORIGINAL.to_owned(), original.clone());
    }
    if LAYER_TYPES.iter().any(|kind| given.contains_key(*kind)) {
        fields.insert("rope_parameters".to_owned(), Value::Object(given));
        return;
    }
    // One object per layer type: the scaling applies to the layers without a window.
    if let Some(mut nested) = held.iter().find(|held| held.contains_key(LAYER_TYPES[0])).cloned() {
        let full = nested.remove(LAYER_TYPES[0]).and_then(object).unwrap_or_default();
        nested.insert(LAYER_TYPES[0].to_owned(), Value::Object(on_base(&[full], given)));
        fields.insert("rope_parameters".to_owned(), Value::Object(nested));
        return;
    }
    fields.insert("rope_scaling".to_owned(), Value::Object(on_base(&held, given)));
}

fn on_base(held: &[Map<String, Value>], mut given: Map<String, Value>) -> Map<String, Value> {
    for name in BASE {
        let base = held.iter().find_map(|held| held.get(name).filter(|value| !value.is_null()));
        if let (false, Some(base)) = (given.contains_key(name), base) {
            given.insert(name.to_owned(), base.clone());
        }
    }
    given
}

fn object(value: Value) -> Option<Map<String, Value>> {
    match value {
        Value::Object(fields) => Some(fields),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn overrides(fields: Value, rope_scaling: Value) -> Overrides {
        Overrides::new(object(fields).unwrap_or_default(), object(rope_scaling))
    }

    #[test]
    fn what_is_given_takes_the_place_of_what_is_there() {
        let check = |file: Value, given: Overrides, expect: Value| {
            let mut fields = object(file.clone()).expect("an object");
            given.apply(&mut fields);
            assert_eq!(Value::Object(fields), expect, "{file} with {given:?}");
        };
        let yarn = json!({"rope_type": "yarn", "factor": 4.0});
        check(
            json!({"a": 1, "b": 2}),
            overrides(json!({"b": 3, "c": null}), json!(null)),
            json!({"a": 1, "b": 3, "c": null}),
        );
        check(
            json!({"text_config": {"a": 1, "b": {"c": 1}}}),
            overrides(json!({"text_config": {"a": 2, "b": {"d": 1}}}), json!(null)),
            json!({"text_config": {"a": 2, "b": {"c": 1, "d": 1}}}),
        );
        check(
            json!({"quantization_config": {"bits": 4, "sym": true}}),
            overrides(json!({"quantization_config": {"bits": 8}}), json!(null)),
            json!({"quantization_config": {"bits": 8}}),
        );
        // A scaling is replaced whole, in either spelling; the base stays.
        for spelled in ["rope_scaling", "rope_parameters"] {
            for (file, expect) in [
                (json!({}), json!({"rope_scaling": yarn})),
                (json!({"rope_theta": 5.0}), json!({"rope_theta": 5.0, "rope_scaling": yarn})),
                (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), json!({"rope_scaling": yarn})),
                (
                    json!({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
                    json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7.0}}),
                ),
            ] {
                check(file.clone(), overrides(json!({spelled: yarn}), json!(null)), expect.clone());
                check(file, overrides(json!({}), yarn.clone()), expect);
            }
        }
        check(
            json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}),
            overrides(json!({"rope_scaling": null}), json!(null)),
            json!({"rope_scaling": {"rope_theta": 7.0}}),
        );
        // By layer type, in the text half of a configuration, and beside the object.
        check(
            json!({"text_config": {"rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 9.0},
                "sliding_attention": {"rope_theta": 3.0}}}}),
            overrides(json!({}), yarn.clone()),
            json!({"text_config": {"rope_parameters": {
                "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 9.0},
                "sliding_attention": {"rope_theta": 3.0}}}}),
        );
        let sized = json!({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64});
        check(json!({ORIGINAL: 32}), overrides(json!({}), sized.clone()), json!({ORIGINAL: 64, "rope_scaling": sized}));
        check(
            json!({"rope_parameters": {"rope_theta": 7.0}}),
            overrides(json!({"rope_theta": 8.0}), json!(null)),
            json!({"rope_theta": 8.0, "rope_parameters": {"rope_theta": 8.0}}),
        );
    }

    #[test]
    fn positions_do_not_change_what_weights_are() {
        let check = |fields: Value, expect: &str| {
            let given = overrides(fields, json!({"rope_type": "yarn"}));
            assert_eq!(given.about_weights(), expect, "{given:?}");
        };
        check(json!({}), "");
        check(json!({"rope_theta": 1.0, "rope_scaling": {"factor": 2.0}, "max_position_embeddings": 9}), "");
        check(json!({"rope_theta": 1.0, "tie_word_embeddings": true}), r#"{"tie_word_embeddings":true}"#);
    }
}
