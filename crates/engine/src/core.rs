//! The loop: commands in, a step, events out. One thread runs it and owns scheduler and executor.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering, mpsc},
};

use folio_scheduler::{Departed, NewRequest, RequestId, Scheduler, StepPlan};

use crate::{
    EngineConfig, EngineRequest, Event, Executor, FinishReason, Logprobs, Result, RowOutput, SamplingParams, Shared,
    Usage, sampling::SamplingState,
};

/// What other threads may ask of the engine's.
#[derive(Debug)]
pub(crate) enum Command {
    Submit { first_id: RequestId, request: EngineRequest, events: flume::Sender<Event> },
    Abort(RequestId),
    Shutdown,
}

/// One sample of a request, from submission to its last event.
struct Sample {
    index: usize,
    params: Arc<SamplingParams>,
    events: flume::Sender<Event>,
    prompt_len: usize,
    max_len: usize,
    completion_len: usize,
    /// Collected until the prompt is done; only sample 0 has any.
    prompt_logprobs: Option<Vec<Option<Logprobs>>>,
}

pub(crate) struct Core {
    scheduler: Scheduler,
    executor: Box<dyn Executor>,
    config: EngineConfig,
    commands: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    samples: BTreeMap<RequestId, Sample>,
    stopping: bool,
}

impl Core {
    pub fn new(
        executor: Box<dyn Executor>,
        config: EngineConfig,
        commands: mpsc::Receiver<Command>,
        shared: Arc<Shared>,
    ) -> Result<Self> {
        config.validate()?;
        let scheduler = Scheduler::new(config.scheduler())?;
        Ok(Self { scheduler, executor, config, commands, shared, samples: BTreeMap::new(), stopping: false })
    }

    pub fn run(mut self) {
        loop {
            self.take_commands();
            if self.stopping {
                break;
            }
            self.step();
        }
        while let Some((&id, _)) = self.samples.first_key_value() {
            self.end(id, FinishReason::Aborted);
        }
        self.publish_stats();
    }

