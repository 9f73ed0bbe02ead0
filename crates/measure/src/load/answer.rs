//! One answer, as its stream shows it: the times of its tokens, their number, and their text.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// Result of one request. Times are in seconds.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// From the start of the run until the request was sent.
    pub start: f64,
    pub prompt_len: usize,
    pub output_len: usize,
    /// From sending until the first token.
    pub ttft: f64,
    /// From each chunk to the next.
    pub itls: Vec<f64>,
    /// From sending until the last token.
    pub latency: f64,
    /// The answer's text, if it is stored.
    pub text: String,
    /// None if the request was answered.
    pub error: Option<String>,
}

impl Outcome {
    pub fn is_success(&self) -> bool {
        self.error.is_none()
    }

    /// Time per token after the first; none without further tokens.
    pub fn tpot(&self) -> Option<f64> {
        (self.output_len > 1).then(|| (self.latency - self.ttft) / (self.output_len - 1) as f64)
    }
}

/// An answer that is being received.
pub struct Answer {
    sent: Instant,
    last_chunk: Option<Instant>,
    ttft: f64,
    itls: Vec<f64>,
    usage: Usage,
    keeps_text: bool,
    text: String,
}

#[derive(Deserialize)]
struct Chunk {
    choices: Option<Vec<Choice>>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Delta {
    role: Option<IgnoredAny>,
    content: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<IgnoredAny>,
}

#[derive(Clone, Copy, Default, Deserialize)]
struct Usage {
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
}

impl Choice {
    /// A chat opens with a chunk that names the role before anything is computed; it counts as no
    /// token. Every other chunk counts, even an empty one: its token is hidden, or its text is not
    /// complete yet.
    fn is_opening(&self) -> bool {
        let silent = |text: &Option<String>| text.as_ref().is_none_or(String::is_empty);
        self.finish_reason.is_none()
            && self.delta.as_ref().is_some_and(|delta| {
                delta.role.is_some()
                    && delta.tool_calls.is_none()
                    && [&delta.content, &delta.reasoning_content, &delta.reasoning].into_iter().all(silent)
            })
    }
}

impl Answer {
    pub fn new(sent: Instant, keeps_text: bool) -> Self {
        Self {
            sent,
            last_chunk: None,
            ttft: 0.0,
            itls: Vec::new(),
            usage: Usage::default(),
            keeps_text,
            text: String::new(),
        }
    }

    /// Takes the data of one event, received at `now`.
    pub fn event(&mut self, data: &[u8], now: Instant) -> Result<()> {
        if data.trim_ascii() == b"[DONE]" {
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(data).with_context(|| {
            let start: String = String::from_utf8_lossy(data).chars().take(80).collect();
            format!("expected a chunk of an answer, found `{start}`")
        })?;
        if let Some(error) = chunk.error {
            bail!("the answer broke off: {}", message(&error));
        }
        if let Some(usage) = chunk.usage {
            self.usage = usage;
        }
        let Some(choice) = chunk.choices.and_then(|choices| choices.into_iter().next()) else { return Ok(()) };
        if choice.is_opening() {
            return Ok(());
        }
        match self.last_chunk.replace(now) {
            None => self.ttft = (now - self.sent).as_secs_f64(),
            Some(before) => self.itls.push((now - before).as_secs_f64()),
        }
        if self.keeps_text {
            let delta = choice.delta.and_then(|delta| delta.content);
            self.text.push_str(choice.text.or(delta).as_deref().unwrap_or_default());
        }
        Ok(())
    }

    /// The outcome; `prompt_len` is for servers that do not report how many tokens they read.
    pub fn finish(self, prompt_len: usize) -> Result<Outcome> {
        let Some(last) = self.last_chunk else { bail!("the answer ended without a token") };
        Ok(Outcome {
            start: 0.0,
            prompt_len: self.usage.prompt_tokens.unwrap_or(prompt_len),
            output_len: self.usage.completion_tokens.filter(|&count| count > 0).unwrap_or(self.itls.len() + 1),
            ttft: self.ttft,
            itls: self.itls,
            latency: (last - self.sent).as_secs_f64(),
            text: self.text,
            error: None,
        })
    }
}

/// The message of an error object of any shape.
pub fn message(error: &Value) -> String {
    let message = error.get("message").or(error.get("error").and_then(|error| error.get("message")));
    match message.unwrap_or(error) {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn read(events: &[(u64, &str)]) -> Result<Outcome> {
        let sent = Instant::now();
        let mut answer = Answer::new(sent, true);
        for (at, data) in events {
            answer.event(data.as_bytes(), sent + Duration::from_millis(*at))?;
        }
        answer.finish(7)
    }

    fn milliseconds(times: &[f64]) -> Vec<u64> {
        times.iter().map(|time| (time * 1e3).round() as u64).collect()
    }

    #[test]
    fn a_completion() {
        let outcome = read(&[
            (10, r#"{"choices":[{"index":0,"text":"a","finish_reason":null}],"usage":null}"#),
            (14, r#"{"choices":[{"text":"","finish_reason":null}]}"#),
            (20, r#"{"choices":[{"text":"\u00e9","finish_reason":"length"}]}"#),
            (25, r#"{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4,"total_tokens":9}}"#),
            (26, "[DONE]"),
        ])
        .expect("an answer");
        assert_eq!((outcome.prompt_len, outcome.output_len, outcome.text.as_str()), (5, 4, "aé"));
        assert_eq!(milliseconds(&outcome.itls), [4, 6]);
        assert_eq!(milliseconds(&[outcome.ttft, outcome.latency]), [10, 20]);
        assert!((outcome.tpot().expect("four tokens") - 0.01 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_chat_opens_without_a_token() {
        let outcome = read(&[
            (1, r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#),
            (9, r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#),
            (12, r#"{"choices":[{"delta":{"content":"yes"}}]}"#),
            (13, r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#),
        ])
        .expect("an answer");
        assert_eq!((outcome.prompt_len, outcome.output_len, outcome.text.as_str()), (7, 3, "yes"));
        assert_eq!(milliseconds(&[outcome.ttft, outcome.latency]), [9, 13]);
    }

    #[test]
    fn answers_that_fail() {
        let check = |events: &[(u64, &str)], expect: &str| {
            let error = read(events).expect_err(expect).to_string();
            assert!(error.contains(expect), "{error}");
        };
        check(&[], "without a token");
        check(&[(1, "[DONE]")], "without a token");
        check(&[(1, r#"{"choices":[{"text":"a"}]}"#), (2, r#"{"error":{"message":"no room"}}"#)], "no room");
        check(&[(1, r#"{"error":"no room"}"#)], "no room");
        check(&[(1, "<html>")], "found `<html>`");
    }
}
