//! The fields of sampling, stopping and scheduling that several routes read.

use super::{Bounds, RawParams};
use crate::fields::{
    Count, Either, Fields, Flag, ListOf, Mapped, Number, OneOf, Opaque, PerToken, Text, TokenId, Whole, Wrong,
    one_or_many,
};

/// The fields of every route that generates: temperature, `top_p` and `top_k`.
pub fn core(fields: &mut Fields) -> Result<RawParams, Wrong> {
    Ok(RawParams {
        temperature: fields.optional(
            "temperature",
            Number::between(0.0, 100.0),
            "Sampling temperature; 0 always takes the most likely token.",
        )?,
        top_p: fields.optional(
            "top_p",
            Number::above(0.0, 1.0),
            "Nucleus sampling: samples from the most likely tokens whose probabilities add up to this.",
        )?,
        top_k: fields.optional(
            "top_k",
            Whole::between(-1, i64::from(u32::MAX)),
            "Samples from this many of the most likely tokens; -1 and 0 disable it.",
        )?,
        ..RawParams::default()
    })
}

/// The fields that vLLM takes on all of OpenAI's routes; [`core`] and [`scheduling`] are among
/// them.
pub fn extended(fields: &mut Fields, bounds: &Bounds) -> Result<RawParams, Wrong> {
    let limits = &bounds.limits;
    let core = core(fields)?;
    let scheduling = scheduling(fields, bounds)?;
    let penalty = Number::between(-2.0, 2.0);
    let bias =
        PerToken { kind: Number::between(-100.0, 100.0), vocab_size: bounds.vocab_size, most: limits.logit_biases };
    let stop = one_or_many(Text::between(1, limits.stop_chars), limits.stops);
    Ok(RawParams {
        min_p: fields.optional(
            "min_p",
            Number::between(0.0, 1.0),
            "Drops tokens whose probability is below this fraction of the most likely token's.",
        )?,
        seed: fields.optional(
            "seed",
            Whole::between(i64::MIN, i64::MAX),
            "Seed of the sampler; makes a sampled answer repeatable.",
        )?,
        repetition_penalty: fields.optional(
            "repetition_penalty",
            // A much smaller divisor would make a logit infinite.
            Number::between(0.01, 10.0),
            "Penalty for tokens of the prompt and the answer so far; above 1 makes them less likely.",
        )?,
        frequency_penalty: fields.optional(
            "frequency_penalty",
            penalty,
            "Subtracted from a token's logit for each time it was generated.",
        )?,
        presence_penalty: fields.optional(
            "presence_penalty",
            penalty,
            "Subtracted from a token's logit if it was generated at all.",
        )?,
        logit_bias: fields
            .optional("logit_bias", bias, "Added to the logits of tokens, by token id.")?
            .unwrap_or_default(),
        stop: fields.optional("stop", stop, "Strings that end an answer.")?.unwrap_or_default(),
        include_stop: fields
            .optional("include_stop_str_in_output", Flag, "Whether the answer includes the stop string that ended it.")?
            .unwrap_or(false),
        ignore_eos: fields
            .optional("ignore_eos", Flag, "Whether to continue after the model's own end tokens.")?
            .unwrap_or(false),
        show_special: !fields
            .optional(
                "skip_special_tokens",
                Flag,
                "Whether special tokens, such as end markers, are left out of the text.",
            )?
            .unwrap_or(true),
        temperature: core.temperature,
        top_p: core.top_p,
        top_k: core.top_k,
        ..scheduling
    })
}

/// The fields of chat and completions alone, on top of [`extended`].
pub fn all(fields: &mut Fields, bounds: &Bounds) -> Result<RawParams, Wrong> {
    let limits = &bounds.limits;
    let token = TokenId { vocab_size: bounds.vocab_size };
    let n = fields.optional("n", Count::between(1, limits.samples), "Number of answers to each prompt.")?;
    let best_of =
        fields.optional("best_of", Count::between(1, limits.samples), "Must equal n: answers are not ranked.")?;
    if best_of.is_some_and(|best_of| best_of != n.unwrap_or(1)) {
        return Err(Wrong::new("must equal n: answers are not ranked").below(".best_of"));
    }
    let bad_words = ListOf::between(Text::between(1, limits.stop_chars), 0, limits.bad_words);
    let allowed = ListOf::between(token, 1, bounds.vocab_size);
    Ok(RawParams {
        n,
        min_tokens: fields.optional(
            "min_tokens",
            Count::between(0, bounds.max_model_len),
            "Minimum length of an answer in tokens.",
        )?,
        allowed_token_ids: fields.optional("allowed_token_ids", allowed, "Only these tokens can be sampled.")?,
        bad_words: fields.optional("bad_words", bad_words, "Words that are never generated.")?.unwrap_or_default(),
        stop_token_ids: fields
            .optional(
                "stop_token_ids",
                ListOf::between(token, 0, limits.stop_token_ids),
                "Token ids that end an answer.",
            )?
            .unwrap_or_default(),
        prompt_logprobs: fields
            .optional(
                "prompt_logprobs",
                Count::between(0, limits.logprobs as usize),
                "Returns the log-probability of each prompt token, with this many of the most likely tokens.",
            )?
            .map(|count| count as u32),
        truncate_prompt: truncation(fields, bounds)?,
        ..extended(fields, bounds)?
    })
}

/// The fields that say when a request runs and which cache it shares.
pub fn scheduling(fields: &mut Fields, bounds: &Bounds) -> Result<RawParams, Wrong> {
    let level = Whole::between(i64::from(i32::MIN), i64::from(i32::MAX));
    Ok(RawParams {
        priority: fields
            .optional("priority", level, "Scheduling priority; a lower value runs sooner.")?
            .map(|level| level as i32),
        cache_salt: fields.optional(
            "cache_salt",
            Opaque { most: bounds.limits.cache_salt_bytes },
            "Only requests with the same salt share cached prefixes.",
        )?,
        ..RawParams::default()
    })
}

/// How many tokens of a prompt are kept, from its end: a number of them, or -1 for as many as fit.
pub fn truncation(fields: &mut Fields, bounds: &Bounds) -> Result<Option<i64>, Wrong> {
    let most = bounds.max_model_len.saturating_sub(1).max(1) as i64;
    let is_all = |value: &serde_json::Value| value.as_f64() == Some(-1.0);
    let count = Mapped {
        kind: Either { when: is_all, then: Whole::between(-1, -1), or: Whole::between(1, most) },
        map: |kept| match kept {
            OneOf::First(kept) | OneOf::Second(kept) => kept,
        },
    };
    fields.optional(
        "truncate_prompt_tokens",
        count,
        "Keeps only this many of the last tokens; -1 keeps as many as fit.",
    )
}
