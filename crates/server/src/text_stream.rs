//! From the engine's tokens to text that can be shown: whole characters, cut at stop strings.

use std::collections::VecDeque;
use std::sync::Arc;

use folio_engine::{Event, FinishReason, Logprobs, RequestStream, Usage};
use folio_text::{Detokenizer, StopMatcher, Tokenizer};

/// One request's answer as text, all its samples interleaved as they come.
pub struct TextStream {
    stream: RequestStream,
    samples: Vec<Sample>,
    ready: VecDeque<Piece>,
}

struct Sample {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    num_tokens: usize,
    /// A stop string has come: nothing more is shown, and the engine's last word on the sample is awaited.
    stopped: bool,
    done: bool,
}

/// A bit of one sample: new text (perhaps none yet), the tokens it came from, and how it ended if it did.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    pub sample: usize,
    pub text: String,
    pub tokens: Vec<AnswerToken>,
    pub finish: Option<(Finish, Usage)>,
}

#[derive(Clone, Debug)]
pub struct AnswerToken {
    pub token: u32,
    pub logprobs: Option<Logprobs>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    Stop,
    Length,
    Failed(String),
}

impl TextStream {
    pub fn new(
        stream: RequestStream,
        tokenizer: &Arc<Tokenizer>,
        num_samples: usize,
        stop: &[String],
        include_stop: bool,
        skip_special: bool,
    ) -> Self {
        let sample = || Sample {
            detokenizer: Detokenizer::continuing(Arc::clone(tokenizer), skip_special),
            stops: StopMatcher::new(stop.to_vec(), include_stop),
            num_tokens: 0,
            stopped: false,
            done: false,
        };
        Self { stream, samples: (0..num_samples).map(|_| sample()).collect(), ready: VecDeque::new() }
    }

    /// The next piece; none when every sample has ended.
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

    fn is_done(&self) -> bool {
        self.samples.iter().all(|sample| sample.done)
    }

    fn take(&mut self, event: Option<Event>) {
        match event {
            Some(Event::Token { sample, token, logprobs }) => self.token(sample, token, logprobs),
            Some(Event::Finished { sample, reason, usage }) => self.finished(sample, reason, usage),
            Some(Event::PromptLogprobs(_)) => {}
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
        let (text, stopped) = sample.stops.push(&delta);
        if stopped {
            sample.stopped = true;
            self.stream.abort(index);
        }
        let tokens = vec![AnswerToken { token, logprobs }];
        self.ready.push_back(Piece { sample: index, text, tokens, finish: None });
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
        let finish = match reason {
            _ if sample.stopped => Finish::Stop,
            FinishReason::Stop(_) => Finish::Stop,
            FinishReason::Length => Finish::Length,
            FinishReason::Error(message) => Finish::Failed(message),
            FinishReason::Deadline => Finish::Failed("the request's deadline has passed".into()),
            FinishReason::Aborted => Finish::Failed("the request was aborted".into()),
        };
        self.ready.push_back(Piece { sample: index, text, tokens: Vec::new(), finish: Some((finish, usage)) });
    }

    /// The engine went away: every open sample ends with an error.
    fn lost(&mut self) {
        for (index, sample) in self.samples.iter_mut().enumerate().filter(|(_, sample)| !sample.done) {
            sample.done = true;
            let finish = Some((Finish::Failed("the engine has stopped".into()), Usage::default()));
            self.ready.push_back(Piece { sample: index, finish, ..Piece::default() });
        }
    }
}
