//! The fields of `/v1/messages` and `/v1/messages/count_tokens`.

use serde_json::{Value, json};

use crate::fields::{Count, Either, Fields, Flag, Kind, ListOf, Mapped, Object, OneOf, Request, Text, Word, Wrong};
use crate::request::{Bounds, Conversation, Message, RawParams, sampling};

/// Content blocks of one message.
const MOST_BLOCKS: usize = 1024;

pub struct MessagesRequest {
    pub conversation: Conversation,
    pub params: RawParams,
    pub stream: bool,
}

pub struct CountRequest {
    pub conversation: Conversation,
}

impl Request for MessagesRequest {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        let CountRequest { conversation } = prompt(fields, bounds)?;
        let limits = &bounds.limits;
        let stop = ListOf::between(Text::between(1, limits.stop_chars), 0, limits.stops);
        let params = RawParams {
            max_tokens: Some(fields.required(
                "max_tokens",
                Count::between(1, usize::MAX),
                "Maximum length of the answer in tokens.",
            )?),
            stop: fields.optional("stop_sequences", stop, "Strings that end the answer.")?.unwrap_or_default(),
            ..sampling::core(fields)?
        };
        let stream = fields.optional("stream", Flag, "Whether the answer is streamed as server-sent events.")?;
        let user = Text::between(0, limits.user_chars);
        let metadata = Object(|fields: &mut Fields| {
            fields.optional("user_id", user, "Accepted and ignored: an id of the end user.").map(|_| ())
        });
        fields.optional("metadata", metadata, "")?;
        fields.refused(
            "service_tier",
            &[json!("auto"), json!("standard_only")],
            "there is only one service tier: auto",
        )?;
        fields.refused("mcp_servers", &[json!([])], "MCP servers are not supported")?;
        fields.refused("container", &[], "containers are not supported")?;
        fields.refused("inference_geo", &[], "the server cannot choose a region")?;
        fields.refused("diagnostics", &[], "this is not supported")?;
        Ok(Self { conversation, params, stream: stream.unwrap_or(false) })
    }
}

impl Request for CountRequest {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        prompt(fields, bounds)
    }
}

/// The fields that make the prompt, which both routes read.
fn prompt(fields: &mut Fields, bounds: &Bounds) -> Result<CountRequest, Wrong> {
    bounds.check_model(fields)?;
    let messages = ListOf::between(Object(message), 1, bounds.limits.messages);
    let messages = fields.required(
        "messages",
        messages,
        "The conversation so far. If its last message is the assistant's, the answer continues it.",
    )?;
    let system = fields.optional("system", texts(), "System prompt.")?;
    cache_control(fields)?;
    refuse(fields)?;
    let conversation = conversation(system, messages)?;
    Ok(CountRequest { conversation })
}

fn refuse(fields: &mut Fields) -> Result<(), Wrong> {
    let no_tools = "tools are not supported";
    fields.refused("tools", &[json!([])], no_tools)?;
    fields.refused("tool_choice", &[json!({"type": "none"}), json!({"type": "auto"})], no_tools)?;
    fields.refused("thinking", &[json!({"type": "disabled"})], "reasoning is not separated from answers: disabled")?;
    fields.refused("output_config", &[json!({})], "constrained output and effort levels are not supported")?;
    fields.refused("output_format", &[], "constrained output is not supported")?;
    fields.refused("context_management", &[], "conversations are not edited")?;
    fields.refused("speed", &[json!("standard")], "there is only one speed: standard")?;
    fields.all_refused(&["user_profile_id", "workspace_id"], "users and workspaces are not supported, only API keys")
}

fn message(fields: &mut Fields) -> Result<Message, Wrong> {
    let role = fields.required("role", Word(&["user", "assistant", "system"]), "Role of the message's author.")?;
    let content = fields.required("content", texts(), "A string, or an array of text blocks.")?;
    Ok(Message::new(role, content))
}

/// Blocks are joined by line breaks.
fn texts() -> impl Kind<Value = String> {
    let blocks = ListOf::between(Object(block), 1, MOST_BLOCKS);
    Mapped {
        kind: Either { when: Value::is_string, then: Text::any(), or: blocks },
        map: |content| match content {
            OneOf::First(text) => text,
            OneOf::Second(blocks) => blocks.join("\n"),
        },
    }
}

fn block(fields: &mut Fields) -> Result<String, Wrong> {
    fields.required("type", Word(&["text"]), "")?;
    cache_control(fields)?;
    fields.refused("citations", &[json!([])], "citations are not supported")?;
    fields.required("text", Text::any(), "")
}

/// The prefix cache does what is asked for, with or without being asked.
fn cache_control(fields: &mut Fields) -> Result<(), Wrong> {
    let control = |fields: &mut Fields| {
        fields.required("type", Word(&["ephemeral"]), "")?;
        fields.optional(
            "ttl",
            Word(&["5m", "1h"]),
            "Accepted and ignored: cached prefixes are evicted when memory is needed.",
        )?;
        Ok(())
    };
    fields.optional("cache_control", Object(control), "Accepted and ignored: prefix caching is automatic.").map(|_| ())
}

