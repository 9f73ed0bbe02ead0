//! One request: its contents, and the measured reading of its answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Map, Value, json};

use super::answer::{Answer, Outcome, message};
use super::client::{Client, Response};
use super::sse::SseParser;
use super::workload::{Alphabet, Ask, Rendered};

/// Most bytes of an error's text.
const MAX_ERROR_BYTES: usize = 64 << 10;
const MAX_ERROR_CHARS: usize = 300;

/// Data that all requests of a run share.
pub struct Asker {
    pub client: Arc<Client>,
    pub path: String,
    pub model: String,
    pub is_chat: bool,
    pub temperature: f64,
    pub ignore_eos: bool,
    pub alphabet: Alphabet,
    pub timeout: Duration,
    pub keeps_text: bool,
}

impl Asker {
    /// Sends the request and reads its answer. Any fault is part of the outcome.
    pub async fn ask(&self, ask: &Ask, began: Instant) -> Outcome {
        let body = self.body(ask);
        let sent = Instant::now();
        let answered = match tokio::time::timeout(self.timeout, self.exchange(ask, &body, sent)).await {
            Ok(answered) => answered,
            Err(_) => Err(anyhow::anyhow!("no end of the answer within {} s", self.timeout.as_secs_f64())),
        };
        let start = (sent - began).as_secs_f64();
        match answered {
            Ok(outcome) => Outcome { start, ..outcome },
            Err(error) => {
                Outcome { start, prompt_len: ask.prompt_len, error: Some(format!("{error:#}")), ..Outcome::default() }
            }
        }
    }

    async fn exchange(&self, ask: &Ask, body: &[u8], sent: Instant) -> Result<Outcome> {
        let mut response = self.client.send("POST", &self.path, body).await?;
        if response.status != 200 {
            bail!("{}", refusal(&mut response).await);
        }
        let mut answer = Answer::new(sent, self.keeps_text);
        let mut parser = SseParser::default();
        let mut piece = Vec::new();
        while response.read(&mut piece).await? {
            let now = Instant::now();
            parser.push(&piece, &mut |data| answer.event(data, now))?;
        }
        parser.finish(&mut |data| answer.event(data, Instant::now()))?;
        answer.finish(ask.prompt_len)
    }

    fn body(&self, ask: &Ask) -> Vec<u8> {
        let mut body = Map::new();
        body.insert("model".into(), json!(self.model));
        let prompt = ask.prompt.render(&self.alphabet);
        match (self.is_chat, prompt) {
            (true, Rendered::Text(text)) => {
                body.insert("messages".into(), json!([{"role": "user", "content": text}]));
                body.insert("max_completion_tokens".into(), json!(ask.output_len));
            }
            (false, Rendered::Text(text)) => {
                body.insert("prompt".into(), Value::String(text.into_owned()));
                body.insert("max_tokens".into(), json!(ask.output_len));
            }
            (is_chat, Rendered::Tokens(tokens)) => {
                assert!(!is_chat, "a chat has no token ids");
                body.insert("prompt".into(), json!(tokens));
                body.insert("max_tokens".into(), json!(ask.output_len));
            }
        }
        body.insert("temperature".into(), json!(self.temperature));
        body.insert("stream".into(), json!(true));
        body.insert("stream_options".into(), json!({"include_usage": true}));
        if self.ignore_eos {
            body.insert("ignore_eos".into(), json!(true));
        }
        Value::Object(body).to_string().into_bytes()
    }
}

/// The message of an answer other than 200.
async fn refusal(response: &mut Response) -> String {
    let status = format!("{} {}", response.status, response.reason);
    let body = response.whole(MAX_ERROR_BYTES).await.unwrap_or_default();
    let said = match serde_json::from_slice::<Value>(&body) {
        Ok(error) => message(&error),
        Err(_) => String::from_utf8_lossy(&body).into_owned(),
    };
    let said: String = said.trim().chars().take(MAX_ERROR_CHARS).collect();
    let parts: Vec<&str> = [status.trim(), said.as_str()].into_iter().filter(|part| !part.is_empty()).collect();
    parts.join(": ")
}
