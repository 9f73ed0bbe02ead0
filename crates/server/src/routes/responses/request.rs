//! The fields of `/v1/responses`: OpenAI's, and those that vLLM adds.

use serde_json::{Map, Value, json};

use super::input::{InputMessage, input, response_id};
use crate::fields::{Count, Fields, Flag, Kind, ListOf, Object, Opaque, Request, Text, Word, Wrong};
use crate::json::Raw;
use crate::request::{Bounds, RawParams, sampling};

const LOGPROBS: &str = "message.output_text.logprobs";
const NO_TOOLS: &str = "tools are not supported";

pub struct ResponsesRequest {
    pub input: Vec<InputMessage>,
    pub params: RawParams,
    pub stream: bool,
    pub store: bool,
    pub settings: Settings,
}

/// Fields of the request that the response repeats.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub instructions: Option<String>,
    pub previous_response_id: Option<String>,
    pub max_output_tokens: Option<usize>,
    pub top_logprobs: usize,
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    pub tool_choice: &'static str,
    pub user: Option<String>,
    pub safety_identifier: Option<String>,
    pub prompt_cache_key: Option<String>,
}

impl Request for ResponsesRequest {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        let limits = &bounds.limits;
        bounds.check_model(fields)?;
        let input = fields.required("input", input(limits.messages), "A string, or an array of messages.")?;
        let stream = fields
            .optional("stream", Flag, "Whether the response is streamed as server-sent events.")?
            .unwrap_or(false);
        let options = fields.optional(
            "stream_options",
            Object(stream_options),
            "Options of a stream; needs stream to be true.",
        )?;
        if options.is_some() && !stream {
            return Err(Wrong::new("needs stream to be true").below(".stream_options"));
        }
        let store =
            fields.optional("store", Flag, "Whether the response is stored, until newer ones need its memory.")?;
        let request_id = Opaque { most: limits.request_id_bytes };
        fields.optional("request_id", request_id, "Accepted and ignored: the server makes its own ids.")?;
        let mut params = sampling::extended(fields, bounds)?;
        let settings = settings(fields, bounds)?;
        params.max_tokens = settings.max_output_tokens;
        params.logprobs = logprobs(fields, settings.top_logprobs)?;
        refuse(fields)?;
        Ok(Self { input, params, stream, store: store.unwrap_or(true), settings })
    }
}

fn settings(fields: &mut Fields, bounds: &Bounds) -> Result<Settings, Wrong> {
    let limits = &bounds.limits;
    let user = Text::between(0, limits.user_chars);
    let top_logprobs = Count::between(0, limits.logprobs as usize);
    Ok(Settings {
        instructions: fields.optional("instructions", Text::any(), "System message, for this response only.")?,
        previous_response_id: fields.optional(
            "previous_response_id",
            response_id(),
            "Id of a stored response whose conversation to continue.",
        )?,
        max_output_tokens: fields.optional(
            "max_output_tokens",
            Count::between(1, usize::MAX),
            "Maximum length of the answer in tokens.",
        )?,
        top_logprobs: fields
            .optional("top_logprobs", top_logprobs, "Number of most likely tokens to return with each token.")?
            .unwrap_or(0),
        metadata: fields
            .optional("metadata", Metadata, "Keys and strings that the response repeats.")?
            .unwrap_or_default(),
        parallel_tool_calls: fields
            .optional("parallel_tool_calls", Flag, "Accepted and ignored: tools are not supported.")?
            .unwrap_or(true),
        tool_choice: fields.optional("tool_choice", Word(&["auto", "none"]), NO_TOOLS)?.unwrap_or("auto"),
        user: fields.optional("user", user, "An id of the end user, repeated in the response.")?,
        safety_identifier: fields.optional("safety_identifier", user, "Newer name of user.")?,
        prompt_cache_key: fields.optional(
            "prompt_cache_key",
            user,
            "Accepted and ignored: prefix caching is automatic.",
        )?,
    })
}