/// Anthropic's rules: turns of one side that follow each other are one turn, and an assistant's
/// last turn is the beginning of the answer.
fn conversation(system: Option<String>, messages: Vec<Message>) -> Result<Conversation, Wrong> {
    let mut turns: Vec<Message> = system.map(|text| Message::new("system", text)).into_iter().collect();
    for message in messages {
        match turns.last_mut() {
            Some(last) if last.role == message.role => {
                last.content.push('\n');
                last.content.push_str(&message.content);
            }
            _ => turns.push(message),
        }
    }
    // An answer that begins with nothing is any answer.
    turns.pop_if(|last| last.role == "assistant" && last.content.is_empty());
    let prefilled = turns.last().filter(|last| last.role == "assistant");
    if prefilled.is_some_and(|last| last.content.ends_with(char::is_whitespace)) {
        return Err(Wrong::new("the assistant's last message must not end with white space").below(".messages"));
    }
    let continues = prefilled.is_some();
    Ok(Conversation {
        add_generation_prompt: !continues,
        continue_final_message: continues,
        ..Conversation::new(turns)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields;

    fn bounds() -> Bounds {
        Bounds {
            limits: crate::Limits::default(),
            model_names: vec!["alphabet".into()].into(),
            max_model_len: 64,
            vocab_size: 27,
            max_seqs: 4,
            defaults: crate::SamplingDefaults::default(),
        }
    }

    fn read<R: Request<Bounds = Bounds>>(body: Value) -> Result<R, String> {
        let Value::Object(object) = body else { panic!("an object") };
        fields::read(object, &bounds()).map_err(|error| error.to_string())
    }

    fn with(more: Value) -> Value {
        let mut body = json!({"model": "alphabet", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]});
        for (name, value) in more.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    }

    fn talk(messages: Value) -> Result<Conversation, String> {
        read::<CountRequest>(json!({"messages": messages})).map(|request| request.conversation)
    }

    #[test]
    fn what_clients_send_is_read() {
        let request = read::<MessagesRequest>(with(json!({
            "stop_sequences": ["x", "y"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": true,
            "metadata": {"user_id": "u"}, "service_tier": "auto", "tools": [], "thinking": {"type": "disabled"},
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}, "citations": null},
                       {"type": "text", "text": "t"}],
        })));
        let request = request.unwrap_or_else(|message| panic!("{message}"));
        assert!(request.stream);
        assert_eq!(request.conversation.messages, [Message::new("system", "s\nt"), Message::new("user", "a")]);
        assert_eq!((request.params.max_tokens, request.params.stop.len()), (Some(4), 2));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
        for (more, field) in [
            (json!({"max_tokens": null}), "max_tokens"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": image}), "messages[0].content[0].type"),
            (json!({"messages": [{"role": "tool", "content": "a"}]}), "messages[0].role"),
            (json!({"tools": [{"name": "t"}]}), "tools"),
            (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
            (json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), "thinking"),
            (json!({"mcp_servers": [{}]}), "mcp_servers"),
            (json!({"container": "c"}), "container"),
            (json!({"output_config": {"effort": "low"}}), "output_config"),
            (json!({"stop_sequences": ["1", "2", "3", "4", "5"]}), "stop_sequences"),
            (
                json!({"system": [{"type": "text", "text": "s", "cache_control": {"type": "for ever"}}]}),
                "system[0].cache_control.type",
            ),
            (json!({"n": 2}), "n"),
        ] {
            let message = read::<MessagesRequest>(with(more)).err().expect("refused");
            assert!(message.starts_with(&format!("{field}: ")), "{field}: {message}");
        }
        let no_limit = json!({"messages": [{"role": "user", "content": "a"}]});
        assert_eq!(read::<MessagesRequest>(no_limit).err().as_deref(), Some("max_tokens: this field is required"));
        assert!(read::<CountRequest>(with(json!({}))).is_err(), "counting has no max_tokens");
    }

    #[test]
    fn turns_of_one_side_are_one() {
        let talk = talk(json!([
            {"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ]));
        let talk = talk.unwrap_or_else(|message| panic!("{message}"));
        let turns = [Message::new("user", "a\nb"), Message::new("assistant", "c"), Message::new("user", "d")];
        assert_eq!(talk.messages, turns);
        assert!(talk.add_generation_prompt && !talk.continue_final_message);
    }

    #[test]
    fn the_assistants_last_word_begins_the_answer() {
        let prefilled = |text: &str| {
            talk(json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]))
                .map(|talk| (talk.messages.len(), talk.add_generation_prompt, talk.continue_final_message))
        };
        assert_eq!(prefilled("b"), Ok((2, false, true)));
        assert_eq!(prefilled(""), Ok((1, true, false)));
        assert!(prefilled("b ").is_err_and(|message| message.starts_with("messages: ")));
    }

    #[test]
    fn the_schemas_can_be_made() {
        assert_eq!(fields::schema::<MessagesRequest>(&bounds())["required"], json!(["messages", "max_tokens"]));
        assert_eq!(fields::schema::<CountRequest>(&bounds())["required"], json!(["messages"]));
    }
}
