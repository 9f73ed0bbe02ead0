//! The fields of `/v1/chat/completions` and `/v1/completions`: OpenAI's, and those that vLLM adds.

use serde_json::{Value, json};

use super::{Bounds, Conversation, Prompt, Prompts, Wishes};
use crate::fields::{
    Count, Either, Fields, Flag, Kind, ListOf, Mapped, Number, Object, OneOf, Opaque, PerToken, Request, Text, TokenId,
    Whole, Wrong, one_or_many,
};

/// OpenAI's, for completions.
const DEFAULT_MAX_TOKENS: usize = 16;

pub struct ChatRequest {
    /// Whether the model asked for is the one served.
    pub is_served: bool,
    pub conversation: Conversation,
    pub wishes: Wishes,
    pub stream: Option<StreamWishes>,
    pub return_token_ids: bool,
}

pub struct CompletionRequest {
    pub is_served: bool,
    pub prompts: Vec<Prompt>,
    /// Whether the prompt comes before its answer.
    pub echo: bool,
    /// Whether nothing is to be generated at all, which only makes sense with `echo`.
    pub is_prompt_only: bool,
    pub add_special_tokens: bool,
    pub wishes: Wishes,
    pub stream: Option<StreamWishes>,
    pub return_token_ids: bool,
}

/// What a stream carries besides the answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamWishes {
    pub include_usage: bool,
    /// With every piece, not only at the end.
    pub continuous_usage: bool,
}

impl Request for ChatRequest {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        let conversation = Conversation::read(fields, bounds)?;
        let (is_served, stream, return_token_ids) = envelope(fields, bounds)?;
        let mut wishes = wishes(fields, bounds)?;
        let tokens = Count::between(1, usize::MAX);
        let most = fields.optional("max_completion_tokens", tokens, "Most tokens of the answer.")?;
        wishes.max_tokens = most.or(fields.optional("max_tokens", tokens, "The same under its older name.")?);
        let wants = fields.optional("logprobs", Flag, "Whether each token's log-probability is told.")?;
        let most = Count::between(0, bounds.limits.logprobs as usize);
        let top = fields.optional("top_logprobs", most, "How many of the likeliest tokens are told with it.")?;
        wishes.logprobs = match (wants.unwrap_or(false), top) {
            (true, top) => Some(top.unwrap_or(0) as u32),
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(Wrong::new("needs logprobs to be true").below(".top_logprobs")),
        };
        refuse_for_chat(fields)?;
        Ok(Self { is_served, conversation, wishes, stream, return_token_ids })
    }
}

impl Request for CompletionRequest {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        let kind = Prompts { vocab_size: bounds.vocab_size, most: bounds.limits.prompts };
        let prompts = fields.required("prompt", kind, "A text, token ids, or a list of either.")?;
        let (is_served, stream, return_token_ids) = envelope(fields, bounds)?;
        let mut wishes = wishes(fields, bounds)?;
        let echo = fields.optional("echo", Flag, "Whether the prompt comes before its answer.")?.unwrap_or(false);
        let most =
            fields.optional("max_tokens", Count::between(0, usize::MAX), "Most tokens of an answer; 0 needs echo.")?;
        let is_prompt_only = most == Some(0);
        if is_prompt_only && !echo {
            return Err(Wrong::new("0 needs echo to be true").below(".max_tokens"));
        }
        wishes.max_tokens = most.map(|most| most.max(1));
        wishes.max_tokens_unsaid = Some(DEFAULT_MAX_TOKENS);
        let most = Count::between(0, bounds.limits.logprobs as usize);
        let logprobs = fields.optional("logprobs", most, "How many of the likeliest tokens are told with each.")?;
        wishes.logprobs = logprobs.map(|count| count as u32);
        if echo {
            wishes.prompt_logprobs = wishes.prompt_logprobs.max(wishes.logprobs);
        }
        let add =
            fields.optional("add_special_tokens", Flag, "Whether a text begins with the token that begins texts.")?;
        fields.refused("suffix", &[json!("")], "completing the middle of a text is not supported")?;
        fields.refused("prompt_embeds", &[], "prompts are texts or token ids")?;
        Ok(Self {
            is_served,
            prompts,
            echo,
            is_prompt_only,
            add_special_tokens: add.unwrap_or(true),
            wishes,
            stream,
            return_token_ids,
        })
    }
}

