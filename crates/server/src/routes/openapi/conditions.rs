//! Conditions that readers of single fields cannot describe: fields that need each other, and
//! bounds that come from the model rather than from the limits.

use serde_json::{Value, json};

use super::operations::RESPONSE_ID;
use crate::service::Serving;

/// A field that says more than `idle` needs another one, a flag, to be as `wanted` says.
struct Condition {
    field: &'static str,
    idle: fn() -> Value,
    needs: &'static str,
    wanted: &'static [Option<bool>],
}

const CONDITIONS: [Condition; 4] = [
    Condition { field: "stream_options", idle: || json!({"enum": [null]}), needs: "stream", wanted: &[Some(true)] },
    Condition { field: "top_logprobs", idle: || json!({"enum": [null, 0]}), needs: "logprobs", wanted: &[Some(true)] },
    Condition {
        field: "continue_final_message",
        idle: || json!({"enum": [null, false]}),
        needs: "add_generation_prompt",
        wanted: &[None, Some(false)],
    },
    Condition {
        field: "max_tokens",
        idle: || json!({"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1}]}),
        needs: "echo",
        wanted: &[Some(true)],
    },
];

/// The schema of a request's body, with its conditions.
pub fn add(mut schema: Value, serving: &Serving) -> Value {
    let Some(fields) = schema.get_mut("properties") else { return schema };
    bound(fields, serving);
    let conditions: Vec<Value> =
        CONDITIONS.iter().filter_map(|condition| condition.of(&schema["properties"])).collect();
    if !conditions.is_empty() {
        schema["allOf"] = Value::Array(conditions);
    }
    schema
}

impl Condition {
    /// For a request with these fields; none where it has no such flag.
    fn of(&self, fields: &Value) -> Option<Value> {
        let (_, needed) = (fields.get(self.field)?, fields.get(self.needs)?);
        if needed["type"] != json!(["boolean", "null"]) {
            return None;
        }
        let mut other = json!({"properties": {self.needs: {"enum": self.wanted}}});
        if !self.wanted.contains(&None) {
            other["required"] = json!([self.needs]);
        }
        Some(json!({"anyOf": [{"properties": {self.field: (self.idle)()}}, other]}))
    }
}

fn bound(fields: &mut Value, serving: &Serving) {
    let (bounds, tokenizer) = (&serving.bounds, &serving.model.tokenizer);
    if let Some(previous) = fields.get_mut("previous_response_id") {
        let about = previous["description"].clone();
        let kept = json!({"type": "string", "pattern": RESPONSE_ID});
        *previous = json!({"anyOf": [{"type": "null"}, kept], "description": about});
    }
    for name in ["n", "best_of"] {
        if let Some(count) = fields.get_mut(name) {
            count["maximum"] = bounds.max_seqs.min(bounds.limits.samples).into();
        }
    }
    // An empty text is a prompt only if the tokenizer has something to put before it.
    if tokenizer.encode("", true).is_ok_and(|tokens| tokens.is_empty()) {
        let takes_tokens = |prompt: &Value| prompt.to_string().contains("\"integer\"");
        let prompts =
            fields.as_object_mut().into_iter().flatten().filter(|(name, _)| *name == "prompt" || *name == "input");
        prompts.map(|(_, prompt)| prompt).filter(|prompt| takes_tokens(prompt)).for_each(refuse_empty_texts);
    }
}

fn refuse_empty_texts(schema: &mut Value) {
    if schema["type"] == "string" {
        schema["minLength"] = json!(1);
    }
    if let Some(items) = schema.get_mut("items") {
        refuse_empty_texts(items);
    }
    schema.get_mut("anyOf").and_then(Value::as_array_mut).into_iter().flatten().for_each(refuse_empty_texts);
}
