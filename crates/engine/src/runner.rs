//! Steps of one decoder on one device, from a plan to tokens.

use std::{collections::HashMap, sync::Arc};

use folio_model::{
    Decoder,
    device::{Backend, Batch},
};
use folio_scheduler::{RequestId, StepPlan, Transfer};

use crate::{
    Error, HostTier, Result, RowOutput, StepRunner,
    background::guarded,
    inputs::{OutputRows, Requests, gather},
    pooling::Pool,
    sampling::SamplingState,
};

/// Turns plans into forward passes and logits into tokens. What belongs to a request outlives steps; everything else is
/// made anew from each plan.
pub struct Runner<B: Backend> {
    decoder: Decoder<B>,
    /// Where blocks are saved to and loaded from.
    host: Option<Arc<HostTier>>,
    requests: Known,
    batch: Batch,
    /// Of the step under way, in the order of its plan.
    outputs: Vec<OutputRows>,
    logits: Vec<f32>,
    hidden: Vec<f32>,
}

#[derive(Default)]
struct Known(HashMap<RequestId, Kept>);

/// What is kept of a request between steps.
struct Kept {
    sampling: SamplingState,
    /// The token sampled last and its position: the next plan may ask for it without knowing it.
    last: Option<(usize, u32)>,
    /// For requests that want a vector and no token.
    pool: Option<Pool>,
}

impl Requests for Known {
    fn awaited(&self, id: RequestId, position: usize) -> Option<u32> {
        let (sampled_at, token) = self.0.get(&id)?.last?;
        (sampled_at == position).then_some(token)
    }

    fn pools(&self, id: RequestId) -> bool {
        self.0.get(&id).is_some_and(|kept| kept.pool.is_some())
    }
}

impl<B: Backend> Runner<B> {
    /// `host` is the tier that the engine is given too, where there is one.
    pub fn new(decoder: Decoder<B>, host: Option<Arc<HostTier>>) -> Self {
        let (batch, outputs, logits, hidden) = (Batch::default(), Vec::new(), Vec::new(), Vec::new());
        Self { decoder, host, requests: Known::default(), batch, outputs, logits, hidden }
    }

    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    fn transfer(&mut self, transfers: &[Transfer]) -> Result<()> {
        for transfer in transfers {
            match *transfer {
                Transfer::Copy { group, from, to } => self.decoder.copy_blocks(group, &[(from.0, to.0)]),
                Transfer::Save { group, from, to } => {
                    let host = self.host.as_ref().ok_or(Error::NoHostTier)?;
                    self.decoder.save_block(group, from.0, &mut host.slot(group, to));
                }
                Transfer::Load { group, from, to } => {
                    let host = self.host.as_ref().ok_or(Error::NoHostTier)?;
                    self.decoder.load_block(group, to.0, &host.slot(group, from));
                }
            }
        }
        Ok(())
    }

    fn sample(&mut self, rows: &OutputRows) -> Result<RowOutput> {
        let id = rows.id;
        let width = self.decoder.spec().vocab_size;
        let kept = self.requests.0.get_mut(&id).ok_or(Error::UnknownRequest(id))?;
        if rows.is_orphan {
            return Ok(RowOutput::failed(id, "no token was sampled for the position before"));
        }
        if let Some(pool) = &mut kept.pool {
            return Ok(take_states(pool, rows, &self.hidden, self.decoder.spec().hidden));
        }
        let mut output = RowOutput::new(id);
        for (row, &target) in rows.prompt.clone().zip(&rows.prompt_targets) {
            match kept.sampling.prompt_logprobs(&self.logits[row * width..(row + 1) * width], target) {
                Ok(logprobs) => output.prompt_logprobs.push(logprobs),
                Err(error) => return Ok(RowOutput { failure: Some(error.to_string()), ..output }),
            }
        }
        let Some(row) = rows.sample else { return Ok(output) };
        match kept.sampling.sample(&mut self.logits[row * width..(row + 1) * width], rows.position) {
            Ok(sampled) => {
                kept.sampling.observe(sampled.token);
                kept.last = Some((rows.position, sampled.token));
                output.sampled = Some(sampled);
            }
            Err(error) => output.failure = Some(error.to_string()),
        }
        Ok(output)
    }
}

/// Adds a step's rows of `width` values to what a request wants pooled; with the last of them comes the vector.
fn take_states(pool: &mut Pool, rows: &OutputRows, hidden: &[f32], width: usize) -> RowOutput {
    for row in rows.prompt.clone().chain(rows.sample) {
        pool.add(&hidden[row * width..(row + 1) * width]);
    }
    let output = RowOutput::new(rows.id);
    match rows.sample.map(|_| pool.finish()) {
        None => output,
        Some(Ok(vector)) => RowOutput { pooled: Some(vector), ..output },
        Some(Err(error)) => RowOutput::failed(rows.id, error),
    }
}

impl<B: Backend> StepRunner for Runner<B> {
    fn admit(&mut self, id: RequestId, state: SamplingState) {
        let pool = state.pool();
        self.requests.0.insert(id, Kept { sampling: state, last: None, pool });
    }

    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>> {
        // The engine proposes none yet, and to verify them is the business of who does.
        if let Some(assignment) = plan.assignments.iter().find(|a| a.num_drafts > 0) {
            return Err(Error::Drafts { id: assignment.id, drafts: assignment.num_drafts });
        }
        self.transfer(&plan.transfers)?;
        let num_logits = gather(plan, &self.requests, &mut self.batch, &mut self.outputs);
        self.decoder.forward_with(&self.batch, num_logits)?;
        if num_logits > 0 {
            self.decoder.logits(&mut self.logits);
        }
        if num_logits < self.batch.outputs.len() {
            self.decoder.hidden(&mut self.hidden);
        }
        let rows = std::mem::take(&mut self.outputs);
        // A sampler that panics is its own request's fault.
        let failed = |id| Ok(RowOutput::failed(id, "its sampler panicked"));
        let outputs =
            rows.iter().map(|rows| guarded(|| self.sample(rows)).unwrap_or_else(|| failed(rows.id))).collect();
        self.outputs = rows;
        outputs
    }

    fn release(&mut self, id: RequestId) {
        self.requests.0.remove(&id);
    }
}