/// Whom it is for and how it is sent.
fn envelope(fields: &mut Fields, bounds: &Bounds) -> Result<(bool, Option<StreamWishes>, bool), Wrong> {
    let is_served = fields.optional("model", bounds.model(), "The model, as /v1/models names it.")?.unwrap_or(true);
    let is_streamed =
        fields.optional("stream", Flag, "Whether the answer comes as server-sent events.")?.unwrap_or(false);
    let options = fields.optional("stream_options", Object(stream_options), "Needs stream to be true.")?;
    if options.is_some() && !is_streamed {
        return Err(Wrong::new("needs stream to be true").below(".stream_options"));
    }
    let user = Text::between(0, bounds.limits.user_chars);
    fields.optional("user", user, "Who is asking; not used.")?;
    fields.optional("safety_identifier", user, "The same under its newer name.")?;
    fields.optional("prompt_cache_key", user, "Common beginnings are found without it.")?;
    fields.optional(
        "request_id",
        Opaque { most: bounds.limits.request_id_bytes },
        "Not used: ids are the server's own.",
    )?;
    fields.refused("service_tier", &[json!("auto"), json!("default")], "there is one tier of service: auto")?;
    let ids = fields.optional("return_token_ids", Flag, "Whether the prompt's and the answer's token ids are told.")?;
    Ok((is_served, is_streamed.then(|| options.unwrap_or_default()), ids.unwrap_or(false)))
}

fn stream_options(fields: &mut Fields) -> Result<StreamWishes, Wrong> {
    let usage = fields.optional("include_usage", Flag, "Whether a last event tells the usage.")?;
    let continuous = fields.optional("continuous_usage_stats", Flag, "Whether every event does.")?;
    fields.refused("include_obfuscation", &[json!(false)], "events are not padded")?;
    Ok(StreamWishes { include_usage: usage.unwrap_or(false), continuous_usage: continuous.unwrap_or(false) })
}

