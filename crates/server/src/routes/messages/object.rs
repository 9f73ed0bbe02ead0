//! Messages as Anthropic's clients read them.

use serde::Serialize;

use crate::service::{Call, Service};
use crate::text_stream::{Finish, StopCause};

/// The fields that stay the same from an answer's beginning to its end.
pub struct Envelope {
    id: String,
    service: Service,
}

impl Envelope {
    pub fn new(service: &Service, call: &Call) -> Self {
        Self { id: format!("msg_{}", call.id.id), service: service.clone() }
    }

    pub fn whole<'a>(&'a self, text: &'a str, finish: Option<&'a Finish>, usage: Usage) -> Message<'a> {
        self.message(vec![TextBlock::new(text)], stop(finish), usage)
    }

    /// Before anything is answered.
    pub fn begun(&self, num_input_tokens: usize) -> Message<'_> {
        self.message(Vec::new(), Stop::default(), Usage::new(num_input_tokens, &folio_engine::Usage::default()))
    }

    fn message<'a>(&'a self, content: Vec<TextBlock<'a>>, stop: Stop<'a>, usage: Usage) -> Message<'a> {
        let model = self.service.model_name();
        Message { id: &self.id, kind: "message", role: "assistant", model, content, stop, usage }
    }
}

#[derive(Serialize)]
pub struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<TextBlock<'a>>,
    #[serde(flatten)]
    stop: Stop<'a>,
    usage: Usage,
}

#[derive(Serialize)]
pub struct TextBlock<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
}

impl<'a> TextBlock<'a> {
    pub fn new(text: &'a str) -> Self {
        Self { kind: "text", text }
    }
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stop<'a> {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
}

/// Only a text of the client's is a stop sequence; a token that ends an answer is the model's own
/// word.
pub fn stop(finish: Option<&Finish>) -> Stop<'_> {
    let (reason, sequence) = match finish {
        Some(Finish::Stop(Some(StopCause::Text(text)))) => ("stop_sequence", Some(text.as_str())),
        Some(Finish::Stop(_)) => ("end_turn", None),
        Some(Finish::Length) => ("max_tokens", None),
        Some(Finish::Failed(_)) | None => return Stop::default(),
    };
    Stop { stop_reason: Some(reason), stop_sequence: sequence }
}

/// The prompt's tokens are those that were computed and those that were read from the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    input_tokens: usize,
    /// Writes to the cache are not counted separately.
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
}

impl Usage {
    pub fn new(num_input_tokens: usize, used: &folio_engine::Usage) -> Self {
        Self {
            input_tokens: num_input_tokens.saturating_sub(used.cached_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: used.cached_tokens,
            output_tokens: used.completion_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ApiError;

    #[test]
    fn stop_reasons_are_anthropics() {
        let reason = |finish: Finish| {
            let Stop { stop_reason, stop_sequence } = stop(Some(&finish));
            (stop_reason, stop_sequence.map(str::to_owned))
        };
        assert_eq!(reason(Finish::Stop(Some(StopCause::Token(7)))), (Some("end_turn"), None));
        assert_eq!(reason(Finish::Stop(None)), (Some("end_turn"), None));
        let text = Finish::Stop(Some(StopCause::Text("END".into())));
        assert_eq!(reason(text), (Some("stop_sequence"), Some("END".into())));
        assert_eq!(reason(Finish::Length), (Some("max_tokens"), None));
        assert_eq!(reason(Finish::Failed(ApiError::Aborted)), (None, None));
    }

    #[test]
    fn cached_tokens_are_counted_apart() {
        let used = folio_engine::Usage { cached_tokens: 16, completion_tokens: 3, ..Default::default() };
        let usage = Usage::new(20, &used);
        assert_eq!((usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens), (4, 16, 3));
    }
}