fn logprobs(fields: &mut Fields, top_logprobs: usize) -> Result<Option<u32>, Wrong> {
    // Reasoning is never apart from the answer, so all of what is there of it is included.
    let kinds = ListOf::between(Word(&[LOGPROBS, "reasoning.encrypted_content"]), 0, 8);
    let include = fields.optional("include", kinds, "Additional output to return.")?.unwrap_or_default();
    match include.contains(&LOGPROBS) {
        true => Ok(Some(top_logprobs as u32)),
        false if top_logprobs == 0 => Ok(None),
        false => Err(Wrong::new(format!("needs include to name {LOGPROBS}")).below(".top_logprobs")),
    }
}

fn stream_options(fields: &mut Fields) -> Result<(), Wrong> {
    fields.refused("include_obfuscation", &[json!(false)], "events cannot be padded")
}

/// Fields of OpenAI or vLLM that are not supported here.
fn refuse(fields: &mut Fields) -> Result<(), Wrong> {
    fields.refused("tools", &[json!([])], NO_TOOLS)?;
    fields.refused("max_tool_calls", &[], NO_TOOLS)?;
    fields.optional("text", Object(text), "Format of the answer.")?;
    fields.refused(
        "reasoning",
        &[json!({}), json!({"effort": null}), json!({"effort": null, "summary": null}), json!({"effort": "none"})],
        "reasoning is not separated from answers",
    )?;
    fields.refused(
        "truncation",
        &[json!("disabled")],
        "a conversation that does not fit the context is refused: disabled",
    )?;
    fields.refused("background", &[json!(false)], "background responses are not supported")?;
    fields.refused("service_tier", &[json!("auto"), json!("default")], "there is only one service tier: auto")?;
    fields.refused("conversation", &[], "use previous_response_id")?;
    fields.refused("previous_input_messages", &[], "use previous_response_id, or input")?;
    fields.refused("prompt", &[], "stored prompts are not supported")?;
    fields.refused("context_management", &[json!([])], "conversations are not edited")?;
    fields.all_refused(
        &["prompt_cache_options", "prompt_cache_retention"],
        "prefix caching is automatic and has no options",
    )?;
    fields.all_refused(&["moderation", "access_programs", "image", "structured_outputs"], "this is not supported")?;
    fields.refused("enable_response_messages", &[json!(false)], "this is not supported")?;
    fields.all_refused(&["mm_processor_kwargs", "kv_transfer_params", "vllm_xargs"], "this extension is not supported")
}

fn text(fields: &mut Fields) -> Result<(), Wrong> {
    fields.refused("format", &[json!({"type": "text"})], "constrained output is not supported: only text")?;
    fields.refused("verbosity", &[json!("medium")], "this setting is not supported")
}

/// Names and texts of the client's, as OpenAI bounds them.
struct Metadata;

impl Metadata {
    const MOST: usize = 16;
    const NAME: usize = 64;
    const VALUE: usize = 512;
}

impl Kind for Metadata {
    type Value = Map<String, Value>;

    fn read_raw(&self, raw: Raw<'_>) -> Result<Self::Value, Wrong> {
        self.read(raw.outer(Self::MOST + 1))
    }

    fn read(&self, value: Value) -> Result<Self::Value, Wrong> {
        let fits = |text: &str, most| text.len() <= most || text.chars().count() <= most;
        let is_pair = |(name, value): (&String, &Value)| {
            fits(name, Self::NAME) && value.as_str().is_some_and(|value| fits(value, Self::VALUE))
        };
        match value {
            Value::Object(map) if map.len() <= Self::MOST && map.iter().all(is_pair) => Ok(map),
            _ => Err(Wrong::new(format!(
                "must be an object of at most {} strings of up to {} characters, with keys of up to {}",
                Self::MOST,
                Self::VALUE,
                Self::NAME
            ))),
        }
    }

    fn schema(&self) -> Value {
        json!({
            "type": "object", "maxProperties": Self::MOST, "propertyNames": {"maxLength": Self::NAME},
            "additionalProperties": {"type": "string", "maxLength": Self::VALUE},
        })
    }

    fn example(&self) -> Self::Value {
        Map::new()
    }
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

