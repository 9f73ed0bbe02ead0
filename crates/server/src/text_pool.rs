//! The pool of blocking text work: templates, tokenizers and the parsing of large bodies.
//!
//! Their running time depends on the client's text, so a few threads of the pool run them and
//! requests queue for a thread. A text that cannot fit the context is refused by its length in
//! bytes, before it is tokenized.

use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use folio_engine::TimeLimit;
use folio_text::{ChatRender, ChatTemplate, ControlTokens, Mark, Tokenizer};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
use crate::request::{Bounds, Conversation, Generate, Prompt};

/// Pieces of work that run at once; more would take cores from the model.
const THREADS: usize = 2;
const UNMARKABLE: &str = "contains the model's control tokens and every private-use character from U+E000 to U+F8FF, so that the \
    control tokens cannot be escaped";
const PANICKED: ApiError = ApiError::Failed("the prompt could not be prepared");

pub struct TextPool {
    encoder: Encoder,
    threads: Arc<Semaphore>,
    /// How long a request may wait for a thread.
    timeout: TimeLimit,
    waiting: Arc<AtomicUsize>,
    /// Pieces of work that have ended.
    done: Arc<AtomicUsize>,
}

/// Turns prompts and conversations into tokens. The pool's work shares it.
#[derive(Clone)]
struct Encoder {
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
    /// Control tokens that messages may not spell; none if they may spell all of them.
    control: Option<Arc<ControlTokens>>,
    max_model_len: usize,
    /// Bytes of the longest token.
    most_bytes: usize,
    /// Most tokens of a request's bad words together.
    bad_word_tokens: usize,
}

/// A prompt, ready for the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    pub tokens: Vec<u32>,
    /// The prompt as the client wrote it, if it is a string and no token was cut off.
    pub text: Option<String>,
}

/// Token sequences that an answer must not contain.
pub type BadWords = Vec<Vec<u32>>;

impl TextPool {
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        template: Option<Arc<ChatTemplate>>,
        bounds: &Bounds,
        timeout: TimeLimit,
    ) -> Self {
        let ids = 0..tokenizer.vocab_size() as u32;
        let most_bytes = ids.filter_map(|id| tokenizer.token_bytes(id)).map(<[u8]>::len).max().unwrap_or(1);
        let (max_model_len, bad_word_tokens) = (bounds.max_model_len, bounds.limits.bad_word_tokens);
        let control = (!bounds.limits.control_tokens_in_messages).then(|| Arc::new(tokenizer.control_tokens()));
        let encoder = Encoder { tokenizer, template, control, max_model_len, most_bytes, bad_word_tokens };
        Self {
            encoder,
            threads: Arc::new(Semaphore::new(THREADS)),
            timeout,
            waiting: Arc::default(),
            done: Arc::default(),
        }
    }

    /// Requests whose text work runs or is queued.
    pub fn num_waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Prompts as token ids, with the bad words of `generate`. `special`: whether strings begin
    /// with the beginning-of-sequence token.
    pub async fn texts(
        &self,
        prompts: Vec<Prompt>,
        special: bool,
        generate: &Generate,
    ) -> Result<(Vec<Prepared>, BadWords), ApiError> {
        let (words, keep) = (generate.bad_words.clone(), generate.keep_tokens);
        // Token ids alone are not worth a thread.
        let is_text = |prompt: &Prompt| matches!(prompt, Prompt::Text(_));
        let is_work = !words.is_empty() || prompts.iter().any(is_text);
        let work = move |encoder: &Encoder| {
            let prepared =
                prompts.into_iter().map(|prompt| encoder.text(prompt, special, keep)).collect::<Result<Vec<_>, _>>()?;
            Ok((prepared, encoder.bad_words(&words)?))
        };
        if is_work { self.run(work).await } else { work(&self.encoder) }
    }

    /// A conversation as the model's template renders it, with the bad words of `generate`.
    pub async fn chat(
        &self,
        conversation: Conversation,
        generate: &Generate,
    ) -> Result<(Prepared, BadWords), ApiError> {
        let (words, keep) = (generate.bad_words.clone(), generate.keep_tokens);
        self.run(move |encoder| Ok((encoder.chat(&conversation, keep)?, encoder.bad_words(&words)?))).await
    }

    /// A conversation's tokens alone, all of them.
    pub async fn count_chat(&self, conversation: Conversation) -> Result<Prepared, ApiError> {
        self.run(move |encoder| encoder.chat(&conversation, None)).await
    }

    pub async fn tokenize(&self, text: String, special: bool) -> Result<Vec<u32>, ApiError> {
        self.run(move |encoder| encoder.encode(&text, special, "prompt")).await
    }

    pub async fn detokenize(&self, tokens: Vec<u32>) -> Result<String, ApiError> {
        self.run(move |encoder| Ok(encoder.tokenizer.decode(&tokens, false))).await
    }

    /// Runs the parsing of a large body.
    pub async fn parse<T: Send + 'static>(
        &self,
        parse: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run(move |_| parse()).await
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Encoder) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let _counted = Counted::new(&self.waiting);
        let permit = self.thread().await?;
        let (encoder, count) = (self.encoder.clone(), Arc::clone(&self.done));
        let done = tokio::task::spawn_blocking(move || {
            // Held by the work, not by the request: a client that leaves frees no thread.
            let _permit = permit;
            let made = work(&encoder);
            count.fetch_add(1, Ordering::Relaxed);
            made
        });
        done.await.unwrap_or(Err(PANICKED))
    }

    /// Waits for a thread. The end of any other work restarts the timeout, unless it is one in all.
    async fn thread(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let mut permit = pin!(Arc::clone(&self.threads).acquire_owned());
        loop {
            let before = self.done.load(Ordering::Relaxed);
            match tokio::time::timeout(self.timeout.duration(), &mut permit).await {
                Ok(permit) => return permit.map_err(|_| ApiError::Stopped),
                Err(_) if self.done.load(Ordering::Relaxed) == before => return Err(ApiError::QueueTimeout),
                Err(_) if matches!(self.timeout, TimeLimit::InAll(_)) => return Err(ApiError::QueueTimeout),
                Err(_) => {}
            }
        }
    }
}

struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Encoder {
    fn text(&self, prompt: Prompt, special: bool, keep: Option<usize>) -> Result<Prepared, ApiError> {
        let (tokens, text) = match prompt {
            Prompt::Tokens(tokens) => (tokens, None),
            Prompt::Text(text) => (self.encode(&text, special, "prompt")?, Some(text)),
        };
        let text = text.filter(|_| keep.is_none_or(|keep| tokens.len() <= keep));
        Ok(Prepared { tokens: keep_last(tokens, keep), text })
    }

    fn chat(&self, conversation: &Conversation, keep: Option<usize>) -> Result<Prepared, ApiError> {
        let Some(template) = &self.template else {
            return Err(ApiError::invalid("messages", "this model has no chat template; use /v1/completions"));
        };
        let mut render = ChatRender {
            messages: conversation.messages.iter().map(|message| message.to_json()).collect(),
            add_generation_prompt: conversation.add_generation_prompt,
            extra: conversation.template_kwargs.clone(),
            now: Some(crate::now()),
            ..ChatRender::default()
        };
        let marked = self.control.as_ref().map_or(Ok(None), |control| control.mark(&mut render));
        let marked = marked.map_err(|_| ApiError::invalid("messages", UNMARKABLE))?;
        let end = conversation.continue_final_message.then(|| mark_end(&mut render.messages));
        let refused = |_| ApiError::invalid("messages", "the model's chat template refuses this conversation");
        let mut text = template.render(&render).map_err(refused)?;
        if let Some(end) = end {
            cut_at(&mut text, &end)?;
        }
        let tokens = keep_last(self.encode_chat(&text, marked)?, keep);
        Ok(Prepared { tokens, text: None })
    }

    fn encode(&self, text: &str, special: bool, field: &'static str) -> Result<Vec<u32>, ApiError> {
        self.check_length(text.len(), field)?;
        self.tokenizer.encode(text, special).map_err(|_| ApiError::invalid(field, "this text cannot be tokenized"))
    }

    /// The tokens of a rendered conversation, in which messages that spell control tokens are
    /// marked.
    fn encode_chat(&self, text: &str, marked: Option<Mark>) -> Result<Vec<u32>, ApiError> {
        let field = "messages";
        self.check_length(text.len() - marked.map_or(0, |mark| mark.bytes_in(text)), field)?;
        let tokens = self.tokenizer.encode_marked(text, marked);
        tokens.map_err(|_| ApiError::invalid(field, "this text cannot be tokenized"))
    }

    /// A text longer than a context full of the longest token cannot fit.
    fn check_length(&self, bytes: usize, field: &'static str) -> Result<(), ApiError> {
        let least_tokens = bytes / self.most_bytes.max(1);
        match self.max_model_len {
            most if least_tokens > most => Err(ApiError::ContextLength { field, tokens: least_tokens, most: most - 1 }),
            _ => Ok(()),
        }
    }

    /// Each word as it stands alone and as it follows a space, which are different tokens as a
    /// rule.
    fn bad_words(&self, words: &[String]) -> Result<BadWords, ApiError> {
        let mut sequences = BadWords::new();
        let mut num_tokens = 0;
        for word in words {
            for text in [word.clone(), format!(" {}", word.trim_start())] {
                let tokens = self.encode(&text, false, "bad_words")?;
                // Both forms count, so a word may have half of it.
                num_tokens += tokens.len();
                if num_tokens > 2 * self.bad_word_tokens {
                    let message = format!("must have at most {} tokens together", self.bad_word_tokens);
                    return Err(ApiError::invalid("bad_words", message));
                }
                if !tokens.is_empty() && !sequences.contains(&tokens) {
                    sequences.push(tokens);
                }
            }
        }
        Ok(sequences)
    }
}

fn keep_last(mut tokens: Vec<u32>, keep: Option<usize>) -> Vec<u32> {
    if let Some(keep) = keep {
        tokens.drain(..tokens.len().saturating_sub(keep));
    }
    tokens
}

/// Marks the end of the last message with a random string. The template's text behind the mark is
/// cut off; it may contain a message's own words, so it cannot be found by comparison.
fn mark_end(messages: &mut [Value]) -> String {
    let mark = format!("FOLIO{:016X}END", RandomState::new().hash_one(0u8));
    if let Some(Value::String(content)) = messages.last_mut().and_then(|message| message.get_mut("content")) {
        content.push_str(&mark);
    }
    mark
}

fn cut_at(text: &mut String, mark: &str) -> Result<(), ApiError> {
    match text.find(mark) {
        Some(end) => {
            text.truncate(end);
            Ok(())
        }
        None => Err(ApiError::invalid("continue_final_message", "the model's chat template changes the last message")),
    }
}
