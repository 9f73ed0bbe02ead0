//! `/v1/completions`.

use axum::Json;
use axum::response::{IntoResponse, Response};
use folio_engine::{Logprobs, Usage};
use folio_text::Tokenizer;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::wire::{Envelope, PromptTable, UsageSum, finish_reason, finite_logprob, token_text};
use crate::answers::{Answers, Collected, is_silent};
use crate::body::JsonBody;
use crate::error::{ApiError, ErrorStyle};
use crate::request::{CompletionRequest, Generate, StreamOptions};
use crate::service::{Call, Service};
use crate::sse::{self, EventWriter, Gone};
use crate::text_pool::Prepared;
use crate::text_stream::{AnswerToken, Finish, Piece, PromptLogprobs};

const ROUTE: &str = "/v1/completions";

/// Everything that is cheap to check is checked before the prompt is made.
pub async fn create(service: Service, call: Call, body: JsonBody) -> Result<Response, ApiError> {
    let request: CompletionRequest = body.read(&service).await?;
    let shape = Shape {
        echo: request.echo,
        is_prompt_only: request.is_prompt_only,
        logprobs: request.params.logprobs.is_some(),
        prompt_logprobs: request.params.prompt_logprobs.is_some(),
        return_token_ids: request.return_token_ids,
    };
    let generate = Generate::new(request.params, request.prompts.len(), &service.bounds)?;
    let prompts = service.text_pool.texts(request.prompts, request.add_special_tokens, &generate).await?;
    let (prompts, bad_words) = prompts;
    let answers = service.submit(ROUTE, &call, &prompts, bad_words, generate)?;
    match request.stream {
        None => whole(&service, &call, &prompts, answers, shape).await,
        Some(options) => {
            let (service_, call_) = (service.clone(), call.clone());
            Ok(sse::stream(&service, &call, |writer| async move {
                streamed(&service_, &call_, prompts, answers, shape, options, writer).await
            }))
        }
    }
}

/// Content of an answer besides its text.
#[derive(Clone, Copy)]
struct Shape {
    echo: bool,
    /// The one token that the engine makes is not shown.
    is_prompt_only: bool,
    logprobs: bool,
    prompt_logprobs: bool,
    return_token_ids: bool,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<TokenTable>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptTable>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// OpenAI's older form: a column each.
#[derive(Default, Serialize)]
struct TokenTable {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopTokens>>,
    text_offset: Vec<usize>,
    /// Start of the next token's text, in characters.
    #[serde(skip)]
    offset: usize,
}

/// Texts of tokens with their log-probabilities, the likeliest first; of two with one text the
/// likelier counts.
struct TopTokens(Vec<(String, f32)>);

impl Serialize for TopTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

impl TokenTable {
    fn starting_at(offset: usize) -> Self {
        Self { offset, ..Self::default() }
    }

    fn push(&mut self, tokenizer: &Tokenizer, token: u32, logprobs: Option<&Logprobs>) {
        let text = token_text(tokenizer, token);
        self.text_offset.push(self.offset);
        self.offset += text.chars().count();
        self.tokens.push(text);
        self.token_logprobs.push(logprobs.map(|logprobs| finite_logprob(logprobs.logprob)));
        let top = |logprobs: &Logprobs| {
            // The chosen one is always there.
            let all = logprobs.top.iter().copied().chain([(token, logprobs.logprob)]);
            let mut top = TopTokens(Vec::with_capacity(logprobs.top.len() + 1));
            for (id, logprob) in all {
                let text = token_text(tokenizer, id);
                if !top.0.iter().any(|(known, _)| *known == text) {
                    top.0.push((text, finite_logprob(logprob)));
                }
            }
            top
        };
        self.top_logprobs.push(logprobs.map(top));
    }

    fn answer(&mut self, tokenizer: &Tokenizer, tokens: &[AnswerToken]) {
        tokens.iter().for_each(|token| self.push(tokenizer, token.token, token.logprobs.as_ref()));
    }