    fn read(mut body: Value) -> Result<ResponsesRequest, String> {
        body["input"] = json!("a");
        let Value::Object(object) = body else { panic!("an object") };
        fields::read(object, &bounds()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_clients_send_by_default_is_read() {
        assert_eq!(read(json!({"model": "other"})).err(), Some("the model does not exist; see /v1/models".into()));
        let request = read(json!({})).unwrap_or_else(|message| panic!("{message}"));
        assert!(request.store && !request.stream && request.params.logprobs.is_none());
        let harmless = json!({
            "model": "alphabet", "tools": [], "tool_choice": "none", "parallel_tool_calls": false, "background": false,
            "text": {"format": {"type": "text"}, "verbosity": "medium"}, "truncation": "disabled", "reasoning": null,
            "service_tier": "auto", "user": "u", "include": ["reasoning.encrypted_content"], "store": false,
            "stream": true, "stream_options": {"include_obfuscation": false}, "metadata": {"a": "b"},
            "max_output_tokens": 16, "temperature": 0.5,
        });
        let request = read(harmless).unwrap_or_else(|message| panic!("{message}"));
        assert!(!request.store && request.stream);
        assert_eq!(request.params.max_tokens, Some(16));
        assert_eq!((request.settings.tool_choice, request.settings.parallel_tool_calls), ("none", false));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (body, field) in [
            (json!({"tools": [{"type": "web_search"}]}), "tools"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"text": {"format": {"type": "json_object"}}}), "text.format"),
            (json!({"reasoning": {"effort": "high"}}), "reasoning"),
            (json!({"truncation": "auto"}), "truncation"),
            (json!({"background": true}), "background"),
            (json!({"conversation": "conv_1"}), "conversation"),
            (json!({"prompt": {"id": "p"}}), "prompt"),
            (json!({"include": ["file_search_call.results"]}), "include[0]"),
            (json!({"stream_options": {}}), "stream_options"),
            (json!({"max_output_tokens": 0}), "max_output_tokens"),
            (json!({"n": 2}), "n"),
            (json!({"model": 1}), "model"),
            (json!({"previous_response_id": ""}), "previous_response_id"),
        ] {
            let message = read(body).err().expect("refused");
            assert!(message.starts_with(&format!("{field}: ")), "{field}: {message}");
        }
    }

    #[test]
    fn logprobs_are_asked_for_by_include() {
        let logprobs = |body| read(body).map(|request| request.params.logprobs);
        assert_eq!(logprobs(json!({"include": [LOGPROBS]})), Ok(Some(0)));
        assert_eq!(logprobs(json!({"include": [LOGPROBS], "top_logprobs": 20})), Ok(Some(20)));
        assert_eq!(logprobs(json!({"top_logprobs": 0})), Ok(None));
        assert!(logprobs(json!({"top_logprobs": 1})).is_err_and(|message| message.starts_with("top_logprobs: needs")));
        assert!(logprobs(json!({"include": [LOGPROBS], "top_logprobs": 21})).is_err());
    }

    #[test]
    fn metadata_is_bounded() {
        let pairs = |count: usize| (0..count).map(|n| (format!("name-{n}"), json!("é"))).collect::<Map<_, _>>();
        let sized = |name: usize, value: usize| json!({"é".repeat(name): "é".repeat(value)});
        for (metadata, is_good) in [
            (Value::Object(pairs(16)), true),
            (Value::Object(pairs(17)), false),
            (sized(64, 512), true),
            (sized(65, 1), false),
            (sized(1, 513), false),
            (json!({"a": 1}), false),
            (json!({"a": null}), false),
            (json!(["a"]), false),
        ] {
            assert_eq!(read(json!({"metadata": metadata})).is_ok(), is_good, "{metadata}");
        }
    }

    #[test]
    fn the_schema_can_be_made() {
        let schema = fields::schema::<ResponsesRequest>(&bounds());
        assert_eq!(schema["required"], json!(["input"]));
        assert_eq!(schema["properties"]["background"]["enum"], json!([null, false]));
    }
}
