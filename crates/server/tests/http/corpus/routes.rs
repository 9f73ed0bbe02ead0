//! The fields of each route, as its clients know it.

use super::numbers::Range::{self, Above, NotZero, Real, Whole};
use crate::harness::{EMBEDDING, WIDE};

pub struct Route {
    pub path: &'static str,
    /// A request that is fine, short, and soon answered: fields with their values as JSON.
    pub base: &'static [(&'static str, &'static str)],
    pub numbers: &'static [(&'static str, Range)],
    pub flags: &'static [&'static str],
    /// Fields of token ids, and the fewest they hold.
    pub token_lists: &'static [(&'static str, usize)],
    pub takes_many_tokens: bool,
    pub has_bias: bool,
    /// The place of the text that becomes the prompt: a field, and JSON around `TEXT`.
    pub prompt: Option<(&'static str, &'static str)>,
    /// Whether a prompt may be empty.
    pub takes_nothing: bool,
    /// Whether a prompt may take all of the context, with no room for an answer.
    pub needs_no_room: bool,
    /// Fields of one opaque text, and the most characters it has; `true` where only visible ASCII
    /// is taken.
    pub opaque: &'static [(&'static str, usize, bool)],
    /// Fields that hold one text or several.
    pub stops: &'static [&'static str],
    /// Unsupported values, which have to be refused by name.
    pub unsupported: &'static [(&'static str, &'static str)],
    /// Parts of a message's content that are no text.
    pub media: &'static [&'static str],
    /// Whether it has chat_template_kwargs.
    pub has_kwargs: bool,
}

impl Route {
    /// The request that is fine, with one field changed or added.
    pub fn with(&self, field: &str, json: &str) -> String {
        let mut fields: Vec<String> = self
            .base
            .iter()
            .filter(|(name, _)| *name != field)
            .map(|(name, json)| format!("\"{name}\":{json}"))
            .collect();
        if !json.is_empty() {
            fields.push(format!("\"{field}\":{json}"));
        }
        format!("{{{}}}", fields.join(","))
    }

    pub fn fine(&self) -> String {
        self.with("", "")
    }

    /// The request that is fine, for this text, given as JSON.
    pub fn saying(&self, text: &str) -> Option<String> {
        let (field, around) = self.prompt?;
        Some(self.with(field, &around.replace("TEXT", text)))
    }

    /// The model's template writes the prompt.
    pub fn has_template(&self) -> bool {
        ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"].contains(&self.path)
    }

    pub fn field_of_prompt(&self) -> &'static str {
        self.prompt.map_or("tokens", |(field, _)| field)
    }
}

const I64: i128 = i64::MAX as i128;
const I32: i128 = i32::MAX as i128;
const U32: i128 = u32::MAX as i128;
/// The longest sequence of the model under test.
const CONTEXT: i128 = 4096;