    fn prompt(&mut self, tokenizer: &Tokenizer, tokens: &[u32], logprobs: &[Option<Logprobs>]) {
        let pairs = tokens.iter().zip(logprobs);
        pairs.for_each(|(&token, logprobs)| self.push(tokenizer, token, logprobs.as_ref()));
    }
}

async fn whole(
    service: &Service,
    call: &Call,
    prompts: &[Prepared],
    answers: Answers,
    shape: Shape,
) -> Result<Response, ApiError> {
    let envelope = Envelope::new(service, call, "cmpl", "text_completion");
    let num_samples = answers.num_choices() / prompts.len();
    let mut answers = answers.collect().await?;
    share_prompt_logprobs(&mut answers, num_samples);
    for (index, answer) in answers.iter_mut().enumerate() {
        present(service, &prompts[index / num_samples], answer, shape);
    }
    let choice = |(index, answer)| choice(service, index, &prompts[index / num_samples], answer, shape);
    let choices: Vec<Choice<'_>> = answers.iter().enumerate().map(choice).collect();
    let mut part = envelope.around(&choices);
    part.usage = Some(Some(UsageSum::of(prompts.iter().map(|prompt| prompt.tokens.len()), &answers)));
    Ok(Json(part).into_response())
}

/// The engine reports them with a prompt's first answer; they hold for the others too.
fn share_prompt_logprobs(answers: &mut [Collected], num_samples: usize) {
    for answers in answers.chunks_mut(num_samples) {
        let known = answers[0].prompt_logprobs.clone();
        answers[1..].iter_mut().for_each(|answer| answer.prompt_logprobs = known.clone());
    }
}

/// Makes an answer what the client sees of it.
fn present(service: &Service, prompt: &Prepared, answer: &mut Collected, shape: Shape) {
    if shape.is_prompt_only {
        answer.text.clear();
        answer.tokens.clear();
        answer.usage.completion_tokens = 0;
        answer.finish = Some(Finish::Length);
    }
    if shape.echo {
        answer.text.insert_str(0, &prompt_text(service, prompt));
    }
}

fn prompt_text(service: &Service, prompt: &Prepared) -> String {
    prompt.text.clone().unwrap_or_else(|| service.model.tokenizer.decode(&prompt.tokens, true))
}

fn choice<'a>(
    service: &'a Service,
    index: usize,
    prompt: &'a Prepared,
    answer: &'a Collected,
    shape: Shape,
) -> Choice<'a> {
    let tokenizer = &service.model.tokenizer;
    let (finish_reason, stop_reason) = finish_reason(answer.finish.as_ref());
    let logprobs = shape.logprobs.then(|| {
        let mut table = TokenTable::default();
        if let Some(all) = answer.prompt_logprobs.as_ref().filter(|_| shape.echo) {
            table.prompt(tokenizer, &prompt.tokens, all);
        }
        table.answer(tokenizer, &answer.tokens);
        table
    });
    let shown = answer.prompt_logprobs.as_ref().filter(|_| shape.prompt_logprobs);
    Choice {
        index,
        text: &answer.text,
        logprobs,
        finish_reason,
        stop_reason,
        prompt_logprobs: shown.map(|logprobs| service.prompt_table(logprobs.clone())),
        prompt_token_ids: shape.return_token_ids.then_some(prompt.tokens.as_slice()),
        token_ids: token_ids(shape, &answer.tokens),
    }
}

fn token_ids(shape: Shape, tokens: &[AnswerToken]) -> Option<Vec<u32>> {
    shape.return_token_ids.then(|| tokens.iter().map(|token| token.token).collect())
}

/// State of one streamed answer, and content for its next piece.
#[derive(Default)]
struct Said {
    /// Its prompt has been sent, if it is requested.
    has_begun: bool,
    /// Offset of the next token in the text, in characters.
    offset: usize,
    /// Received but not sent: they go with the first piece.
    prompt_logprobs: Option<PromptLogprobs>,
}

