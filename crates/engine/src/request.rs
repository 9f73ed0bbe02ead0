//! Requests: made in one place, which checks everything.

use std::{sync::Arc, time::Duration};

use crate::{EngineConfig, InvalidParam, InvalidRequest, Pooling, SamplingParams};

/// A checked request: no value in it can fail later.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    pub(crate) prompt: Vec<u32>,
    pub(crate) params: Arc<SamplingParams>,
    /// Most tokens of the sequence.
    pub(crate) max_len: usize,
    /// Set if the request is for an embedding.
    pub(crate) pooling: Option<Pooling>,
    pub(crate) options: RequestOptions,
}

/// Scheduling of a request and what it shares; nothing here changes its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestOptions {
    /// Lower runs sooner.
    pub priority: i32,
    /// The owner of the share of the machine that the request uses.
    pub tenant: u64,
    /// The tenant's share relative to others; the newest request's value counts. At least 1.
    pub weight: u32,
    /// Time from submission after which the request ends with [`crate::FinishReason::Deadline`].
    pub deadline: Option<Duration>,
    /// Requests of different salts share neither the prefix cache nor the data that drafts are made
    /// from.
    pub cache_salt: u64,
}

impl Default for RequestOptions {
    fn default() -> Self {
        Self { priority: 0, tenant: 0, weight: 1, deadline: None, cache_salt: 0 }
    }
}

impl EngineRequest {
    /// The constructor of requests for answers. The KV pools hold sequences of at most
    /// `pool_tokens`.
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
        check_tokens(&prompt, config)?;
        let logits_width = config.logits_width;
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
        Ok(Self { prompt, params: Arc::new(params), max_len, pooling: None, options: RequestOptions::default() })
    }

    /// The constructor of requests for embeddings: the prompt may be as long as the model allows.
    pub(crate) fn embedding(
        prompt: Vec<u32>,
        pooling: Pooling,
        config: &EngineConfig,
        pool_tokens: usize,
    ) -> Result<EngineRequest, InvalidRequest> {
        if config.embedding_width == 0 {
            return Err(InvalidRequest::NoEmbeddings);
        }
        if prompt.is_empty() {
            return Err(InvalidRequest::EmptyPrompt);
        }
        // The scheduler counts a token after the prompt, which is never computed.
        let (max_len, most) = (prompt.len() + 1, config.max_model_len.min(pool_tokens.saturating_sub(1)));
        if prompt.len() > most {
            return Err(InvalidRequest::InputTooLong { input: prompt.len(), most });
        }
        check_tokens(&prompt, config)?;
        let (params, options) = (Arc::new(SamplingParams::default()), RequestOptions::default());
        Ok(Self { prompt, params, max_len, pooling: Some(pooling), options })
    }

    /// The same request with other options.
    pub fn with_options(self, options: RequestOptions) -> Result<EngineRequest, InvalidRequest> {
        if options.weight == 0 {
            let (value, range) = (0.to_string(), "at least 1".to_owned());
            return Err(InvalidParam { field: "weight", value, range }.into());
        }
        Ok(Self { options, ..self })
    }
}

fn check_tokens(prompt: &[u32], config: &EngineConfig) -> Result<(), InvalidRequest> {
    let logits_width = config.logits_width;
    match prompt.iter().position(|&token| token as usize >= logits_width) {
        Some(position) => Err(InvalidRequest::UnknownToken { token: prompt[position], position, logits_width }),
        None => Ok(()),
    }
}
