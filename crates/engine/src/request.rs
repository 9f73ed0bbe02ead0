//! The one kind of request that the engine takes: made in one place, where everything is checked.

use std::{sync::Arc, time::Duration};

use crate::{EngineConfig, InvalidParam, InvalidRequest, SamplingParams};

/// A request that can run: nothing in it can fail later for being wrong.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    pub(crate) prompt: Vec<u32>,
    pub(crate) params: Arc<SamplingParams>,
    /// Most tokens the sequence may hold.
    pub(crate) max_len: usize,
    pub(crate) options: RequestOptions,
}

/// When a request runs, and what it shares; nothing here changes its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestOptions {
    /// Lower runs sooner.
    pub priority: i32,
    /// Whose share of the machine this uses.
    pub tenant: u64,
    /// The tenant's share against others'; the last request's word counts. At least 1.
    pub weight: u32,
    /// How long after it is submitted it must have ended; if it has not, it ends with
    /// [`crate::FinishReason::Deadline`].
    pub deadline: Option<Duration>,
    /// Requests of different salts never share what the prefix cache holds.
    pub cache_salt: u64,
}

impl Default for RequestOptions {
    fn default() -> Self {
        Self { priority: 0, tenant: 0, weight: 1, deadline: None, cache_salt: 0 }
    }
}

impl EngineRequest {
    /// The only constructor. The KV pools hold sequences of at most `pool_tokens`.
    pub(crate) fn new(
        prompt: Vec<u32>,
        params: SamplingParams,
        config: &EngineConfig,
        pool_tokens: usize,
    ) -> Result<EngineRequest, InvalidRequest> {
        let most = config.max_model_len - 1;
        if prompt.is_empty() {
            return Err(InvalidRequest::EmptyPrompt);
        }
        if prompt.len() > most {
            return Err(InvalidRequest::PromptTooLong { prompt: prompt.len(), most });
        }
        let logits_width = config.logits_width;
        if let Some(position) = prompt.iter().position(|&token| token as usize >= logits_width) {
            return Err(InvalidRequest::UnknownToken { token: prompt[position], position, logits_width });
        }
        params.validate(logits_width)?;
        if !params.leaves_a_choice(&config.eos, logits_width) {
            return Err(InvalidRequest::NothingToChoose);
        }
        if params.n > config.max_seqs {
            return Err(InvalidRequest::TooManySamples { n: params.n, most: config.max_seqs });
        }
        let max_len = prompt.len().saturating_add(params.max_tokens).min(config.max_model_len);
        if max_len > pool_tokens {
            return Err(InvalidRequest::NeverFits { max_len, most: pool_tokens });
        }
        Ok(Self { prompt, params: Arc::new(params), max_len, options: RequestOptions::default() })
    }

    /// The same request with wishes of its own.
    pub fn with_options(self, options: RequestOptions) -> Result<EngineRequest, InvalidRequest> {
        if options.weight == 0 {
            let (value, range) = (0.to_string(), "at least 1".to_owned());
            return Err(InvalidParam { field: "weight", value, range }.into());
        }
        Ok(Self { options, ..self })
    }
}