const MESSAGES: &str = r#"[{"role": "user", "content": TEXT}]"#;
const ONE_MESSAGE: (&str, &str) = ("messages", r#"[{"role": "user", "content": "a"}]"#);
const CHAT_MEDIA: &[&str] = &[
    r#"{"type": "image_url", "image_url": {"url": "http://169.254.169.254/zqmarkerqz"}}"#,
    r#"{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}"#,
    r#"{"type": "image_url", "image_url": {"url": "http://localhost\\@zqmarkerqz/"}}"#,
    r#"{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}"#,
    r#"{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}"#,
    r#"{"type": "video_url", "video_url": {"url": "https://zqmarkerqz"}}"#,
    r#"{"type": "file", "file": {"file_id": "../../etc/passwd"}}"#,
    r#"{"type": "text", "text": "a", "image_url": "http://zqmarkerqz"}"#,
    r#"{"type": "zqmarkerqz"}"#,
];
/// Fields of vLLM and OpenAI that are not supported here.
const GRAMMAR: [(&str, &str); 7] = [
    ("structured_outputs", r#"{"json": {"type": "zqmarkerqz"}}"#),
    ("guided_json", r#"{"$ref": "file:///etc/passwd"}"#),
    ("guided_regex", r#""(a+)+b""#),
    ("guided_choice", r#"["zqmarkerqz"]"#),
    ("guided_grammar", r#""root ::= root""#),
    ("response_format", r#"{"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}"#),
    ("structural_tag", r#""zqmarkerqz""#),
];

pub const ROUTES: &[Route] = &[CHAT, COMPLETIONS, RESPONSES, ANTHROPIC, COUNT_TOKENS, EMBEDDINGS, TOKENIZE, DETOKENIZE];

const CHAT: Route = Route {
    path: "/v1/chat/completions",
    base: &[ONE_MESSAGE, ("stop", "\"d\""), ("max_tokens", "8")],
    numbers: &[
        ("n", Whole(1, 16)),
        ("best_of", Whole(1, 16)),
        ("max_tokens", Whole(1, I64)),
        ("max_completion_tokens", Whole(1, I64)),
        ("min_tokens", Whole(0, 8)),
        ("temperature", Real(0.0, 100.0)),
        ("top_p", Above(0.0, 1.0)),
        ("top_k", Whole(-1, U32)),
        ("min_p", Real(0.0, 1.0)),
        ("seed", Whole(-I64 - 1, I64)),
        ("repetition_penalty", Real(0.01, 10.0)),
        ("frequency_penalty", Real(-2.0, 2.0)),
        ("presence_penalty", Real(-2.0, 2.0)),
        ("top_logprobs", Whole(0, 20)),
        ("prompt_logprobs", Whole(0, 20)),
        ("truncate_prompt_tokens", NotZero(-1, CONTEXT - 1)),
        ("priority", Whole(-I32 - 1, I32)),
    ],
    flags: &[
        "stream",
        "logprobs",
        "ignore_eos",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "return_token_ids",
        "add_generation_prompt",
        "continue_final_message",
    ],
    token_lists: &[("stop_token_ids", 0), ("allowed_token_ids", 1)],
    takes_many_tokens: false,
    has_bias: true,
    prompt: Some(("messages", MESSAGES)),
    takes_nothing: false,
    needs_no_room: false,
    opaque: &[
        ("cache_salt", 64, true),
        ("user", 512, false),
        ("request_id", 128, true),
        ("safety_identifier", 512, false),
    ],
    stops: &["stop", "bad_words"],
    unsupported: &[
        GRAMMAR[0],
        GRAMMAR[1],
        GRAMMAR[2],
        GRAMMAR[3],
        GRAMMAR[4],
        GRAMMAR[5],
        GRAMMAR[6],
        (
            "tools",
            r#"[{"type": "function", "function": {"name": "zqmarkerqz", "parameters": {"type": "x", "pattern": "(a+)+"}}}]"#,
        ),
        ("tool_choice", r#""required""#),
        ("functions", r#"[{"name": "zqmarkerqz"}]"#),
        ("function_call", r#"{"name": "zqmarkerqz"}"#),
        ("audio", r#"{"voice": "zqmarkerqz"}"#),
        ("modalities", r#"["text", "audio"]"#),
        ("prediction", r#"{"type": "content", "content": "zqmarkerqz"}"#),
        ("web_search_options", "{}"),
        ("store", "true"),
        ("metadata", r#"{"zqmarkerqz": "zqmarkerqz"}"#),
        ("reasoning_effort", r#""high""#),
        ("chat_template", r#""{{ zqmarkerqz }}""#),
        ("chat_template", r#""{% for i in range(1000000000) %}x{% endfor %}""#),
        ("documents", r#"[{"title": "zqmarkerqz"}]"#),
        ("echo", "true"),
        ("use_beam_search", "true"),
        ("logits_processors", r#"["os.system"]"#),
        ("kv_transfer_params", r#"{"remote_host": "169.254.169.254"}"#),
        ("vllm_xargs", r#"{"zqmarkerqz": 1}"#),
        ("mm_processor_kwargs", "{}"),
        ("best_of", "2"),
        ("service_tier", r#""priority""#),
    ],
    media: CHAT_MEDIA,
    has_kwargs: true,
};

const COMPLETIONS: Route = Route {
    path: "/v1/completions",
    base: &[("prompt", "\"a\""), ("stop", "\"d\""), ("max_tokens", "8")],
    numbers: &[
        ("n", Whole(1, 16)),
        ("best_of", Whole(1, 16)),
        ("max_tokens", Whole(1, I64)),
        ("min_tokens", Whole(0, 8)),
        ("temperature", Real(0.0, 100.0)),
        ("top_p", Above(0.0, 1.0)),
        ("top_k", Whole(-1, U32)),
        ("min_p", Real(0.0, 1.0)),
        ("seed", Whole(-I64 - 1, I64)),
        ("repetition_penalty", Real(0.01, 10.0)),
        ("frequency_penalty", Real(-2.0, 2.0)),
        ("presence_penalty", Real(-2.0, 2.0)),
        ("logprobs", Whole(0, 20)),
        ("prompt_logprobs", Whole(0, 20)),
        ("truncate_prompt_tokens", NotZero(-1, CONTEXT - 1)),
        ("priority", Whole(-I32 - 1, I32)),
    ],
    flags: &["stream", "echo", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "add_special_tokens"],
    token_lists: &[("stop_token_ids", 0), ("allowed_token_ids", 1), ("prompt", 1)],
    prompt: Some(("prompt", "TEXT")),
    unsupported: &[
        GRAMMAR[0],
        GRAMMAR[1],
        GRAMMAR[2],
        GRAMMAR[3],
        GRAMMAR[4],
        GRAMMAR[5],
        GRAMMAR[6],
        ("suffix", r#""zqmarkerqz""#),
        ("prompt_embeds", r#""gASVzqmarkerqz""#),
        ("best_of", "2"),
        ("use_beam_search", "true"),
        ("logits_processors", r#"["os.system"]"#),
        ("kv_transfer_params", r#"{"remote_host": "169.254.169.254"}"#),
        ("tools", r#"[{"type": "function"}]"#),
        ("messages", r#"[{"role": "user", "content": "zqmarkerqz"}]"#),
        ("chat_template", r#""{{ zqmarkerqz }}""#),
        ("service_tier", r#""priority""#),
    ],
    media: &[],
    has_kwargs: false,
    ..CHAT
};

const RESPONSES: Route = Route {
    path: "/v1/responses",
    base: &[("input", "\"a\""), ("stop", "\"d\""), ("max_output_tokens", "8")],
    numbers: &[
        ("max_output_tokens", Whole(1, I64)),
        ("temperature", Real(0.0, 100.0)),
        ("top_p", Above(0.0, 1.0)),
        ("top_k", Whole(-1, U32)),
        ("min_p", Real(0.0, 1.0)),
        ("seed", Whole(-I64 - 1, I64)),
        ("repetition_penalty", Real(0.01, 10.0)),
        ("frequency_penalty", Real(-2.0, 2.0)),
        ("presence_penalty", Real(-2.0, 2.0)),
        ("top_logprobs", Whole(0, 20)),
        ("priority", Whole(-I32 - 1, I32)),
    ],
    flags: &["stream", "store", "ignore_eos", "skip_special_tokens", "parallel_tool_calls"],
    token_lists: &[],
    prompt: Some(("input", "TEXT")),
    opaque: &[
        ("cache_salt", 64, true),
        ("user", 512, false),
        ("request_id", 128, true),
        ("safety_identifier", 512, false),
        ("prompt_cache_key", 512, false),
    ],
    stops: &["stop"],
    unsupported: &[
        ("n", "2"),
        ("tools", r#"[{"type": "web_search", "zqmarkerqz": 1}]"#),
        ("tool_choice", r#""required""#),
        ("text", r#"{"format": {"type": "json_schema", "name": "zqmarkerqz", "schema": {}}}"#),
        ("reasoning", r#"{"effort": "high"}"#),
        ("truncation", r#""auto""#),
        ("background", "true"),
        ("conversation", r#""../../etc/passwd""#),
        ("prompt", r#"{"id": "zqmarkerqz"}"#),
        ("include", r#"["file_search_call.results"]"#),
        ("previous_response_id", r#""../../etc/passwd\u0000""#),
        ("structured_outputs", r#"{"regex": "(a+)+b"}"#),
        ("response_format", r#"{"type": "json_object"}"#),
        ("metadata", r#"{"zqmarkerqz": 1}"#),
        ("chat_template", r#""{{ zqmarkerqz }}""#),
    ],
    media: &[
        r#"{"type": "input_image", "image_url": "http://169.254.169.254/zqmarkerqz"}"#,
        r#"{"type": "input_image", "image_url": "file:///etc/passwd"}"#,
        r#"{"type": "input_image", "file_id": "../../etc/passwd"}"#,
        r#"{"type": "input_file", "file_url": "http://zqmarkerqz"}"#,
        r#"{"type": "input_file", "file_data": "AAAA"}"#,
        r#"{"type": "input_audio", "input_audio": {"data": "AAAA"}}"#,
        r#"{"type": "zqmarkerqz"}"#,
    ],
    has_kwargs: false,
    ..CHAT
};

const ANTHROPIC: Route = Route {
    path: "/v1/messages",
    base: &[ONE_MESSAGE, ("stop_sequences", r#"["d"]"#), ("max_tokens", "8")],
    numbers: &[
        ("max_tokens", Whole(1, I64)),
        ("temperature", Real(0.0, 100.0)),
        ("top_p", Above(0.0, 1.0)),
        ("top_k", Whole(-1, U32)),
    ],
    flags: &["stream"],
    token_lists: &[],
    has_bias: false,
    prompt: Some(("messages", MESSAGES)),
    opaque: &[],
    stops: &["stop_sequences"],
    unsupported: &[
        ("max_tokens", "null"),
        ("n", "2"),
        ("tools", r#"[{"name": "zqmarkerqz", "input_schema": {"type": "x", "pattern": "(a+)+"}}]"#),
        ("tool_choice", r#"{"type": "any"}"#),
        ("thinking", r#"{"type": "enabled", "budget_tokens": 1e308}"#),
        ("output_config", r#"{"format": {"type": "json_schema", "schema": {}}}"#),
        ("output_format", r#"{"type": "json_schema"}"#),
        ("context_management", r#"{"edits": ["zqmarkerqz"]}"#),
        ("speed", r#""fast""#),
        ("mcp_servers", r#"[{"type": "url", "url": "http://169.254.169.254/zqmarkerqz"}]"#),
        ("container", r#""../../etc/passwd""#),
        ("service_tier", r#""zqmarkerqz""#),
        ("metadata", r#"{"zq marker qz": 1}"#),
        ("metadata", r#"{"user_id": 7}"#),
        ("metadata", r#"["zqmarkerqz"]"#),
        ("chat_template", r#""{{ zqmarkerqz }}""#),
        ("chat_template_kwargs", r#"{"a": 1}"#),
        ("system", "7"),
        ("system", r#"[{"type": "image"}]"#),
        ("system", "[]"),
        ("cache_control", r#"{"type": "zqmarkerqz"}"#),
        ("cache_control", r#"{"type": "ephemeral", "ttl": "99999999d"}"#),
    ],
    media: ANTHROPIC_MEDIA,
    has_kwargs: false,
    ..CHAT
};

const ANTHROPIC_MEDIA: &[&str] = &[
    r#"{"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/zqmarkerqz"}}"#,
    r#"{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}"#,
    r#"{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}"#,
    r#"{"type": "image", "source": {"type": "file", "file_id": "../../etc/passwd"}}"#,
    r#"{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "zqmarkerqz"}}"#,
    r#"{"type": "tool_use", "id": "zqmarkerqz", "name": "x", "input": {}}"#,
    r#"{"type": "tool_result", "tool_use_id": "zqmarkerqz"}"#,
    r#"{"type": "thinking", "thinking": "zqmarkerqz", "signature": "x"}"#,
    r#"{"type": "text", "text": 7}"#,
    r#"{"type": "text", "text": "a", "citations": [{"type": "zqmarkerqz"}]}"#,
    r#"{"type": "zqmarkerqz"}"#,
];

const COUNT_TOKENS: Route = Route {
    path: "/v1/messages/count_tokens",
    base: &[ONE_MESSAGE],
    numbers: &[],
    flags: &[],
    takes_nothing: true,
    needs_no_room: true,
    stops: &[],
    unsupported: &[
        ("tools", r#"[{"name": "zqmarkerqz"}]"#),
        ("tool_choice", r#"{"type": "any"}"#),
        ("thinking", r#"{"type": "enabled", "budget_tokens": -1}"#),
        ("system", "7"),
        ("system", r#"[{"type": "image"}]"#),
        ("max_tokens", "8"),
        ("temperature", "1"),
        ("stream", "true"),
        ("mcp_servers", r#"[{"url": "http://169.254.169.254/zqmarkerqz"}]"#),
        ("chat_template", r#""{{ zqmarkerqz }}""#),
    ],
    ..ANTHROPIC
};

const EMBEDDINGS: Route = Route {
    path: "/v1/embeddings",
    base: &[("input", "\"a\"")],
    numbers: &[
        ("dimensions", Whole(EMBEDDING as i128, EMBEDDING as i128)),
        ("truncate_prompt_tokens", NotZero(-1, CONTEXT - 1)),
        ("priority", Whole(-I32 - 1, I32)),
    ],
    flags: &["normalize", "add_special_tokens"],
    token_lists: &[("input", 1)],
    has_bias: false,
    prompt: Some(("input", "TEXT")),
    needs_no_room: true,
    opaque: &[("cache_salt", 64, true), ("user", 512, false)],
    stops: &[],
    unsupported: &[
        ("encoding_format", r#""zqmarkerqz""#),
        ("encoding_format", "7"),
        ("pooling", r#""zqmarkerqz""#),
        ("pooling", r#"{"type": "mean"}"#),
        ("max_tokens", "8"),
        ("n", "2"),
        ("stream", "true"),
        ("messages", r#"[{"role": "user", "content": "zqmarkerqz"}]"#),
        ("prompt_embeds", r#""gASV""#),
        ("chat_template", r#""{{ zqmarkerqz }}""#),
        ("mm_processor_kwargs", "{}"),
    ],
    media: &[],
    has_kwargs: false,
    ..CHAT
};

const TOKENIZE: Route = Route {
    path: "/tokenize",
    base: &[("prompt", "\"a\"")],
    numbers: &[],
    flags: &["add_special_tokens", "return_token_strs"],
    token_lists: &[],
    has_bias: false,
    prompt: Some(("prompt", "TEXT")),
    takes_nothing: true,
    needs_no_room: true,
    opaque: &[],
    stops: &[],
    unsupported: &[
        ("chat_template", r#""{{ zqmarkerqz }}""#),
        ("tools", r#"[{"zqmarkerqz": 1}]"#),
        ("prompt", "[1, 2]"),
        ("prompt", "{}"),
        ("prompt", "null"),
        ("prompt", "1e308"),
    ],
    media: &[],
    has_kwargs: false,
    ..CHAT
};

const DETOKENIZE: Route = Route {
    path: "/detokenize",
    base: &[("tokens", "[0, 1]")],
    flags: &[],
    token_lists: &[("tokens", 0)],
    takes_many_tokens: true,
    prompt: None,
    unsupported: &[("tokens", "null"), ("tokens", "\"zqmarkerqz\""), ("tokens", "{}"), ("skip_special_tokens", "true")],
    ..TOKENIZE
};

const _: () = assert!(WIDE == 257, "the tables above know the vocabulary's size");
