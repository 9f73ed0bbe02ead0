//! The one kind of request that the engine takes: made in one place, where everything is checked.

use std::sync::Arc;

use crate::{EngineConfig, InvalidRequest, SamplingParams};

/// A request that can run: nothing in it can fail later for being wrong.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    pub(crate) prompt: Vec<u32>,
    pub(crate) params: Arc<SamplingParams>,
    /// Most tokens the sequence may hold.
    pub(crate) max_len: usize,
}

impl EngineRequest {
    /// The only constructor.
    pub(crate) fn new(
        prompt: Vec<u32>,
        params: SamplingParams,
        config: &EngineConfig,
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
        if max_len > config.pool_tokens() {
            return Err(InvalidRequest::NeverFits { max_len, most: config.pool_tokens() });
        }
        Ok(Self { prompt, params: Arc::new(params), max_len })
    }
}
