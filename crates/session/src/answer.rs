//! Prompts to tokens, tokens to answers, and embeddings: what every program around a session needs.
//!
//! A program that wants more than one answer at a time, or events of its own, talks to
//! [`Session::engine`].

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use folio_engine::{Event, FinishReason, Pooling, RequestStream, SamplingParams};
use folio_text::{ChatRender, Detokenizer, Tokenizer, WallTime};
use serde_json::{Value, json};

use crate::session::Session;

impl Session {
    /// The answer to a prompt, with the model's own sampling defaults.
    ///
    /// ```
    /// use folio_session::{Options, Session};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// let session = Session::open(None, &Options::default())?;
    /// let answer = session.answer("What does `Rc::clone` do?")?;
    /// assert!(!answer.is_empty());
    /// # Ok(())
    /// # }
    /// ```
    pub fn answer(&self, prompt: &str) -> Result<String> {
        self.stream(prompt)?.collect()
    }

    /// The answer to a prompt, piece by piece as it is generated. Dropping it ends the answer.
    pub fn stream(&self, prompt: &str) -> Result<Answer> {
        let tokens = self.chat_tokens(&[json!({"role": "user", "content": prompt})])?;
        let params = self.params(tokens.len());
        self.generate(tokens, params)
    }

    /// The continuation of a sequence of tokens.
    pub fn generate(&self, tokens: Vec<u32>, params: SamplingParams) -> Result<Answer> {
        let tokenizer = Arc::clone(self.tokenizer()?);
        let request = self.engine.request(tokens, SamplingParams { n: 1, ..params })?;
        let stream = self.engine.submit(request)?;
        Ok(Answer { stream, detokenizer: Detokenizer::continuing(tokenizer, true), has_ended: false })
    }

    /// The model's sampling defaults for a prompt of so many tokens. The seed is fixed, so that an
    /// answer can be repeated.
    pub fn params(&self, prompt_tokens: usize) -> SamplingParams {
        let defaults = &self.assets.defaults;
        let room = self.plan.max_model_len.saturating_sub(prompt_tokens);
        SamplingParams { max_tokens: defaults.max_tokens(None, room).min(room), ..defaults.params() }
    }

    /// Tokens of a conversation in the form of the chat template, with the beginning of an answer.
    /// A message is an object with `role` and `content`. A model without a template gets the last
    /// message as plain text.
    pub fn chat_tokens(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let Some(template) = &self.assets.template else {
            let last = messages.last().and_then(|message| message["content"].as_str());
            return self.text_tokens(last.context("the last message has no text")?);
        };
        let tokenizer = self.tokenizer()?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut render = ChatRender {
            messages: messages.to_vec(),
            add_generation_prompt: true,
            now: Some(WallTime::from_unix(since.as_secs() as i64, 0)),
            ..ChatRender::default()
        };
        // Control tokens in pasted text stay text, so that they cannot end a turn.
        let mark = tokenizer.control_tokens().mark(&mut render)?;
        Ok(tokenizer.encode_marked(&template.render(&render)?, mark)?)
    }

    /// Tokens of a text, without a chat template.
    pub fn text_tokens(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer()?.encode(text, true)?)
    }

    /// The embedding of a text: the model's last hidden states as one vector.
    pub fn embed(&self, text: &str, pooling: Pooling) -> Result<Vec<f32>> {
        let request = self.engine.embedding(self.text_tokens(text)?, pooling)?;
        let mut stream = self.engine.submit(request)?;
        while let Some(event) = stream.recv() {
            match event {
                Event::Embedding(vector) => return Ok(vector),
                Event::Finished { reason, .. } => bail!("the engine gave no embedding: {reason:?}"),
                _ => {}
            }
        }
        bail!("the engine has stopped")
    }

    fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        let tokenizer = self.assets.tokenizer.as_ref();
        tokenizer.with_context(|| format!("{} has no tokenizer", self.assets.name))
    }
}

/// An answer in pieces of text.
pub struct Answer {
    stream: RequestStream,
    detokenizer: Detokenizer,
    has_ended: bool,
}

impl Iterator for Answer {
    type Item = Result<String>;

    /// Waits for the next piece.
    fn next(&mut self) -> Option<Result<String>> {
        while !self.has_ended {
            let text = match self.stream.recv() {
                Some(Event::Token { token, .. }) => self.detokenizer.push(token),
                Some(Event::Finished { reason: FinishReason::Stop(_) | FinishReason::Length, .. }) => {
                    self.has_ended = true;
                    self.detokenizer.finish()
                }
                Some(Event::Finished { reason, .. }) => {
                    self.has_ended = true;
                    return Some(Err(anyhow::anyhow!("the answer could not be completed: {reason:?}")));
                }
                Some(_) => continue,
                None => {
                    self.has_ended = true;
                    return Some(Err(anyhow::anyhow!("the engine has stopped")));
                }
            };
            if !text.is_empty() {
                return Some(Ok(text));
            }
        }
        None
    }
}
