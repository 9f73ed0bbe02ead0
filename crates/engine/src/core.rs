//! The loop: messages in, steps, events out. One thread runs it and owns the scheduler and the executor's handle.
//!
//! While step n computes, step n+1 is planned and submitted; then step n's results are committed and delivered while
//! step n+1 computes. The thread waits for one channel alone, so it hears a client as soon as a result, and nothing it
//! does keeps the executor waiting.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, mpsc},
    time::Instant,
};

use folio_scheduler::{Assignment, Departed, DiskTask, Draft, RequestId, Scheduler, StepPlan};

use crate::{
    Admission, EngineRequest, Error, Event, Executor, FinishReason, Result, Shared, StepOutput, arrive,
    command::Message,
    config::nanos,
    executor::MOST_IN_FLIGHT,
    failure::{Failure, Restarts},
    mail::Mail,
    pace::Pace,
    patience::Patience,
    report::explain,
    sample::{Drafts, Lives, Sample, Times},
    sampling::SamplingState,
    tiers::{DiskDone, DiskIo},
    trial::Trials,
};

pub(crate) struct Core {
    pub scheduler: Scheduler,
    pub executor: Box<dyn Executor>,
    /// Executors so far: what those that are gone still have to say is not heard.
    pub generation: u64,
    disk: Option<DiskIo>,
    messages: mpsc::Receiver<Message>,
    /// The executor's end of it.
    pub line: mpsc::Sender<Message>,
    pub shared: Arc<Shared>,
    /// Those taken and not ended; all of them are in the scheduler, except while there are trials.
    pub samples: BTreeMap<RequestId, Sample>,
    /// What they will hear.
    pub mail: Mail,
    /// Submitted and not collected, oldest first.
    pub in_flight: VecDeque<Step>,
    /// When the oldest of them began.
    began: Instant,
    pub pace: Pace,
    /// Whether the step in flight will bring drafts: what is planned ahead of them could not verify them.
    pub awaits_drafts: bool,
    /// Set when a step has failed: nothing is planned until the other one in flight has ended too.
    pub failure: Option<Failure>,
    /// Set from a failure until everybody who was in it has been tried alone.
    pub trials: Option<Trials>,
    pub restarts: Restarts,
    pub patience: Patience,
    /// Whether the listener missed cache events and has not been told so.
    pub has_lost_events: bool,
    /// The zero of the scheduler's time.
    pub epoch: Instant,
    pub stopping: bool,
    /// What those hear who are left when the engine stops.
    pub last_word: FinishReason,
}

/// What is remembered of a plan until its results are there.
pub(crate) struct Step {
    pub rows: Vec<Row>,
    pub num_tokens: usize,
    /// How many of them are of prompts.
    pub num_prompt_tokens: usize,
    /// Tasks for the disk that begin when this and all steps before it are done.
    pub tasks: Vec<DiskTask>,
}

/// One sample's rows in a step.
pub(crate) struct Row {
    pub id: RequestId,
    pub samples: bool,
    /// What it verifies.
    pub drafts: Draft,
    /// Tokens of it that are computed behind them.
    pub end: usize,
}

impl Step {
    /// Results that do not belong to the plan are the executor's fault, and nothing in them can be trusted.
    fn check(&self, output: StepOutput) -> Result<StepOutput> {
        arrive::output(&output);
        let (found, expected) = (output.rows.len(), self.rows.len());
        if found != expected {
            return Err(Error::Step(format!("the step gave {found} results for {expected} requests")));
        }
        for (output, row) in output.rows.iter().zip(&self.rows) {
            let (found, expected) = (output.id.0, row.id.0);
            if found != expected {
                return Err(Error::Step(format!("the step gave a result for request {found} in place of {expected}")));
            }
            if row.samples && !row.drafts.has_path(&output.path()) {
                return Err(Error::Step(format!("the step accepted drafts of request {found} that it did not have")));
            }
        }
        Ok(output)
    }
}

impl Core {
    pub fn new(
        scheduler: Scheduler,
        executor: Box<dyn Executor>,
        disk: Option<DiskIo>,
        (line, messages): (mpsc::Sender<Message>, mpsc::Receiver<Message>),
        shared: Arc<Shared>,
    ) -> Self {
        let epoch = Instant::now();
        shared.progress.follow(executor.pulse());
        let patience = Patience::new(shared.config.queue_timeout);
        Self {
            scheduler,
            executor,
            generation: 0,
            disk,
            messages,
            line,
            shared,
            samples: BTreeMap::new(),
            mail: Mail::default(),
            in_flight: VecDeque::new(),
            began: epoch,
            pace: Pace::default(),
            awaits_drafts: false,
            failure: None,
            trials: None,
            restarts: Restarts::default(),
            patience,
            has_lost_events: false,
            epoch,
            stopping: false,
            last_word: FinishReason::Aborted,
        }
    }

