//! From the engine's tokens to text that can be shown: whole characters, cut at stop strings.

use std::collections::VecDeque;
use std::sync::Arc;

use folio_engine::{Event, FinishReason, Logprobs, RequestStream, Usage};
use folio_text::{Detokenizer, StopMatcher, Tokenizer};

use crate::error::ApiError;
use crate::request::TextOptions;

/// The answers to one prompt as text, all its samples interleaved as they come.
pub struct TextStream {
    stream: RequestStream,
    samples: Vec<Sample>,
    ready: VecDeque<Piece>,
    options: TextOptions,
}

struct Sample {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    num_tokens: usize,
    /// Log-probabilities of the token that ended it, if they are requested.
    stop_logprobs: Option<Logprobs>,
    /// A stop string has come: nothing more is shown, and the engine's last word on the sample is
    /// awaited.
    stopped: bool,
    done: bool,
}

/// A bit of one answer: new text (perhaps none yet), the tokens it came from, a token that ended it
/// included, and how it ended if it did.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    /// Which of a request's answers, all prompts counted through.
    pub choice: usize,
    pub text: String,
    pub tokens: Vec<AnswerToken>,
    /// The prompt's log-probabilities; before the first answer's first token.
    pub prompt_logprobs: Option<PromptLogprobs>,
    pub finish: Option<(Finish, Usage)>,
    /// The engine's own words on what went wrong: for the log, never for a client.
    pub fault: Option<String>,
}

/// One entry a token of the prompt; the first token has no prediction.
pub type PromptLogprobs = Arc<[Option<Logprobs>]>;

#[derive(Clone, Debug)]
pub struct AnswerToken {
    pub token: u32,
    pub logprobs: Option<Logprobs>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it by itself, or something that the client named did.
    Stop(Option<StopCause>),
    Length,
    Failed(ApiError),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    Text(String),
    Token(u32),
}

/// The answer to a client when the engine fails.
pub const ENGINE_FAULT: ApiError = ApiError::Failed("the engine could not complete this request");

/// The error of a finish reason that is not an answer's end.
pub fn failure(reason: &FinishReason) -> ApiError {
    match reason {
        FinishReason::QueueTimeout => ApiError::QueueTimeout,
        FinishReason::Deadline => ApiError::RequestTimeout,
        FinishReason::Aborted => ApiError::Aborted,
        FinishReason::Error(_) | FinishReason::Stop(_) | FinishReason::Length => ENGINE_FAULT,
    }
}

impl TextStream {
    pub fn new(stream: RequestStream, tokenizer: &Arc<Tokenizer>, num_samples: usize, options: &TextOptions) -> Self {
        let sample = || Sample {
            detokenizer: Detokenizer::continuing(Arc::clone(tokenizer), options.skip_special),
            stops: StopMatcher::new(options.stop.clone(), options.include_stop),
            num_tokens: 0,
            stop_logprobs: None,
            stopped: false,
            done: false,
        };
        let samples = (0..num_samples).map(|_| sample()).collect();
        Self { stream, samples, ready: VecDeque::new(), options: options.clone() }
    }

    /// The next piece, its answer counted from 0; none when every sample has ended.
    pub async fn next(&mut self) -> Option<Piece> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(piece);
            }
            if self.is_done() {
                return None;
            }
            let event = self.stream.next().await;
            self.take(event);
        }
    }

    pub fn is_done(&self) -> bool {
        self.ready.is_empty() && self.samples.iter().all(|sample| sample.done)
    }

    fn take(&mut self, event: Option<Event>) {
        match event {
            Some(Event::Token { sample, token, logprobs }) => self.token(sample, token, logprobs),
            Some(Event::Finished { sample, reason, usage }) => self.finished(sample, reason, usage),
            Some(Event::PromptLogprobs(all)) => {
                self.ready.push_back(Piece { prompt_logprobs: Some(all.into()), ..Piece::default() });
            }
            Some(Event::StopToken { sample, logprobs, .. }) => self.samples[sample].stop_logprobs = logprobs,
            // Only requests for embeddings have any, and they have no text.
            Some(Event::Embedding(_)) => {}
            None => self.lost(),
        }
    }

    fn token(&mut self, index: usize, token: u32, logprobs: Option<Logprobs>) {
        let sample = &mut self.samples[index];
        if sample.stopped {
            return;
        }
        sample.num_tokens += 1;
        let delta = sample.detokenizer.push(token);
        let text = if sample.num_tokens <= self.options.min_tokens {
            // Too early to end: a stop string may neither begin nor end in this.
            delta
        } else {
            let (text, stopped) = sample.stops.push(&delta);
            if stopped {
                sample.stopped = true;
                self.stream.abort(index);
            }
            text
        };
        let tokens = vec![AnswerToken { token, logprobs }];
        self.ready.push_back(Piece { choice: index, text, tokens, ..Piece::default() });
    }

    fn finished(&mut self, index: usize, reason: FinishReason, mut usage: Usage) {
        let sample = &mut self.samples[index];
        sample.done = true;
        let mut text = String::new();
        if sample.stopped {
            // The engine may have been a step ahead.
            usage.completion_tokens = sample.num_tokens;
        } else {
            let rest = sample.detokenizer.finish();
            (text, sample.stopped) = sample.stops.push(&rest);
        }
        if !sample.stopped {
            let (held, found) = sample.stops.finish();
            text.push_str(&held);
            sample.stopped = found;
        }
        let (mut fault, mut tokens) = (None, Vec::new());
        let finish = match reason {
            _ if sample.stopped => Finish::Stop(sample.stops.matched().map(|stop| StopCause::Text(stop.into()))),
            FinishReason::Stop(token) => {
                tokens.push(AnswerToken { token, logprobs: sample.stop_logprobs.take() });
                let is_named = self.options.stop_token_ids.contains(&token);
                Finish::Stop(is_named.then_some(StopCause::Token(token)))
            }
            FinishReason::Length => Finish::Length,
            reason => {
                let error = failure(&reason);
                if let FinishReason::Error(reason) = reason {
                    fault = Some(reason);
                }
                Finish::Failed(error)
            }
        };
        let finish = Some((finish, usage));
        self.ready.push_back(Piece { choice: index, text, tokens, finish, fault, ..Piece::default() });
    }

    /// The engine went away: every open sample ends with an error.
    fn lost(&mut self) {
        for (index, sample) in self.samples.iter_mut().enumerate().filter(|(_, sample)| !sample.done) {
            sample.done = true;
            let finish = Some((Finish::Failed(ApiError::Stopped), Usage::default()));
            self.ready.push_back(Piece { choice: index, finish, ..Piece::default() });
        }
    }
}
