//! Configuration of the server: limits on requests, timeouts.

use std::time::Duration;

use folio_engine::TimeLimit;

/// Most of everything that a client can choose. A request beyond one of them is refused before it
/// costs anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    pub body_bytes: usize,
    /// Bytes of all bodies together, with the values read from them.
    pub body_memory: usize,
    /// Brackets within brackets of a JSON body.
    pub json_depth: usize,
    /// Values of a JSON body, those within others counted.
    pub json_values: usize,
    pub header_bytes: usize,
    pub header_fields: usize,
    /// Most prompts of one request.
    pub prompts: usize,
    /// Inputs of one request for embeddings.
    pub embedding_inputs: usize,
    /// Answers to one prompt: `n`.
    pub samples: usize,
    pub stops: usize,
    /// Characters of one stop string or bad word.
    pub stop_chars: usize,
    pub stop_token_ids: usize,
    pub bad_words: usize,
    /// Tokens of all bad words together.
    pub bad_word_tokens: usize,
    pub logit_biases: usize,
    pub logprobs: u32,
    /// Log-probabilities of prompt tokens in one answer, all choices together.
    pub prompt_logprob_values: usize,
    pub messages: usize,
    /// Whether messages that spell the model's control tokens become them; otherwise they are text.
    pub control_tokens_in_messages: bool,
    /// Most entries of `chat_template_kwargs`.
    pub template_kwargs: usize,
    /// Bytes of all of them together.
    pub template_kwarg_bytes: usize,
    /// Open connections; more wait to be accepted.
    pub connections: usize,
    /// POST requests under way, all keys together.
    pub in_flight: usize,
    /// Most requests in flight of one key, unless its own line says otherwise.
    pub in_flight_per_key: usize,
    /// Events of one answer written ahead of its reader, in bytes.
    pub stream_bytes: usize,
    pub request_id_bytes: usize,
    pub cache_salt_bytes: usize,
    pub user_chars: usize,
    /// Most responses stored for `previous_response_id`.
    pub stored_responses: usize,
    /// ... and their bytes together.
    pub stored_response_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 4 << 20,
            body_memory: 128 << 20,
            json_depth: 64,
            json_values: 1 << 19,
            header_bytes: 32 << 10,
            header_fields: 64,
            prompts: 64,
            embedding_inputs: 2048,
            samples: 16,
            stops: 4,
            stop_chars: 256,
            stop_token_ids: 64,
            bad_words: 128,
            bad_word_tokens: 1024,
            logit_biases: 1024,
            logprobs: 20,
            prompt_logprob_values: 1 << 18,
            messages: 2048,
            control_tokens_in_messages: false,
            template_kwargs: 16,
            template_kwarg_bytes: 4096,
            connections: 1024,
            in_flight: 256,
            in_flight_per_key: 256,
            stream_bytes: 256 << 10,
            request_id_bytes: 128,
            cache_salt_bytes: 64,
            user_chars: 512,
            stored_responses: 1024,
            stored_response_bytes: 64 << 20,
        }
    }
}

/// How long things may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Time from a connection's opening, or a request's first byte, to the end of its header.
    pub header: Duration,
    /// Time from the end of a request's header to the end of its body.
    pub body: Duration,
    /// Time of a request in the engine's queue, before its first step.
    pub queue: TimeLimit,
    /// A client that takes nothing of its answer is given up.
    pub write_stall: Duration,
    /// A request, from its arrival to its last byte.
    pub request: TimeLimit,
    /// A connection without a request.
    pub idle: Duration,
    /// Time for requests in flight to finish when the server is shut down.
    pub drain: Duration,
    /// Time without progress after which an engine with work counts as stuck.
    pub stuck: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            header: seconds(10),
            body: seconds(30),
            queue: TimeLimit::WithoutProgress(seconds(60)),
            write_stall: seconds(30),
            request: TimeLimit::WithoutProgress(seconds(600)),
            idle: seconds(75),
            drain: seconds(30),
            stuck: seconds(30),
        }
    }
}
