//! The fields of `/v1/chat/completions` and `/v1/completions`: OpenAI's, and those that vLLM adds.

use serde_json::{Value, json};

use super::{Bounds, Conversation, Prompt, Prompts, RawParams, sampling};
use crate::fields::{Count, Fields, Flag, Object, Opaque, Request, Text, Wrong};

/// OpenAI's default length of completions.
const DEFAULT_MAX_TOKENS: usize = 16;

pub struct ChatRequest {
    pub conversation: Conversation,
    pub params: RawParams,
    pub stream: Option<StreamOptions>,
    pub return_token_ids: bool,
}

pub struct CompletionRequest {
    pub prompts: Vec<Prompt>,
    /// Whether the answer begins with the prompt.
    pub echo: bool,
    /// Whether nothing is to be generated at all, which only makes sense with `echo`.
    pub is_prompt_only: bool,
    pub add_special_tokens: bool,
    pub params: RawParams,
    pub stream: Option<StreamOptions>,
    pub return_token_ids: bool,
}

/// Additional content of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamOptions {
    pub include_usage: bool,
    /// Whether usage comes with every piece of a stream, not only at its end.
    pub continuous_usage: bool,
}

impl Request for ChatRequest {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        let conversation = Conversation::read(fields, bounds)?;
        let (stream, return_token_ids) = envelope(fields, bounds)?;
        let mut params = sampling::all(fields, bounds)?;
        refuse(fields)?;
        let tokens = Count::between(1, usize::MAX);
        let most = fields.optional("max_completion_tokens", tokens, "Maximum length of the answer in tokens.")?;
        params.max_tokens = most.or(fields.optional("max_tokens", tokens, "Older name of max_completion_tokens.")?);
        let enabled = fields.optional("logprobs", Flag, "Whether to return the log-probability of each token.")?;
        let most = Count::between(0, bounds.limits.logprobs as usize);
        let top = fields.optional("top_logprobs", most, "Number of most likely tokens to return with each token.")?;
        params.logprobs = match (enabled.unwrap_or(false), top) {
            (true, top) => Some(top.unwrap_or(0) as u32),
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(Wrong::new("needs logprobs to be true").below(".top_logprobs")),
        };
        refuse_for_chat(fields)?;
        Ok(Self { conversation, params, stream, return_token_ids })
    }
}

impl Request for CompletionRequest {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        let kind = Prompts { vocab_size: bounds.vocab_size, most: bounds.limits.prompts };
        let prompts = fields.required("prompt", kind, "A string, an array of token ids, or an array of either.")?;
        let (stream, return_token_ids) = envelope(fields, bounds)?;
        let mut params = sampling::all(fields, bounds)?;
        refuse(fields)?;
        let echo = fields.optional("echo", Flag, "Whether the answer begins with the prompt.")?.unwrap_or(false);
        let most = fields.optional(
            "max_tokens",
            Count::between(0, usize::MAX),
            "Maximum length of an answer in tokens; 0 needs echo.",
        )?;
        let is_prompt_only = most == Some(0);
        if is_prompt_only && !echo {
            return Err(Wrong::new("0 needs echo to be true").below(".max_tokens"));
        }
        params.max_tokens = most.map(|most| most.max(1));
        params.max_tokens_unsaid = Some(DEFAULT_MAX_TOKENS);
        let most = Count::between(0, bounds.limits.logprobs as usize);
        let logprobs = fields.optional("logprobs", most, "Number of most likely tokens to return with each token.")?;
        params.logprobs = logprobs.map(|count| count as u32);
        if echo {
            params.prompt_logprobs = params.prompt_logprobs.max(params.logprobs);
        }
        let add = fields.optional(
            "add_special_tokens",
            Flag,
            "Whether a prompt that is a string begins with the beginning-of-sequence token.",
        )?;
        fields.refused("suffix", &[json!("")], "fill-in-the-middle is not supported")?;
        fields.refused("prompt_embeds", &[], "prompts are strings or token ids")?;
        Ok(Self {
            prompts,
            echo,
            is_prompt_only,
            add_special_tokens: add.unwrap_or(true),
            params,
            stream,
            return_token_ids,
        })
    }
}

