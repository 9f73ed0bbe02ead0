//! The input of a response: a string, or messages as clients write them and as earlier responses
//! returned them.

use serde::Serialize;
use serde_json::{Value, json};

use crate::fields::{Anything, Either, Fields, Kind, ListOf, Mapped, Object, OneOf, Opaque, Text, Word, Wrong};
use crate::request::{Conversation, Message};

/// Content parts of one message.
const MOST_PARTS: usize = 1024;
const ID_BYTES: usize = 128;

/// A message that a client sent.
#[derive(Debug, PartialEq, Eq)]
pub struct InputMessage {
    pub role: &'static str,
    pub text: String,
}

/// A message of a conversation, under its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub id: Box<str>,
    pub role: &'static str,
    pub text: Box<str>,
}

impl Item {
    pub fn new(id: impl Into<Box<str>>, role: &'static str, text: impl Into<Box<str>>) -> Self {
        Self { id: id.into(), role, text: text.into() }
    }

    /// Bytes of memory that the item takes.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.id.len() + self.text.len()
    }

    /// The item in the form of `/input_items`.
    pub fn listed(&self) -> ListedItem<'_> {
        let kind = if self.role == "assistant" { "output_text" } else { "input_text" };
        let annotations = (self.role == "assistant").then_some([]);
        let content = [ListedPart { kind, text: &self.text, annotations }];
        ListedItem { id: &self.id, kind: "message", status: "completed", role: self.role, content }
    }
}

#[derive(Serialize)]
pub struct ListedItem<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    status: &'static str,
    role: &'static str,
    content: [ListedPart<'a>; 1],
}

#[derive(Serialize)]
struct ListedPart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
    /// None are ever made.
    #[serde(skip_serializing_if = "Option::is_none")]
    annotations: Option<[(); 0]>,
}

/// The field `input`, of at most `most` messages.
pub fn input(most: usize) -> impl Kind<Value = Vec<InputMessage>> {
    let messages = ListOf::between(Object(message), 1, most);
    Mapped {
        kind: Either { when: Value::is_string, then: Text::any(), or: messages },
        map: |input| match input {
            OneOf::First(text) => vec![InputMessage { role: "user", text }],
            OneOf::Second(messages) => messages,
        },
    }
}

pub fn response_id() -> Opaque {
    Opaque { most: ID_BYTES }
}

fn message(fields: &mut Fields) -> Result<InputMessage, Wrong> {
    fields.optional("type", Word(&["message"]), "Type of the item; only messages are supported.")?;
    let roles = Word(&["user", "assistant", "system", "developer"]);
    let role = fields.required("role", roles, "Role of the message's author.")?;
    let text = fields.required("content", content(), "A string, or an array of text parts.")?;
    fields.optional("id", response_id(), "Accepted and ignored: items get new ids.")?;
    fields.optional(
        "status",
        Word(&["completed", "incomplete", "in_progress"]),
        "Accepted and ignored: the status of an earlier answer's item.",
    )?;
    fields.refused("phase", &[], "phases are not supported")?;
    Ok(InputMessage { role, text })
}

/// Parts are joined by line breaks.
fn content() -> impl Kind<Value = String> {
    let parts = ListOf::between(Object(part), 1, MOST_PARTS);
    Mapped {
        kind: Either { when: Value::is_string, then: Text::any(), or: parts },
        map: |content| match content {
            OneOf::First(text) => text,
            OneOf::Second(parts) => parts.join("\n"),
        },
    }
}

fn part(fields: &mut Fields) -> Result<String, Wrong> {
    fields.required("type", Word(&["input_text", "output_text"]), "")?;
    fields.refused("annotations", &[json!([])], "annotations are not supported")?;
    let logprobs = ListOf::between(Anything, 0, i32::MAX as usize);
    fields.optional("logprobs", logprobs, "Accepted and ignored: log-probabilities of an earlier answer.")?;
    fields.refused("prompt_cache_breakpoint", &[], "prefix caching is automatic")?;
    fields.required("text", Text::any(), "")
}

/// The conversation for the model's template. Templates know one system message, at the beginning:
/// instructions and system messages at the start of the input become one.
pub fn conversation(instructions: Option<&str>, items: &[Item]) -> Conversation {
    let is_system = |item: &&Item| matches!(item.role, "system" | "developer");
    let leading = items.iter().take_while(is_system).count();
    let (leading, rest) = items.split_at(leading);
    let system: Vec<&str> = instructions.into_iter().chain(leading.iter().map(|item| &*item.text)).collect();
    let mut messages = Vec::with_capacity(rest.len() + 1);
    if !system.is_empty() {
        messages.push(Message::new("system", system.join("\n\n")));
    }
    messages.extend(rest.iter().map(|item| {
        let role = if item.role == "developer" { "system" } else { item.role };
        Message::new(role, &*item.text)
    }));
    Conversation::new(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Vec<InputMessage>, String> {
        input(3).read(value).map_err(|wrong| crate::ApiError::from(wrong).to_string())
    }

    fn said(role: &'static str, text: &str) -> InputMessage {
        InputMessage { role, text: text.into() }
    }

    #[test]
    fn texts_and_messages_are_input() {
        assert_eq!(read(json!("hello")), Ok(vec![said("user", "hello")]));
        let messages = json!([
            {"role": "developer", "content": "a"},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"},
            ]},
            // As a client sends back what it got.
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": null, "content": [
                {"type": "output_text", "text": "d", "annotations": [], "logprobs": [{"token": "d"}]},
            ]},
        ]);
        assert_eq!(read(messages), Ok(vec![said("developer", "a"), said("user", "b\nc"), said("assistant", "d")]));
    }

    #[test]
    fn other_items_are_refused_by_name() {
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        for (value, expected) in [
            (json!([]), "must be an array of 1 to 3"),
            (json!(7), "must be an array"),
            (
                json!([{"type": "function_call_output", "call_id": "1", "output": ""}]),
                "[0].type: must be one of: message",
            ),
            (json!([{"role": "tool", "content": "a"}]), "[0].role: must be one of: user, assistant, system, developer"),
            (json!([{"role": "user"}]), "[0].content: this field is required"),
            (
                user(json!([{"type": "input_image", "image_url": "http://x"}])),
                "[0].content[0].type: must be one of: input_text, output_text",
            ),
            (user(json!([])), "[0].content: must be an array of 1 to 1024"),
            (user(json!([{"type": "input_text"}])), "[0].content[0].text: this field is required"),
        ] {
            assert_eq!(read(value), Err(expected.into()));
        }
    }

    #[test]
    fn instructions_and_leading_developers_are_one_system_message() {
        let items: Vec<Item> = [("developer", "b"), ("system", "c"), ("user", "d"), ("developer", "e")]
            .map(|(role, text)| Item::new("msg", role, text))
            .into();
        let messages = |instructions, items: &[Item]| conversation(instructions, items).messages;
        let rest = [Message::new("user", "d"), Message::new("system", "e")];
        assert_eq!(messages(Some("a"), &items)[0], Message::new("system", "a\n\nb\n\nc"));
        assert_eq!(messages(Some("a"), &items)[1..], rest);
        assert_eq!(messages(None, &items[2..]), rest);
        assert_eq!(messages(Some("a"), &items[2..])[0], Message::new("system", "a"));
    }
}
