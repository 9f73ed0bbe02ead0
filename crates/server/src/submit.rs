//! The one place where the server calls the engine: requests are built, checked and handed over
//! here.

use std::time::Instant;

use folio_engine::{EngineRequest, Pooling, RequestOptions, RequestStream, SubmitError, TimeLimit};

use crate::answers::Answers;
use crate::error::ApiError;
use crate::observe::{RequestRecord, RequestStart};
use crate::request::{Generate, invalid};
use crate::service::{Call, Service};
use crate::text_pool::{BadWords, Prepared};
use crate::text_stream::TextStream;

impl Service {
    /// Submits a request to the engine, all of its prompts or none.
    pub fn submit(
        &self,
        route: &'static str,
        call: &Call,
        prompts: &[Prepared],
        bad_words: BadWords,
        mut generate: Generate,
    ) -> Result<Answers, ApiError> {
        generate.params.bad_words = bad_words;
        let engine = &self.model.engine;
        let num_samples = generate.params.n;
        let options = self.options(call, &generate);
        let request = |prompt: &Prepared| {
            let request = engine.request(prompt.tokens.clone(), generate.params_of_a_prompt());
            request.and_then(|request| request.with_options(options.clone())).map_err(invalid)
        };
        self.check_prompt_logprobs(prompts, &generate)?;
        // All are checked before any is queued.
        let requests = prompts.iter().map(request).collect::<Result<Vec<_>, _>>()?;
        let submit = |request| {
            let stream = engine.submit(request).map_err(refused)?;
            Ok(TextStream::new(stream, &self.model.tokenizer, num_samples, &generate.text))
        };
        let streams = requests.into_iter().map(submit).collect::<Result<Vec<_>, ApiError>>()?;
        let mut record = self.record(route, call);
        prompts.iter().for_each(|p| record.submitted(p.tokens.len(), num_samples, generate.params.max_tokens));
        Ok(Answers::new(streams, num_samples, record))
    }

    /// Checked requests for embeddings, one an input; none of them is queued yet.
    pub fn embedding_requests(
        &self,
        call: &Call,
        inputs: &[Prepared],
        pooling: Pooling,
        generate: &Generate,
    ) -> Result<Vec<EngineRequest>, ApiError> {
        let options = self.options(call, generate);
        let request = |input: &Prepared| {
            let request = self.model.engine.embedding(input.tokens.clone(), pooling);
            request.and_then(|request| request.with_options(options.clone())).map_err(invalid)
        };
        inputs.iter().map(request).collect()
    }

    /// Submits one of [`Service::embedding_requests`].
    pub fn submit_embedding(&self, request: EngineRequest) -> Result<RequestStream, ApiError> {
        self.model.engine.submit(request).map_err(refused)
    }

    /// A request's priority, tenant, deadline and cache salt.
    fn options(&self, call: &Call, generate: &Generate) -> RequestOptions {
        let caller = &call.caller;
        RequestOptions {
            priority: caller.priority(generate.priority),
            tenant: caller.tenant,
            weight: caller.weight,
            deadline: self.deadline(call).map(|deadline| deadline.saturating_duration_since(Instant::now())),
            cache_salt: generate.cache_salt.as_deref().map_or(caller.cache_salt, |salt| caller.cache_salt_with(salt)),
        }
    }

    /// When a request must be over, whether or not its client reads; none without a limit on the
    /// whole request.
    pub fn deadline(&self, call: &Call) -> Option<Instant> {
        match self.timeouts.request {
            TimeLimit::InAll(limit) => Some(call.arrived + limit),
            TimeLimit::WithoutProgress(_) => None,
        }
    }

    pub fn record(&self, route: &'static str, call: &Call) -> RequestRecord {
        self.observer.begin(RequestStart {
            route,
            request_id: call.id.id.clone(),
            key_name: Some(call.caller.name.clone()),
            traceparent: call.traceparent.as_deref(),
            arrived: call.arrived,
        })
    }

    /// The log-probabilities of prompts are bounded over the whole request: they are written for
    /// every choice.
    fn check_prompt_logprobs(&self, prompts: &[Prepared], generate: &Generate) -> Result<(), ApiError> {
        let Some(top) = generate.params.prompt_logprobs else { return Ok(()) };
        let tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let values = tokens.saturating_mul(top as usize + 1).saturating_mul(generate.params.n);
        match self.bounds.limits.prompt_logprob_values {
            most if values > most => {
                let message =
                    format!("{values} log-probabilities of prompt tokens, but an answer may have at most {most}");
                Err(ApiError::invalid("prompt_logprobs", message))
            }
            _ => Ok(()),
        }
    }
}

fn refused(error: SubmitError) -> ApiError {
    match error {
        SubmitError::QueueFull { retry_after } => ApiError::Overloaded { retry_after },
        SubmitError::Draining => ApiError::Draining,
        SubmitError::Stopped => ApiError::Stopped,
    }
}