/// What both routes let a client say about sampling, stopping and scheduling.
fn wishes(fields: &mut Fields, bounds: &Bounds) -> Result<Wishes, Wrong> {
    let limits = &bounds.limits;
    let token = TokenId { vocab_size: bounds.vocab_size };
    let n = fields.optional("n", Count::between(1, limits.samples), "Answers to each prompt.")?;
    let best_of = fields.optional("best_of", Count::between(1, limits.samples), "Must be n, where it is given.")?;
    if best_of.is_some_and(|best_of| best_of != n.unwrap_or(1)) {
        return Err(Wrong::new("must be n: answers are not ranked").below(".best_of"));
    }
    let bias =
        PerToken { kind: Number::between(-100.0, 100.0), vocab_size: bounds.vocab_size, most: limits.logit_biases };
    let stop = one_or_many(Text::between(1, limits.stop_chars), limits.stops);
    let bad_words = ListOf::between(Text::between(1, limits.stop_chars), 0, limits.bad_words);
    let allowed = ListOf::between(token, 1, bounds.vocab_size);
    let wishes = Wishes {
        n,
        min_tokens: fields.optional(
            "min_tokens",
            Count::between(0, bounds.max_model_len),
            "Before so many tokens nothing ends an answer.",
        )?,
        temperature: fields.optional("temperature", Number::between(0.0, 100.0), "0 takes the likeliest token.")?,
        top_p: fields.optional(
            "top_p",
            Number::above(0.0, 1.0),
            "Draws from the likeliest tokens that together have this probability.",
        )?,
        top_k: fields.optional(
            "top_k",
            Whole::between(-1, i64::from(u32::MAX)),
            "Draws from this many of the likeliest; -1 and 0 switch it off.",
        )?,
        min_p: fields.optional(
            "min_p",
            Number::between(0.0, 1.0),
            "Drops tokens less likely than this share of the likeliest.",
        )?,
        seed: fields.optional("seed", Whole::between(i64::MIN, i64::MAX), "Makes a drawn answer repeatable.")?,
        repetition_penalty: fields.optional(
            "repetition_penalty",
            // What is much less takes a logit beyond all numbers.
            Number::between(0.01, 10.0),
            "Divides the logits of tokens seen before.",
        )?,
        frequency_penalty: fields.optional(
            "frequency_penalty",
            Number::between(-2.0, 2.0),
            "Taken off for each time a token was put out.",
        )?,
        presence_penalty: fields.optional(
            "presence_penalty",
            Number::between(-2.0, 2.0),
            "Taken off if a token was put out at all.",
        )?,
        logit_bias: fields.optional("logit_bias", bias, "Added to tokens' logits.")?.unwrap_or_default(),
        allowed_token_ids: fields.optional("allowed_token_ids", allowed, "No other token is chosen.")?,
        bad_words: fields.optional("bad_words", bad_words, "Words that are never completed.")?.unwrap_or_default(),
        stop: fields.optional("stop", stop, "Texts that end an answer.")?.unwrap_or_default(),
        stop_token_ids: fields
            .optional("stop_token_ids", ListOf::between(token, 0, limits.stop_token_ids), "Tokens that end an answer.")?
            .unwrap_or_default(),
        include_stop: fields
            .optional("include_stop_str_in_output", Flag, "Whether the text that ended it is shown.")?
            .unwrap_or(false),
        ignore_eos: fields
            .optional("ignore_eos", Flag, "Whether the model's own end tokens do not end an answer.")?
            .unwrap_or(false),
        show_special: !fields
            .optional("skip_special_tokens", Flag, "Whether tokens such as end marks are left out of the text.")?
            .unwrap_or(true),
        prompt_logprobs: fields
            .optional(
                "prompt_logprobs",
                Count::between(0, limits.logprobs as usize),
                "The same as logprobs, for the prompt's tokens.",
            )?
            .map(|count| count as u32),
        truncate_prompt: fields.optional(
            "truncate_prompt_tokens",
            truncation(bounds),
            "Keeps this many of the prompt's last tokens; -1: as many as fit.",
        )?,
        priority: fields
            .optional("priority", Whole::between(i64::from(i32::MIN), i64::from(i32::MAX)), "Lower runs sooner.")?
            .map(|level| level as i32),
        cache_salt: fields.optional(
            "cache_salt",
            Opaque { most: limits.cache_salt_bytes },
            "Only requests with the same salt share what the prefix cache holds.",
        )?,
        ..Wishes::default()
    };
    refuse(fields)?;
    Ok(wishes)
}

/// How many of a prompt's tokens are kept: a number of them, or -1.
pub fn truncation(bounds: &Bounds) -> impl Kind<Value = i64> {
    let most = bounds.max_model_len.saturating_sub(1).max(1) as i64;
    let all = |value: &Value| value.as_f64() == Some(-1.0);
    let either = Either { when: all, then: Whole::between(-1, -1), or: Whole::between(1, most) };
    Mapped {
        kind: either,
        map: |kept| match kept {
            OneOf::First(kept) | OneOf::Second(kept) => kept,
        },
    }
}

/// What vLLM or OpenAI know on both routes, and this server does not do.
fn refuse(fields: &mut Fields) -> Result<(), Wrong> {
    let grammar =
        ["structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"];
    fields.all_refused(&grammar, "constrained output is not supported")?;
    fields.refused("response_format", &[json!({"type": "text"})], "constrained output is not supported: text alone")?;
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
    fields.refused("modalities", &[json!(["text"])], "answers are text alone")?;
    fields.all_refused(&["audio", "prediction", "web_search_options"], "this is not supported")?;
    fields.refused(
        "reasoning_effort",
        &[json!("none")],
        "use chat_template_kwargs for what the model's template offers",
    )?;
    fields.refused("verbosity", &[json!("medium")], "this model has no such setting")?;
    fields.refused("store", &[json!(false)], "chat completions are not stored; see /v1/responses")?;
    fields.refused("metadata", &[json!({})], "chat completions are not stored, so there is nothing to label")?;
    fields.refused("echo", &[json!(false)], "only /v1/completions repeats its prompt")?;
    let nothing_added: Value = json!(false);
    fields.refused("add_special_tokens", &[nothing_added], "the chat template writes all special tokens")
}