    /// Takes what is there; sleeps while there is nothing else to do.
    fn take_commands(&mut self) {
        while !self.stopping {
            let command = if self.scheduler.has_work() {
                self.commands.try_recv().map_err(|error| error == mpsc::TryRecvError::Disconnected)
            } else {
                self.publish_stats();
                self.commands.recv().map_err(|_| true)
            };
            match command {
                Ok(command) => self.obey(command),
                Err(all_handles_gone) => {
                    self.stopping = all_handles_gone;
                    return;
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit { first_id, request, events } => self.submit(first_id, request, events),
            Command::Abort(id) => self.end(id, FinishReason::Aborted),
            Command::Shutdown => self.stopping = true,
        }
    }

    fn submit(&mut self, first_id: RequestId, request: EngineRequest, events: flume::Sender<Event>) {
        let EngineRequest { prompt, params, max_len } = request;
        for index in 0..params.n {
            let id = RequestId(first_id.0 + index as u64);
            let wants_prompt_logits = params.prompt_logprobs.is_some() && index == 0;
            let sample = Sample {
                index,
                params: Arc::clone(&params),
                events: events.clone(),
                prompt_len: prompt.len(),
                max_len,
                completion_len: 0,
                prompt_logprobs: wants_prompt_logits.then(|| vec![None]),
            };
            self.samples.insert(id, sample);
            let state = SamplingState::new(Arc::clone(&params), &prompt, &self.config.eos, index);
            self.executor.admit(id, state);
            let new = NewRequest { id, prompt: prompt.clone(), max_len, wants_prompt_logits, cache_salt: 0 };
            if let Err(error) = self.scheduler.add(new) {
                self.end(id, FinishReason::Error(error.to_string()));
            }
        }
    }

    fn step(&mut self) {
        let plan = self.scheduler.schedule();
        match self.execute(&plan) {
            Ok(outputs) => self.deliver(&plan, outputs),
            Err(reason) => self.fail_step(&reason),
        }
        self.publish_stats();
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>, String> {
        let run = || {
            self.executor.submit(plan)?;
            self.executor.collect()
        };
        // The executor's own state is rebuilt from the next plan, so a panic in one step cannot spoil another.
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(outputs)) if outputs.len() == plan.assignments.len() => Ok(outputs),
            Ok(Ok(outputs)) => {
                Err(format!("the step gave {} results for {} requests", outputs.len(), plan.assignments.len()))
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the step panicked".into()),
        }
    }

    fn deliver(&mut self, plan: &StepPlan, outputs: Vec<RowOutput>) {
        let token = |output: &RowOutput| output.sampled.as_ref().map(|s| s.token);
        let results: Vec<_> = outputs.iter().map(|output| (output.id, token(output))).collect();
        self.scheduler.commit(&results);
        {
            let mut stats = self.shared.stats();
            stats.occupancy.add(&self.scheduler.stats());
            stats.tokens_computed += plan.num_tokens() as u64;
            stats.tokens_sampled += results.iter().filter(|(_, token)| token.is_some()).count() as u64;
        }
        for output in outputs {
            self.deliver_one(output);
        }
    }

    fn deliver_one(&mut self, output: RowOutput) {
        let Some(sample) = self.samples.get_mut(&output.id) else { return };
        if let Some(reason) = output.failure {
            return self.end(output.id, FinishReason::Error(reason));
        }
        sample.take_prompt_logprobs(output.prompt_logprobs);
        let Some(sampled) = output.sampled else { return };
        sample.completion_len += 1;
        if sample.stops_at(sampled.token, &self.config.eos) {
            return self.end(output.id, FinishReason::Stop(sampled.token));
        }
        sample.send(Event::Token { sample: sample.index, token: sampled.token, logprobs: sampled.logprobs });
        if sample.is_at_length() {
            self.end(output.id, FinishReason::Length);
        }
    }

    /// Everything that was in the step ends; the rest starts anew on a clean scheduler.
    fn fail_step(&mut self, reason: &str) {
        self.shared.stats().steps_failed += 1;
        for id in self.scheduler.fail_step() {
            self.end(id, FinishReason::Error(reason.to_owned()));
        }
    }

    /// The last thing that happens to a sample, exactly once.
    fn end(&mut self, id: RequestId, reason: FinishReason) {
        let Some(sample) = self.samples.remove(&id) else { return };
        let departed = self.scheduler.finish(id);
        self.executor.release(id);
        sample.send(Event::Finished { sample: sample.index, reason, usage: sample.usage(departed) });
        self.shared.live.fetch_sub(1, Ordering::AcqRel);
        self.shared.stats().samples_ended += 1;
    }

    fn publish_stats(&self) {
        self.shared.stats().scheduler = self.scheduler.stats();
    }
}

impl Sample {
    /// A reader that has gone is not an error: its abort is on the way.
    fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }

    fn take_prompt_logprobs(&mut self, logprobs: Vec<Logprobs>) {
        let Some(collected) = &mut self.prompt_logprobs else { return };
        collected.extend(logprobs.into_iter().map(Some));
        if collected.len() == self.prompt_len {
            let all = self.prompt_logprobs.take().unwrap_or_default();
            self.send(Event::PromptLogprobs(all));
        }
    }

    /// Whether the token just counted ends the answer by itself.
    fn stops_at(&self, token: u32, eos: &[u32]) -> bool {
        let is_eos = !self.params.ignore_eos && eos.contains(&token);
        let is_stop = is_eos || self.params.stop_token_ids.contains(&token);
        is_stop && self.completion_len > self.params.min_tokens
    }

    fn is_at_length(&self) -> bool {
        self.prompt_len + self.completion_len >= self.max_len
    }

    fn usage(&self, departed: Option<Departed>) -> Usage {
        Usage {
            prompt_tokens: self.prompt_len,
            completion_tokens: self.completion_len,
            cached_tokens: departed.map_or(0, |d| d.cached_tokens),
        }
    }
}