/// The fields about the request itself, such as its model and stream.
fn envelope(fields: &mut Fields, bounds: &Bounds) -> Result<(Option<StreamOptions>, bool), Wrong> {
    bounds.check_model(fields)?;
    let is_streamed =
        fields.optional("stream", Flag, "Whether the answer is streamed as server-sent events.")?.unwrap_or(false);
    let options =
        fields.optional("stream_options", Object(stream_options), "Options of a stream; needs stream to be true.")?;
    if options.is_some() && !is_streamed {
        return Err(Wrong::new("needs stream to be true").below(".stream_options"));
    }
    let user = Text::between(0, bounds.limits.user_chars);
    fields.optional("user", user, "Accepted and ignored: an id of the end user.")?;
    fields.optional("safety_identifier", user, "Newer name of user.")?;
    fields.optional("prompt_cache_key", user, "Accepted and ignored: prefix caching is automatic.")?;
    fields.optional(
        "request_id",
        Opaque { most: bounds.limits.request_id_bytes },
        "Accepted and ignored: the server makes its own ids.",
    )?;
    fields.refused("service_tier", &[json!("auto"), json!("default")], "there is only one service tier: auto")?;
    let ids =
        fields.optional("return_token_ids", Flag, "Whether to return the token ids of the prompt and the answer.")?;
    Ok((is_streamed.then(|| options.unwrap_or_default()), ids.unwrap_or(false)))
}

fn stream_options(fields: &mut Fields) -> Result<StreamOptions, Wrong> {
    let usage = fields.optional("include_usage", Flag, "Whether a last event reports the usage.")?;
    let continuous = fields.optional("continuous_usage_stats", Flag, "Whether every event reports the usage.")?;
    fields.refused("include_obfuscation", &[json!(false)], "events cannot be padded")?;
    Ok(StreamOptions { include_usage: usage.unwrap_or(false), continuous_usage: continuous.unwrap_or(false) })
}

/// Fields of vLLM or OpenAI on both routes that are not supported here.
fn refuse(fields: &mut Fields) -> Result<(), Wrong> {
    let grammar =
        ["structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"];
    fields.all_refused(&grammar, "constrained output is not supported")?;
    fields.refused("response_format", &[json!({"type": "text"})], "constrained output is not supported: only text")?;
    fields.refused("use_beam_search", &[json!(false)], "beam search is not supported")?;
    fields.refused("length_penalty", &[json!(1.0), json!(1)], "beam search is not supported")?;
    fields.refused("spaces_between_special_tokens", &[json!(true)], "must be true")?;
    fields.refused("return_tokens_as_token_ids", &[json!(false)], "use return_token_ids")?;
    fields.all_refused(
        &["kv_transfer_params", "logits_processors", "vllm_xargs", "mm_processor_kwargs"],
        "this extension is not supported",
    )
}

fn refuse_for_chat(fields: &mut Fields) -> Result<(), Wrong> {
    let no_tools = "tools are not supported";
    fields.refused("tools", &[json!([])], no_tools)?;
    fields.refused("tool_choice", &[json!("none"), json!("auto")], no_tools)?;
    fields.refused("parallel_tool_calls", &[json!(true), json!(false)], no_tools)?;
    fields.refused("functions", &[json!([])], no_tools)?;
    fields.refused("function_call", &[json!("none"), json!("auto")], no_tools)?;
    fields.refused("modalities", &[json!(["text"])], "answers are text only")?;
    fields.all_refused(&["audio", "prediction", "web_search_options"], "this is not supported")?;
    fields.refused(
        "reasoning_effort",
        &[json!("none")],
        "use chat_template_kwargs for the options of the model's template",
    )?;
    fields.refused("verbosity", &[json!("medium")], "this setting is not supported")?;
    fields.refused("store", &[json!(false)], "chat completions are not stored; see /v1/responses")?;
    fields.refused("metadata", &[json!({})], "chat completions are not stored, so metadata would be lost")?;
    fields.refused("echo", &[json!(false)], "only /v1/completions can echo its prompt")?;
    let nothing_added: Value = json!(false);
    fields.refused("add_special_tokens", &[nothing_added], "the chat template writes all special tokens")
}
