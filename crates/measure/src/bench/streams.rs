//! Streams as a client sees them: prompts, and when each token arrived.
//!
//! All streams are read on one thread, as the server reads them, so that readers do not crowd out
//! the threads that compute.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use folio_engine::{Event, FinishReason, RequestOptions, RequestStream, SamplingParams, Usage};
use folio_session::Session;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// One request to measure.
pub struct Ask {
    pub prompt: Vec<u32>,
    pub params: SamplingParams,
    pub options: RequestOptions,
}

impl Ask {
    pub fn new(prompt: Vec<u32>, output_len: usize) -> Self {
        let params =
            SamplingParams { temperature: 0.0, max_tokens: output_len, ignore_eos: true, ..SamplingParams::default() };
        Self { prompt, params, options: RequestOptions::default() }
    }

    pub fn submit(self, session: &Session) -> Result<RequestStream> {
        let request = session.engine.request(self.prompt, self.params)?.with_options(self.options)?;
        Ok(session.engine.submit(request)?)
    }
}

/// A stream that has ended.
pub struct Answer {
    pub submitted: Instant,
    /// When each token arrived.
    pub times: Vec<Instant>,
    pub tokens: Vec<u32>,
    pub usage: Usage,
}

impl Answer {
    pub fn first_token(&self) -> Option<Duration> {
        self.times.first().map(|&first| first - self.submitted)
    }
}

/// One thread that reads streams.
pub fn reader() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().build()?)
}

/// Submits all of them at once and reads them to their ends, in the order of `asks`.
pub fn together(session: &Session, asks: Vec<Ask>) -> Result<Vec<Answer>> {
    let mut answers: Vec<(usize, Answer)> = reader()?.block_on(async {
        let mut tasks = JoinSet::new();
        for (number, ask) in asks.into_iter().enumerate() {
            let submitted = Instant::now();
            let stream = ask.submit(session)?;
            tasks.spawn(async move { Ok::<_, anyhow::Error>((number, read(stream, submitted).await?)) });
        }
        tasks.join_all().await.into_iter().collect::<Result<_>>()
    })?;
    answers.sort_by_key(|(number, _)| *number);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

async fn read(mut stream: RequestStream, submitted: Instant) -> Result<Answer> {
    let mut answer = Answer { submitted, times: Vec::new(), tokens: Vec::new(), usage: Usage::default() };
    while let Some(event) = stream.next().await {
        match event {
            Event::Token { token, .. } => {
                answer.times.push(Instant::now());
                answer.tokens.push(token);
            }
            Event::Finished { reason: FinishReason::Length, usage, .. } => answer.usage = usage,
            Event::Finished { reason: FinishReason::Error(message), .. } => bail!("{message}"),
            Event::Finished { reason, .. } => bail!("a stream ended early: {reason:?}"),
            Event::PromptLogprobs(_) | Event::StopToken { .. } | Event::Embedding(_) => {}
        }
    }
    Ok(answer)
}

/// News of a stream that may be cut short: a token's arrival, or its end.
pub type Note = Option<Instant>;

/// Tells all of a stream, under its number, until it ends. When this is dropped so is the stream,
/// which aborts it.
pub async fn note(mut stream: RequestStream, number: usize, notes: mpsc::UnboundedSender<(usize, Result<Note>)>) {
    while let Some(event) = stream.next().await {
        let note = match event {
            Event::Token { .. } => Ok(Some(Instant::now())),
            Event::Finished { reason: FinishReason::Error(message), .. } => Err(anyhow::anyhow!(message)),
            Event::Finished { .. } => Ok(None),
            Event::PromptLogprobs(_) | Event::StopToken { .. } | Event::Embedding(_) => continue,
        };
        // The receiver is gone when something else went wrong.
        let _ = notes.send((number, note));
    }
}

/// Tokens without a pattern, different for every number.
pub fn prompt(vocab: usize, len: usize, number: usize) -> Vec<u32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64 ^ ((number as u64 + 1) << 32);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as u32 % vocab as u32
    };
    (0..len).map(|_| next()).collect()
}

pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_differ() {
        assert_ne!(prompt(100, 32, 0), prompt(100, 32, 1));
        assert_eq!(prompt(100, 32, 3), prompt(100, 32, 3));
        assert!(prompt(7, 1000, 0).iter().all(|&token| token < 7));
    }
}
