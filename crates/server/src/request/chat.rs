//! Conversations: messages as chat clients write them, and what the model's template makes of them.

use serde_json::{Map, Value, json};

use super::Bounds;
use crate::fields::{Either, Fields, Kind, ListOf, Object, OneOf, PlainMap, Text, Word, Wrong};
use crate::json::Raw;

#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub role: &'static str,
    pub content: String,
    pub name: Option<String>,
    pub reasoning: Option<String>,
}

impl Message {
    pub fn new(role: &'static str, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), name: None, reasoning: None }
    }

    /// The message in the form that chat templates read.
    pub fn to_json(&self) -> Value {
        let mut message = json!({"role": self.role, "content": self.content});
        if let Some(name) = &self.name {
            message["name"] = name.as_str().into();
        }
        if let Some(reasoning) = &self.reasoning {
            message["reasoning_content"] = reasoning.as_str().into();
        }
        message
    }
}

/// A conversation to be continued.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    pub messages: Vec<Message>,
    /// Whether the template adds the opening of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Whether the last message is the beginning of the answer.
    pub continue_final_message: bool,
    /// More variables for the template.
    pub template_kwargs: Map<String, Value>,
}

impl Conversation {
    /// A chat request for an answer to `messages`.
    pub fn new(messages: Vec<Message>) -> Self {
        Self { messages, add_generation_prompt: true, ..Self::default() }
    }

    /// The fields of a chat request that make its prompt.
    pub fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        let limits = &bounds.limits;
        let messages = ListOf::between(Object(message), 1, limits.messages);
        let messages = fields.required("messages", messages, "The conversation so far.")?;
        let add = fields.optional(
            "add_generation_prompt",
            crate::fields::Flag,
            "Whether the template adds the opening of the assistant's answer.",
        )?;
        let continues = fields.optional(
            "continue_final_message",
            crate::fields::Flag,
            "Whether the answer continues the last message; needs add_generation_prompt to be false.",
        )?;
        let kwargs = PlainMap {
            most: limits.template_kwargs,
            most_bytes: limits.template_kwarg_bytes,
            reserved: &folio_text::RESERVED,
        };
        let kwargs =
            fields.optional("chat_template_kwargs", kwargs, "Additional variables for the model's chat template.")?;
        fields.refused("chat_template", &[], "the template is the model's and cannot be set by a request")?;
        fields.all_refused(&["documents"], "documents are not supported")?;
        let continue_final_message = continues.unwrap_or(false);
        let add_generation_prompt = add.unwrap_or(!continue_final_message);
        if continue_final_message && add_generation_prompt {
            return Err(Wrong::new("needs add_generation_prompt to be false").below(".continue_final_message"));
        }
        Ok(Self {
            messages,
            add_generation_prompt,
            continue_final_message,
            template_kwargs: kwargs.unwrap_or_default(),
        })
    }
}

/// OpenAI's developer is what templates call system.
fn message(fields: &mut Fields) -> Result<Message, Wrong> {
    let role = fields.required(
        "role",
        Word(&["user", "assistant", "system", "developer"]),
        "Role of the message's author.",
    )?;
    let content = fields.required("content", content(&["text"]), "A string, or an array of text parts.")?;
    let name = fields.optional("name", Text::between(1, 64), "Name of the author, for templates that show it.")?;
    let reasoning = fields.optional(
        "reasoning_content",
        Text::any(),
        "The assistant's reasoning before its answer, for templates that repeat it.",
    )?;
    fields.refused("annotations", &[json!([])], "annotations are not supported")?;
    fields.refused("refusal", &[], "refusals are not supported; put the text in content")?;
    fields.refused("tool_calls", &[json!([])], "tools are not supported")?;
    fields.all_refused(&["tool_call_id", "function_call"], "tools are not supported")?;
    fields.all_refused(&["audio"], "only text is supported")?;
    Ok(Message { role: if role == "developer" { "system" } else { role }, content, name, reasoning })
}

/// A string, or an array of text parts of the given types; parts are joined by line
/// breaks.
pub fn content(types: &'static [&'static str]) -> impl Kind<Value = String> {
    let part = move |fields: &mut Fields| {
        fields.required("type", Word(types), "")?;
        fields.refused("annotations", &[json!([])], "annotations are not supported")?;
        fields.refused("cache_control", &[json!({"type": "ephemeral"})], "prefix caching is automatic")?;
        fields.required("text", Text::any(), "")
    };
    Joined(Either { when: Value::is_string, then: Text::any(), or: ListOf::between(Object(part), 1, 1024) })
}

struct Joined<K>(K);

impl<K: Kind<Value = OneOf<String, Vec<String>>>> Kind for Joined<K> {
    type Value = String;

    fn read_raw(&self, raw: Raw<'_>) -> Result<String, Wrong> {
        Ok(match self.0.read_raw(raw)? {
            OneOf::First(text) => text,
            OneOf::Second(parts) => parts.join("\n"),
        })
    }

    fn schema(&self) -> Value {
        self.0.schema()
    }

    fn example(&self) -> String {
        "a".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_texts() {
        let read = |value: Value| Object(message).read(value);
        assert_eq!(read(json!({"role": "user", "content": "a"})).ok(), Some(Message::new("user", "a")));
        let parts =
            json!({"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(read(parts).ok(), Some(Message::new("system", "a\nb")));
        for bad in [
            json!({"role": "user"}),
            json!({"role": "king", "content": "a"}),
            json!({"role": "user", "content": null}),
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}),
            json!({"role": "assistant", "content": "a", "tool_calls": [{}]}),
            json!({"role": "user", "content": "a", "x": 1}),
        ] {
            assert!(read(bad.clone()).is_err(), "{bad}");
        }
    }
}
