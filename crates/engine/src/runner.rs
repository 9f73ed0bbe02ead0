//! The executor for one decoder on one device.

use std::collections::HashMap;

use folio_model::{
    Decoder,
    device::{Backend, Batch},
};
use folio_scheduler::{RequestId, StepPlan};

use crate::{
    Error, Executor, Result, RowOutput,
    inputs::{OutputRows, gather},
    sampling::SamplingState,
};

/// Turns plans into forward passes and logits into tokens. What belongs to a request (its sampling state) outlives
/// steps; everything else is made anew from each plan.
pub struct Runner<B: Backend> {
    decoder: Decoder<B>,
    states: HashMap<RequestId, SamplingState>,
    batch: Batch,
    /// Of the step under way, in the order of its plan.
    outputs: Vec<OutputRows>,
    logits: Vec<f32>,
    is_in_flight: bool,
}

impl<B: Backend> Runner<B> {
    pub fn new(decoder: Decoder<B>) -> Self {
        Self {
            decoder,
            states: HashMap::new(),
            batch: Batch::default(),
            outputs: Vec::new(),
            logits: Vec::new(),
            is_in_flight: false,
        }
    }

    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    fn sample(&mut self, rows: &OutputRows) -> Result<RowOutput> {
        let id = rows.id;
        let width = self.decoder.spec().vocab_size;
        let state = self.states.get_mut(&id).ok_or(Error::UnknownRequest(id))?;
        let mut output = RowOutput { id, sampled: None, prompt_logprobs: Vec::new(), failure: None };
        for (row, &target) in rows.prompt.clone().zip(&rows.prompt_targets) {
            match state.prompt_logprobs(&self.logits[row * width..(row + 1) * width], target) {
                Ok(logprobs) => output.prompt_logprobs.push(logprobs),
                Err(error) => return Ok(RowOutput { failure: Some(error.to_string()), ..output }),
            }
        }
        let Some(row) = rows.sample else { return Ok(output) };
        match state.sample(&mut self.logits[row * width..(row + 1) * width], rows.position) {
            Ok(sampled) => {
                state.observe(sampled.token);
                output.sampled = Some(sampled);
            }
            Err(error) => output.failure = Some(error.to_string()),
        }
        Ok(output)
    }
}

impl<B: Backend> Executor for Runner<B> {
    fn admit(&mut self, id: RequestId, state: SamplingState) {
        self.states.insert(id, state);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<()> {
        self.is_in_flight = false;
        gather(plan, &mut self.batch, &mut self.outputs);
        self.decoder.forward(&self.batch)?;
        self.is_in_flight = true;
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<RowOutput>> {
        if !std::mem::take(&mut self.is_in_flight) {
            return Err(Error::NothingSubmitted);
        }
        if !self.batch.outputs.is_empty() {
            self.decoder.logits(&mut self.logits);
        }
        let rows = std::mem::take(&mut self.outputs);
        let outputs = rows.iter().map(|rows| self.sample(rows)).collect();
        self.outputs = rows;
        outputs
    }

    fn release(&mut self, id: RequestId) {
        self.states.remove(&id);
    }
}