    pub fn run(mut self) {
        loop {
            // All that has come is heard before a step is planned.
            while let Ok(message) = self.messages.try_recv() {
                self.hear(message);
            }
            if self.stopping {
                break;
            }
            self.expire_waiting(Instant::now());
            self.tend_trials();
            let is_due = self.is_due();
            let has_stepped = is_due && self.step();
            self.mail.send();
            if !has_stepped && !self.is_trial_over() {
                self.wait(is_due);
            }
        }
        while let Some((&id, _)) = self.samples.first_key_value() {
            self.end(id, self.last_word.clone());
        }
        self.mail.send();
        self.in_flight.clear();
        self.count_rows_in_flight();
        drop(self.publish());
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Submit { first_id, request, samplers, submitted, events } => {
                self.submit(first_id, request, samplers, submitted, &events);
            }
            Message::Abort(id) => self.end(id, FinishReason::Aborted),
            Message::Shutdown => self.stopping = true,
            Message::StepDone { generation } if generation == self.generation => self.finish_step(),
            // The last word of an executor that is gone.
            Message::StepDone { .. } => {}
            Message::DiskDone(DiskDone { ticket, ok, lost }) => {
                if ok {
                    self.shared.progress.note();
                }
                self.scheduler.disk_done(ticket, ok);
                lost.into_iter().for_each(|key| self.scheduler.disk_lost(key));
            }
        }
    }

    /// Sleeps until a message comes, or until there is something to do without one: a step to be planned, a deadline.
    fn wait(&mut self, has_tried: bool) {
        let until = if self.in_flight.is_empty() {
            drop(self.publish());
            let deadlines = self.samples.values().filter_map(|sample| sample.deadline);
            deadlines.chain(self.patience_ends()).min()
        } else {
            self.plan_at().filter(|_| !has_tried)
        };
        let message = match until {
            Some(time) => self.hear_by(time),
            // The executor holds the other end of the channel. A step that never ends must not hold up the patience of others.
            None => self.stay_awake().or_else(|| match self.patience_ends() {
                Some(time) => self.hear_by(time),
                None => self.messages.recv().ok(),
            }),
        };
        if let Some(message) = message {
            self.hear(message);
        }
    }

    fn hear_by(&self, time: Instant) -> Option<Message> {
        self.messages.recv_timeout(time.saturating_duration_since(Instant::now())).ok()
    }

    /// Waits awake for the end of a step that nothing is planned behind, from shortly before it is expected: a device would
    /// wait for this thread to be woken. None where there is nothing to stay awake for, or it does not end in time.
    fn stay_awake(&self) -> Option<Message> {
        let step = self.in_flight.front().filter(|_| self.in_flight.len() == 1)?;
        let expected = self.pace.expected(step.num_tokens).filter(|_| self.executor.computes_elsewhere())?;
        let (from, until) = (self.began + expected / 8 * 7, self.began + expected / 4 * 5);
        if let Ok(message) = self.messages.recv_timeout(from.saturating_duration_since(Instant::now())) {
            return Some(message);
        }
        while Instant::now() < until {
            if let Ok(message) = self.messages.try_recv() {
                return Some(message);
            }
            std::thread::yield_now();
        }
        None
    }

    /// Whether a step may be planned now.
    fn is_due(&self) -> bool {
        match self.in_flight.len() {
            0 => self.scheduler.has_work(),
            _ => self.plan_at().is_some_and(|time| time <= Instant::now()),
        }
    }

    /// When to plan behind the step that runs; none while no more may be in flight.
    fn plan_at(&self) -> Option<Instant> {
        let is_ahead = self.shared.config.overlap && self.trials.is_none() && !self.awaits_drafts;
        let most = if is_ahead { MOST_IN_FLIGHT } else { 1 };
        let running = self.in_flight.front().filter(|_| self.in_flight.len() < most && self.failure.is_none())?;
        Some(self.began + self.pace.plan_after(running.num_tokens))
    }

    fn submit(
        &mut self,
        first_id: RequestId,
        request: EngineRequest,
        samplers: Vec<SamplingState>,
        submitted: Instant,
        events: &flume::Sender<Event>,
    ) {
        let EngineRequest { prompt, params, max_len, pooling, options } = request;
        let prompt: Arc<[u32]> = prompt.into();
        // What is too far away to be told is no deadline.
        let deadline = options.deadline.and_then(|after| submitted.checked_add(after));
        self.patience.came(first_id, samplers.len(), submitted);
        for (index, sampler) in samplers.into_iter().enumerate() {
            let id = RequestId(first_id.0 + index as u64);
            let sample = Sample {
                index,
                params: Arc::clone(&params),
                events: events.clone(),
                prompt: Arc::clone(&prompt),
                output: Vec::new(),
                max_len,
                pooling,
                options: options.clone(),
                fork_of: (index > 0).then_some(first_id),
                times: Times::new(submitted),
                deadline,
                prompt_logprobs: (params.prompt_logprobs.is_some() && index == 0).then(|| vec![None]),
                lives: Lives::default(),
                drafts: Drafts::default(),
            };
            let (owner, prompt) = (sample.owner(), Arc::clone(&prompt));
            self.samples.insert(id, sample);
            let admission = Admission { owner, state: sampler, prompt, answer: Vec::new(), max_len };
            self.executor.admit(id, admission);
            if self.trials.is_none() {
                self.enlist(id);
            }
        }
    }

    /// Plans a step and hands it over; false if there was nothing to hand over.
    fn step(&mut self) -> bool {
        let mut plan = self.scheduler.schedule(nanos(self.epoch.elapsed()));
        for (id, departed) in std::mem::take(&mut plan.expired) {
            self.depart(id, FinishReason::Deadline, Some(departed));
        }
        if let Some(debug) = self.shared.config.debug {
            plan.preempted.iter().for_each(|preempted| explain(debug, preempted));
        }
        self.publish_events();
        let tasks = std::mem::take(&mut plan.disk_tasks);
        if plan.is_empty() {
            match self.in_flight.back_mut() {
                Some(step) => step.tasks.extend(tasks),
                None => self.start_tasks(tasks),
            }
            return false;
        }
        self.hand_over(plan, tasks);
        true
    }

    fn hand_over(&mut self, plan: StepPlan, tasks: Vec<DiskTask>) {
        let row = |a: &Assignment| Row { id: a.id, samples: a.samples, drafts: a.draft(), end: a.first + a.num_rows() };
        let rows = plan.assignments.iter().map(row).collect();
        let now = Instant::now();
        let num_prompt_tokens = plan.assignments.iter().map(|assignment| self.start(assignment, now)).sum();
        let step = Step { rows, num_tokens: plan.num_rows(), num_prompt_tokens, tasks };
        if self.in_flight.is_empty() {
            self.began = now;
        }
        match self.executor.submit(plan) {
            Ok(()) => self.in_flight.push_back(step),
            Err(error) => self.fail(step, &error),
        }
        self.count_rows_in_flight();
    }

    fn count_rows_in_flight(&self) {
        self.shared.progress.set_rows_in_flight(self.in_flight.iter().map(|step| step.num_tokens).sum());
    }

    /// Notes that a sample is in a step; how many rows of its prompt are.
    fn start(&mut self, assignment: &Assignment, now: Instant) -> usize {
        let Some(sample) = self.samples.get_mut(&assignment.id) else { return 0 };
        sample.times.start(now);
        sample.lives.start(assignment.first);
        sample.prompt.len().saturating_sub(assignment.first).min(assignment.num_rows())
    }

    /// The oldest step has ended.
    fn finish_step(&mut self) {
        let Some(step) = self.in_flight.pop_front() else { return };
        self.began = Instant::now();
        self.count_rows_in_flight();
        match self.executor.collect().and_then(|output| step.check(output)) {
            Ok(output) if self.failure.is_none() => self.deliver(step, output),
            // It ran on after a failure: the scheduler gives it up with the one that failed.
            Ok(_) => self.fail(step, &Error::Step("the step before this one failed".into())),
            Err(error) => self.fail(step, &error),
        }
    }

    pub fn start_tasks(&mut self, tasks: Vec<DiskTask>) {
        for task in tasks {
            match &self.disk {
                Some(disk) => disk.submit(task),
                None => self.scheduler.disk_done(task.ticket, false),
            }
        }
    }

    /// One that is not wanted any more, or has all it wanted.
    pub fn end(&mut self, id: RequestId, reason: FinishReason) {
        if self.samples.contains_key(&id) {
            let departed = match reason {
                FinishReason::Stop(_) | FinishReason::Length => self.scheduler.finish(id),
                _ => self.scheduler.abort(id),
            };
            self.depart(id, reason, departed);
        }
    }

    /// The last thing that happens to a sample, exactly once.
    pub fn depart(&mut self, id: RequestId, reason: FinishReason, departed: Option<Departed>) {
        let Some(sample) = self.samples.remove(&id) else { return };
        self.executor.release(id);
        // The figures first: whoever has read the last event finds them counted.
        self.shared.progress.ended(1);
        self.shared.stats().samples_ended += 1;
        sample.finish(reason, departed, &mut self.mail);
    }
}
