//! A request under way: its prompts handed to the engine, its answers coming back as pieces of text.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Instant;

use folio_engine::{RequestOptions, SubmitError, TimeLimit, Usage};

use crate::error::ApiError;
use crate::observe::{EndReason, RequestRecord, RequestStart};
use crate::prompts::Prepared;
use crate::request::{Generate, invalid};
use crate::service::{Call, Service};
use crate::sse::{EventWriter, Gone};
use crate::text_stream::{AnswerToken, Finish, Piece, PromptLogprobs, TextStream};

/// Every answer to every prompt of one request. Dropping it aborts what still runs.
pub struct Answers {
    streams: Vec<TextStream>,
    /// Answers to each prompt.
    num_samples: usize,
    record: RequestRecord,
    /// Where the next search for a piece begins, so that no prompt hides another.
    turn: usize,
}

impl Service {
    /// Hands a request to the engine, all of it or nothing.
    pub fn start(
        &self,
        route: &'static str,
        call: &Call,
        prompts: &[Prepared],
        generate: Generate,
    ) -> Result<Answers, ApiError> {
        let engine = &self.model.engine;
        let num_samples = generate.params.n;
        let options = self.options(call, &generate);
        let request = |prompt: &Prepared| {
            let request = engine.request(prompt.tokens.clone(), generate.params_of_a_prompt());
            request.and_then(|request| request.with_options(options.clone())).map_err(invalid)
        };
        check_told(self, prompts, &generate)?;
        // All are checked before any is queued.
        let requests = prompts.iter().map(request).collect::<Result<Vec<_>, _>>()?;
        let submit = |request| {
            let stream = engine.submit(request).map_err(not_taken)?;
            Ok(TextStream::new(stream, &self.model.tokenizer, num_samples, &generate.text))
        };
        let streams = requests.into_iter().map(submit).collect::<Result<Vec<_>, ApiError>>()?;
        let mut record = self.record(route, call);
        prompts.iter().for_each(|p| record.submitted(p.tokens.len(), num_samples, generate.params.max_tokens));
        Ok(Answers { streams, num_samples, record, turn: 0 })
    }

    /// When a request runs, for whom, and what it shares.
    pub fn options(&self, call: &Call, generate: &Generate) -> RequestOptions {
        let caller = &call.caller;
        RequestOptions {
            priority: caller.priority(generate.priority),
            tenant: caller.tenant,
            weight: caller.weight,
            deadline: deadline(self, call).map(|deadline| deadline.saturating_duration_since(Instant::now())),
            cache_salt: generate.cache_salt.as_deref().map_or(caller.cache_salt, |salt| caller.cache_salt_with(salt)),
        }
    }

    pub fn record(&self, route: &'static str, call: &Call) -> RequestRecord {
        self.observer.begin(RequestStart {
            route,
            request_id: call.id.id.clone(),
            key_name: Some(call.caller.name.clone()),
            traceparent: call.traceparent.as_deref(),
            arrived: call.arrived,
        })
    }
}

/// What is told of prompts is bounded as a whole: it is written for every choice.
fn check_told(service: &Service, prompts: &[Prepared], generate: &Generate) -> Result<(), ApiError> {
    let Some(top) = generate.params.prompt_logprobs else { return Ok(()) };
    let tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let values = tokens.saturating_mul(top as usize + 1).saturating_mul(generate.params.n);
    match service.bounds.limits.prompt_logprob_values {
        most if values > most => {
            let message =
                format!("{values} log-probabilities of prompt tokens in all, but at most {most} are told at once");
            Err(ApiError::invalid("prompt_logprobs", message))
        }
        _ => Ok(()),
    }
}

pub fn not_taken(error: SubmitError) -> ApiError {
    match error {
        SubmitError::QueueFull { retry_after } => ApiError::Overloaded { retry_after },
        SubmitError::Draining => ApiError::Draining,
        SubmitError::Stopped => ApiError::Stopped,
    }
}

impl Answers {
    pub fn num_choices(&self) -> usize {
        self.streams.len() * self.num_samples
    }

