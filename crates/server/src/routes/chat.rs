//! `/v1/chat/completions`.

use axum::Json;
use axum::response::{IntoResponse, Response};
use folio_text::Tokenizer;
use serde::Serialize;

use super::wire::{Entry, Envelope, UsageSum, entries, finish_reason};
use crate::answers::{Answers, Collected, is_silent};
use crate::body::JsonBody;
use crate::error::{ApiError, ErrorStyle};
use crate::request::{ChatRequest, Generate, StreamOptions};
use crate::service::{Call, Service};
use crate::sse::{self, EventWriter, Gone};
use crate::text_pool::Prepared;
use crate::text_stream::{AnswerToken, Finish, Piece};

const ROUTE: &str = "/v1/chat/completions";

/// Everything that is cheap to check is checked before the prompt is made.
pub async fn create(service: Service, call: Call, body: JsonBody) -> Result<Response, ApiError> {
    let request: ChatRequest = body.read(&service).await?;
    let shape = Shape { logprobs: request.params.logprobs.is_some(), return_token_ids: request.return_token_ids };
    let generate = Generate::new(request.params, 1, &service.bounds)?;
    let (prompt, bad_words) = service.text_pool.chat(request.conversation, &generate).await?;
    let answers = service.submit(ROUTE, &call, std::slice::from_ref(&prompt), bad_words, generate);
    let answers = answers.map_err(|error| error.renamed(&[("prompt", "messages")]))?;
    match request.stream {
        None => whole(&service, &call, prompt, answers, shape).await,
        Some(options) => {
            let (service_, call_) = (service.clone(), call.clone());
            Ok(sse::stream(&service, &call, |writer| async move {
                streamed(&service_, &call_, prompt, answers, shape, options, writer).await
            }))
        }
    }
}

/// Content of an answer besides its text.
#[derive(Clone, Copy)]
struct Shape {
    logprobs: bool,
    return_token_ids: bool,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<Content<'a>>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct Delta<'a> {
    index: usize,
    delta: DeltaMessage<'a>,
    logprobs: Option<Content<'a>>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct DeltaMessage<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct Content<'a> {
    content: Vec<Entry<'a>>,
}

async fn whole(
    service: &Service,
    call: &Call,
    prompt: Prepared,
    answers: Answers,
    shape: Shape,
) -> Result<Response, ApiError> {
    let envelope = Envelope::new(service, call, "chatcmpl", "chat.completion");
    let answers = answers.collect().await?;
    let tokenizer = &service.model.tokenizer;
    let choices: Vec<Choice<'_>> =
        answers.iter().enumerate().map(|(index, answer)| choice(tokenizer, index, answer, shape)).collect();
    let mut part = envelope.around(&choices);
    part.usage = Some(Some(UsageSum::of([prompt.tokens.len()].into_iter(), &answers)));
    part.prompt_token_ids = shape.return_token_ids.then_some(&prompt.tokens);
    part.prompt_logprobs = answers[0].prompt_logprobs.clone().map(|logprobs| service.prompt_table(logprobs));
    Ok(Json(part).into_response())
}

fn choice<'a>(tokenizer: &'a Tokenizer, index: usize, answer: &'a Collected, shape: Shape) -> Choice<'a> {
    let (finish_reason, stop_reason) = finish_reason(answer.finish.as_ref());
    Choice {
        index,
        message: Message { role: "assistant", content: &answer.text, refusal: None },
        logprobs: shape.logprobs.then(|| logprobs(tokenizer, &answer.tokens)),
        finish_reason,
        stop_reason,
        token_ids: token_ids(shape, &answer.tokens),
    }
}

async fn streamed(
    service: &Service,
    call: &Call,
    prompt: Prepared,
    mut answers: Answers,
    shape: Shape,
    options: StreamOptions,
    mut writer: EventWriter,
) -> Result<(), Gone> {
    let envelope = Envelope::new(service, call, "chatcmpl", "chat.completion.chunk");
    let mut usage = UsageSum::new([prompt.tokens.len()].into_iter(), answers.num_choices());
    let shown = |usage: &UsageSum| match (options.continuous_usage, options.include_usage) {
        (true, _) => Some(Some(usage.sum())),
        (false, true) => Some(None),
        (false, false) => None,
    };
    for index in 0..answers.num_choices() {
        let delta = DeltaMessage { role: Some("assistant"), content: Some("") };
        let choices = [Delta { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None }];
        let mut part = envelope.around(&choices);
        part.usage = shown(&usage);
        part.prompt_token_ids = (shape.return_token_ids && index == 0).then_some(&prompt.tokens);
        writer.push(None, &part);
    }
    writer.flush().await?;
    while let Some(piece) = answers.next_for(&writer).await? {
        usage.tokens(piece.choice, piece.tokens.len());
        if let Some((finish, used)) = &piece.finish {
            if let Finish::Failed(error) = finish {
                return writer.data(&error.body(ErrorStyle::OpenAi)).await;
            }
            usage.ended(piece.choice, used);
        }
        if is_silent(&piece) && !shape.logprobs && !shape.return_token_ids {
            continue;
        }
        let logprobs = shape.logprobs.then(|| logprobs(&service.model.tokenizer, &piece.tokens));
        let choices = [delta(&piece, logprobs, shape)];
        let mut part = envelope.around(&choices);
        part.usage = shown(&usage);
        part.prompt_logprobs = piece.prompt_logprobs.clone().map(|logprobs| service.prompt_table(logprobs));
        writer.data(&part).await?;
    }
    if options.include_usage {
        let mut part = envelope.around::<Delta<'_>>(&[]);
        part.usage = Some(Some(usage.sum()));
        writer.data(&part).await?;
    }
    writer.done().await
}

fn delta<'a>(piece: &'a Piece, logprobs: Option<Content<'a>>, shape: Shape) -> Delta<'a> {
    let (finish_reason, stop_reason) = finish_reason(piece.finish.as_ref().map(|(finish, _)| finish));
    let content = (!piece.text.is_empty()).then_some(piece.text.as_str());
    let delta = DeltaMessage { role: None, content };
    Delta {
        index: piece.choice,
        delta,
        logprobs,
        finish_reason,
        stop_reason,
        token_ids: token_ids(shape, &piece.tokens),
    }
}

fn token_ids(shape: Shape, tokens: &[AnswerToken]) -> Option<Vec<u32>> {
    shape.return_token_ids.then(|| tokens.iter().map(|token| token.token).collect())
}

fn logprobs<'a>(tokenizer: &'a Tokenizer, tokens: &[AnswerToken]) -> Content<'a> {
    Content { content: entries(tokenizer, tokens) }
}
