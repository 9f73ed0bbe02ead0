//! `/tokenize` and `/detokenize`, as vLLM has them.

use axum::Json;
use serde::Serialize;
use serde_json::{Value, json};

use super::wire::token_text;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::fields::{Fields, Flag, ListOf, Request, Text, TokenId, Wrong};
use crate::request::{Bounds, Conversation};
use crate::service::Service;

/// More tokens than a body of the usual size can hold.
const MOST_TOKENS: usize = 1 << 20;

/// A string, tokenized as it is.
pub struct TokenizeText {
    prompt: String,
    add_special_tokens: bool,
    return_token_strs: bool,
}

/// A conversation, as the model's template writes it.
pub struct TokenizeChat {
    conversation: Conversation,
    return_token_strs: bool,
}

pub struct Detokenize {
    tokens: Vec<u32>,
}

impl Request for TokenizeText {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        bounds.check_model(fields)?;
        Ok(Self {
            prompt: fields.required("prompt", Text::any(), "The string to tokenize.")?,
            add_special_tokens: fields
                .optional("add_special_tokens", Flag, "Whether the tokens begin with the beginning-of-sequence token.")?
                .unwrap_or(true),
            return_token_strs: token_strs(fields)?,
        })
    }
}

impl Request for TokenizeChat {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        bounds.check_model(fields)?;
        let request =
            Self { conversation: Conversation::read(fields, bounds)?, return_token_strs: token_strs(fields)? };
        fields.refused("add_special_tokens", &[json!(false)], "the chat template writes all special tokens")?;
        fields.refused("tools", &[json!([])], "tools are not supported")?;
        fields.all_refused(&["mm_processor_kwargs"], "this extension is not supported")?;
        Ok(request)
    }
}

impl Request for Detokenize {
    type Bounds = Bounds;

    fn read(fields: &mut Fields, bounds: &Bounds) -> Result<Self, Wrong> {
        let tokens = ListOf::between(TokenId { vocab_size: bounds.vocab_size }, 0, MOST_TOKENS);
        bounds.check_model(fields)?;
        Ok(Self { tokens: fields.required("tokens", tokens, "The token ids to decode.")? })
    }
}

fn token_strs(fields: &mut Fields) -> Result<bool, Wrong> {
    let wanted = fields.optional("return_token_strs", Flag, "Whether to return the string of each token.")?;
    Ok(wanted.unwrap_or(false))
}

#[derive(Serialize)]
pub struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

/// A request with messages is a conversation; every other is a string.
pub async fn tokenize(service: Service, body: JsonBody) -> Result<Json<Tokenized>, ApiError> {
    let bounds = &service.bounds;
    let (tokens, return_token_strs) = if body.has("messages") {
        let request: TokenizeChat = body.read(&service).await?;
        (service.text_pool.count_chat(request.conversation).await?.tokens, request.return_token_strs)
    } else {
        let request: TokenizeText = body.read(&service).await?;
        (service.text_pool.tokenize(request.prompt, request.add_special_tokens).await?, request.return_token_strs)
    };
    let tokenizer = &service.model.tokenizer;
    let text = |token: &u32| token_text(tokenizer, *token);
    let token_strs = return_token_strs.then(|| tokens.iter().map(text).collect());
    Ok(Json(Tokenized { count: tokens.len(), max_model_len: bounds.max_model_len, tokens, token_strs }))
}

pub async fn detokenize(service: Service, body: JsonBody) -> Result<Json<Value>, ApiError> {
    let request: Detokenize = body.read(&service).await?;
    let prompt = service.text_pool.detokenize(request.tokens).await?;
    Ok(Json(json!({"prompt": prompt})))
}