    /// The next piece of any answer; none when all have ended.
    pub async fn next(&mut self) -> Option<Piece> {
        let (prompt, mut piece) = match self.streams.len() {
            1 => (0, self.streams[0].next().await?),
            _ => self.next_of_many().await?,
        };
        piece.choice += prompt * self.num_samples;
        if !piece.tokens.is_empty() {
            self.record.token(piece.choice, piece.tokens.len());
        }
        if let Some((finish, usage)) = &piece.finish {
            self.record.finished(piece.choice, end_reason(finish), usage);
        }
        if let Some(fault) = &piece.fault {
            self.record.failed(fault);
        }
        Some(piece)
    }

    /// The same for a stream, as long as somebody reads it.
    pub async fn next_for(&mut self, writer: &EventWriter) -> Result<Option<Piece>, Gone> {
        tokio::select! {
            piece = self.next() => Ok(piece),
            () = writer.closed() => Err(Gone),
        }
    }

    async fn next_of_many(&mut self) -> Option<(usize, Piece)> {
        let (num_streams, turn) = (self.streams.len(), self.turn);
        // Kept until one of them is ready: a stream forgets whom to wake when its future is dropped.
        let mut nexts: Vec<_> = self.streams.iter_mut().map(|stream| Some(Box::pin(stream.next()))).collect();
        let found = poll_fn(|context| {
            for step in 0..num_streams {
                let index = (turn + step) % num_streams;
                let Some(next) = &mut nexts[index] else { continue };
                match next.as_mut().poll(context) {
                    Poll::Ready(Some(piece)) => return Poll::Ready(Some((index, piece))),
                    Poll::Ready(None) => nexts[index] = None,
                    Poll::Pending => {}
                }
            }
            if nexts.iter().all(Option::is_none) { Poll::Ready(None) } else { Poll::Pending }
        });
        let found = found.await;
        self.turn = found.as_ref().map_or(turn, |(index, _)| index + 1);
        found
    }
}

fn end_reason(finish: &Finish) -> EndReason {
    match finish {
        Finish::Stop(_) => EndReason::Stop,
        Finish::Length => EndReason::Length,
        Finish::Failed(error) => failure_reason(error),
    }
}

pub fn failure_reason(error: &ApiError) -> EndReason {
    match error {
        ApiError::RequestTimeout | ApiError::QueueTimeout => EndReason::Timeout,
        ApiError::Aborted => EndReason::Abort,
        _ => EndReason::Error,
    }
}

/// An answer, whole.
#[derive(Default)]
pub struct Collected {
    pub text: String,
    pub tokens: Vec<AnswerToken>,
    pub prompt_logprobs: Option<PromptLogprobs>,
    pub finish: Option<Finish>,
    pub usage: Usage,
}

impl Answers {
    /// Waits for all of them. One that failed fails the request.
    pub async fn collect(mut self) -> Result<Vec<Collected>, ApiError> {
        let mut answers: Vec<Collected> = (0..self.num_choices()).map(|_| Collected::default()).collect();
        while let Some(piece) = self.next().await {
            let answer = &mut answers[piece.choice];
            answer.text.push_str(&piece.text);
            answer.tokens.extend(piece.tokens);
            answer.prompt_logprobs = answer.prompt_logprobs.take().or(piece.prompt_logprobs);
            if let Some((finish, usage)) = piece.finish {
                if let Finish::Failed(error) = finish {
                    self.record.answered(error.status().as_u16());
                    return Err(error);
                }
                (answer.finish, answer.usage) = (Some(finish), usage);
            }
        }
        Ok(answers)
    }
}

/// Whether a piece tells nothing that clients see, such as half a character.
pub fn is_silent(piece: &Piece) -> bool {
    piece.text.is_empty() && piece.finish.is_none() && piece.prompt_logprobs.is_none()
}

/// When a request must be over, whether or not its client reads; none where there is no limit in all.
pub fn deadline(service: &Service, call: &Call) -> Option<Instant> {
    match service.timeouts.request {
        TimeLimit::InAll(limit) => Some(call.arrived + limit),
        TimeLimit::WithoutProgress(_) => None,
    }
}