async fn streamed(
    service: &Service,
    call: &Call,
    prompts: Vec<Prepared>,
    mut answers: Answers,
    shape: Shape,
    options: StreamOptions,
    mut writer: EventWriter,
) -> Result<(), Gone> {
    let envelope = Envelope::new(service, call, "cmpl", "text_completion");
    let prompt_lens = prompts.iter().map(|prompt| prompt.tokens.len());
    let mut usage = UsageSum::new(prompt_lens, answers.num_choices());
    let mut said: Vec<Said> = (0..answers.num_choices()).map(|_| Said::default()).collect();
    let num_samples = answers.num_choices() / prompts.len();
    while let Some(mut piece) = answers.next_for(&writer).await? {
        if let Some(all) = piece.prompt_logprobs.take() {
            let samples = piece.choice..piece.choice + num_samples;
            said[samples].iter_mut().for_each(|said| said.prompt_logprobs = Some(all.clone()));
            continue;
        }
        if let Some((Finish::Failed(error), _)) = &piece.finish {
            return writer.data(&error.body(ErrorStyle::OpenAi)).await;
        }
        if shape.is_prompt_only {
            piece.text.clear();
            piece.tokens.clear();
            piece.finish = piece.finish.map(|(_, usage)| (Finish::Length, Usage { completion_tokens: 0, ..usage }));
        }
        usage.tokens(piece.choice, piece.tokens.len());
        if let Some((_, used)) = &piece.finish {
            usage.ended(piece.choice, used);
        }
        let said = &mut said[piece.choice];
        let tells_more = (shape.logprobs || shape.return_token_ids) && !piece.tokens.is_empty();
        let begins = !said.has_begun && (shape.echo || shape.prompt_logprobs || shape.return_token_ids);
        if is_silent(&piece) && !tells_more && !begins {
            continue;
        }
        let text = match shape.echo && !said.has_begun {
            true => prompt_text(service, &prompts[piece.choice / num_samples]) + &piece.text,
            false => std::mem::take(&mut piece.text),
        };
        let choices = [delta(service, &prompts[piece.choice / num_samples], &piece, &text, said, shape)];
        let mut part = envelope.around(&choices);
        part.usage = match (options.continuous_usage, options.include_usage) {
            (true, _) => Some(Some(usage.sum())),
            (false, true) => Some(None),
            (false, false) => None,
        };
        writer.data(&part).await?;
    }
    if options.include_usage {
        let mut part = envelope.around::<Choice<'_>>(&[]);
        part.usage = Some(Some(usage.sum()));
        writer.data(&part).await?;
    }
    writer.done().await
}

fn delta<'a>(
    service: &'a Service,
    prompt: &'a Prepared,
    piece: &Piece,
    text: &'a str,
    said: &mut Said,
    shape: Shape,
) -> Choice<'a> {
    let tokenizer = &service.model.tokenizer;
    let (finish_reason, stop_reason) = finish_reason(piece.finish.as_ref().map(|(finish, _)| finish));
    let is_first = !std::mem::replace(&mut said.has_begun, true);
    let known = said.prompt_logprobs.take().filter(|_| is_first);
    let logprobs = shape.logprobs.then(|| {
        let mut table = TokenTable::starting_at(said.offset);
        if let Some(all) = known.as_ref().filter(|_| shape.echo) {
            table.prompt(tokenizer, &prompt.tokens, all);
        }
        table.answer(tokenizer, &piece.tokens);
        said.offset = table.offset;
        table
    });
    Choice {
        index: piece.choice,
        text,
        logprobs: logprobs.filter(|table| !table.tokens.is_empty()),
        finish_reason,
        stop_reason,
        prompt_logprobs: known.filter(|_| shape.prompt_logprobs).map(|logprobs| service.prompt_table(logprobs)),
        prompt_token_ids: (shape.return_token_ids && is_first).then_some(prompt.tokens.as_slice()),
        token_ids: token_ids(shape, &piece.tokens),
    }
}
