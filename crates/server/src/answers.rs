//! The answers to a request, as they come back from the engine in pieces of text.

use std::future::poll_fn;
use std::task::Poll;

use folio_engine::Usage;

use crate::error::ApiError;
use crate::observe::{EndReason, RequestRecord};
use crate::sse::{EventWriter, Gone};
use crate::text_stream::{AnswerToken, Finish, Piece, PromptLogprobs, TextStream};

/// Every answer to every prompt of one request. Dropping it aborts what still runs.
pub struct Answers {
    streams: Vec<TextStream>,
    /// Number of answers to each prompt.
    num_samples: usize,
    record: RequestRecord,
    /// First stream of the next search for a piece; it moves on, so that no prompt hides another.
    turn: usize,
}

impl Answers {
    /// The answers that `streams` bring, one stream a prompt, each with `num_samples` answers.
    pub fn new(streams: Vec<TextStream>, num_samples: usize, record: RequestRecord) -> Self {
        Self { streams, num_samples, record, turn: 0 }
    }

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

    /// The next piece for a stream, or `Gone` if its client disconnects first.
    pub async fn next_for(&mut self, writer: &EventWriter) -> Result<Option<Piece>, Gone> {
        tokio::select! {
            piece = self.next() => Ok(piece),
            () = writer.closed() => Err(Gone),
        }
    }

    async fn next_of_many(&mut self) -> Option<(usize, Piece)> {
        let (num_streams, turn) = (self.streams.len(), self.turn);
        // These futures live until one of them is ready: a stream forgets its waker when its future
        // is dropped.
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

/// An answer, collected until it is complete.
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

/// A piece without anything that clients see, such as half a character.
pub fn is_silent(piece: &Piece) -> bool {
    piece.text.is_empty() && piece.finish.is_none() && piece.prompt_logprobs.is_none()
}
