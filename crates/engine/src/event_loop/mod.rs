//! The engine's loop: messages in, steps, events out. One thread runs it and owns the scheduler and
//! the executor.
//!
//! While step n computes, step n+1 is planned and submitted; then the results of step n are
//! committed and delivered while step n+1 computes. The thread waits on one channel alone, so it
//! receives a client's message as soon as a result, and none of its work keeps the executor
//! waiting.
//!
//! One file an idea: `step` has the steps in flight, `deliver` takes their results, `failure`
//! recovers from steps that failed and `blame` finds the request at fault, `queue_timeout` ends
//! requests that wait too long, `sample` is one answer, `outbox` sends events, `report` publishes
//! figures. Fields are private to this folder.

mod blame;
mod deliver;
mod durations;
mod failure;
mod outbox;
mod queue_timeout;
mod report;
mod restarts;
mod sample;
mod step;

use std::{
    collections::BTreeMap,
    sync::{Arc, mpsc},
    time::Instant,
};

use folio_scheduler::{Assignment, Departed, DiskTask, RequestId, Scheduler, StepPlan};

use self::{
    blame::Blame,
    failure::Failure,
    outbox::Outbox,
    queue_timeout::QueueTimeouts,
    report::explain,
    restarts::Restarts,
    sample::Sample,
    step::{InFlight, Step},
};
use crate::{
    Admission, EngineRequest, Error, Event, Executor, FinishReason, Shared,
    config::nanos,
    executor::MOST_IN_FLIGHT,
    messages::Message,
    sampling::SamplingState,
    tiers::{DiskDone, DiskIo},
};

pub(crate) struct EventLoop {
    scheduler: Scheduler,
    executor: Box<dyn Executor>,
    /// Number of executors so far; messages of an earlier one are ignored.
    generation: u64,
    disk: Option<DiskIo>,
    messages: mpsc::Receiver<Message>,
    /// The executor's end of the channel.
    sender: mpsc::Sender<Message>,
    shared: Arc<Shared>,
    /// Samples that were submitted and have not ended. All of them are in the scheduler, except
    /// while `blame` is set.
    samples: BTreeMap<RequestId, Sample>,
    /// Events for clients, not yet sent.
    outbox: Outbox,
    in_flight: InFlight,
    /// Whether the step in flight will bring drafts. A plan made ahead of them could not verify
    /// them.
    awaits_drafts: bool,
    /// Set when a step has failed: no step is planned until the other one in flight has ended.
    failure: Option<Failure>,
    /// Set from a failure until all requests of the failed step have been tried alone.
    blame: Option<Blame>,
    restarts: Restarts,
    queue_timeouts: QueueTimeouts,
    /// Whether the listener has missed cache events and not yet been told.
    has_lost_events: bool,
    /// The zero of the scheduler's time.
    epoch: Instant,
    is_stopping: bool,
    /// Reason with which the remaining requests end when the engine stops.
    stop_reason: FinishReason,
}

impl EventLoop {
    pub fn new(
        scheduler: Scheduler,
        executor: Box<dyn Executor>,
        disk: Option<DiskIo>,
        (sender, messages): (mpsc::Sender<Message>, mpsc::Receiver<Message>),
        shared: Arc<Shared>,
    ) -> Self {
        let epoch = Instant::now();
        shared.progress.follow(executor.pulse());
        let queue_timeouts = QueueTimeouts::new(shared.config.queue_timeout);
        Self {
            scheduler,
            executor,
            generation: 0,
            disk,
            messages,
            sender,
            shared,
            samples: BTreeMap::new(),
            outbox: Outbox::default(),
            in_flight: InFlight::new(epoch),
            awaits_drafts: false,
            failure: None,
            blame: None,
            restarts: Restarts::default(),
            queue_timeouts,
            has_lost_events: false,
            epoch,
            is_stopping: false,
            stop_reason: FinishReason::Aborted,
        }
    }

    pub fn run(mut self) {
        loop {
            // All messages are handled before a step is planned.
            while let Ok(message) = self.messages.try_recv() {
                self.handle(message);
            }
            if self.is_stopping {
                break;
            }
            self.expire_waiting(Instant::now());
            self.advance_blame();
            let may_plan = self.may_plan();
            let has_submitted = may_plan && self.plan_step();
            self.outbox.send();
            if !has_submitted && !self.is_suspect_decided() {
                self.wait(may_plan);
            }
        }
        while let Some((&id, _)) = self.samples.first_key_value() {
            self.end(id, self.stop_reason.clone());
        }
        self.outbox.send();
        self.in_flight.clear();
        self.publish_rows_in_flight();
        drop(self.publish_stats());
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Submit { first_id, request, samplers, submitted, events } => {
                self.submit(first_id, request, samplers, submitted, &events);
            }
            Message::Abort(id) => self.end(id, FinishReason::Aborted),
            Message::Shutdown => self.is_stopping = true,
            Message::StepDone { generation } if generation == self.generation => self.finish_step(),
            // Sent by an executor that is gone.
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

    /// Sleeps until a message arrives or there is work without one: a step to plan, a deadline.
    fn wait(&mut self, has_planned: bool) {
        let until = if self.in_flight.is_empty() {
            drop(self.publish_stats());
            let deadlines = self.samples.values().filter_map(|sample| sample.deadline);
            deadlines.chain(self.next_timeout()).min()
        } else {
            self.plan_at().filter(|_| !has_planned)
        };
        let message = match until {
            Some(time) => self.receive_by(time),
            // The executor holds a sender, so the channel stays open. A step that never ends must
            // not delay the timeouts of other requests.
            None => self.poll_for_step_end().or_else(|| match self.next_timeout() {
                Some(time) => self.receive_by(time),
                None => self.messages.recv().ok(),
            }),
        };
        if let Some(message) = message {
            self.handle(message);
        }
    }

    fn receive_by(&self, time: Instant) -> Option<Message> {
        self.messages.recv_timeout(time.saturating_duration_since(Instant::now())).ok()
    }

    /// Waits for the end of the only step in flight, and polls from shortly before it is expected:
    /// otherwise a device would wait until this thread has woken up. None if no step is expected to
    /// end, or if it does not end in time.
    fn poll_for_step_end(&self) -> Option<Message> {
        let (began, expected) = self.in_flight.expected_end().filter(|_| self.executor.computes_elsewhere())?;
        let (from, until) = (began + expected / 8 * 7, began + expected / 4 * 5);
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
    fn may_plan(&self) -> bool {
        if self.in_flight.is_empty() {
            self.scheduler.has_work()
        } else {
            self.plan_at().is_some_and(|time| time <= Instant::now())
        }
    }

    /// Time to plan the step after the one that runs; none while no more may be in flight.
    fn plan_at(&self) -> Option<Instant> {
        let is_ahead = self.shared.config.overlap && self.blame.is_none() && !self.awaits_drafts;
        let most = if is_ahead { MOST_IN_FLIGHT } else { 1 };
        let may_add = self.in_flight.len() < most && self.failure.is_none();
        self.in_flight.plan_at().filter(|_| may_add)
    }

    fn submit(
        &mut self,
        first_id: RequestId,
        request: EngineRequest,
        samplers: Vec<SamplingState>,
        submitted: Instant,
        events: &flume::Sender<Event>,
    ) {
        self.queue_timeouts.submitted(first_id, samplers.len(), submitted);
        let samples = Sample::all_of(request, first_id, samplers.len(), submitted, events);
        for (sample, state) in samples.into_iter().zip(samplers) {
            let id = RequestId(first_id.0 + sample.index as u64);
            let (owner, prompt, max_len) = (sample.owner(), Arc::clone(&sample.prompt), sample.max_len);
            self.samples.insert(id, sample);
            self.executor.admit(id, Admission { owner, state, prompt, answer: Vec::new(), max_len });
            if self.blame.is_none() {
                self.enqueue(id);
            }
        }
    }

    /// Adds a sample to the scheduler's queue.
    fn enqueue(&mut self, id: RequestId) {
        let Some(sample) = self.samples.get(&id) else { return };
        let request = sample.to_request(id, self.epoch);
        match self.scheduler.add(request, nanos(self.epoch.elapsed())) {
            Ok(()) => self.scheduler.expect_drafts(id, self.shared.config.expects_drafts),
            Err(error) => self.end(id, FinishReason::Error(error.to_string())),
        }
    }

    /// Plans a step and submits it; false if the plan is empty.
    fn plan_step(&mut self) -> bool {
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
            match self.in_flight.newest_mut() {
                Some(step) => step.tasks.extend(tasks),
                None => self.start_tasks(tasks),
            }
            return false;
        }
        self.submit_plan(plan, tasks);
        true
    }

    fn submit_plan(&mut self, plan: StepPlan, tasks: Vec<DiskTask>) {
        let now = Instant::now();
        let num_prompt_tokens = plan.assignments.iter().map(|assignment| self.start(assignment, now)).sum();
        let step = Step::new(&plan, num_prompt_tokens, tasks);
        match self.executor.submit(plan) {
            Ok(()) => self.in_flight.push(step, now),
            Err(error) => self.fail(step, &error),
        }
        self.publish_rows_in_flight();
    }

    /// Notes that a sample is in a step; returns how many rows of its prompt are.
    fn start(&mut self, assignment: &Assignment, now: Instant) -> usize {
        let Some(sample) = self.samples.get_mut(&assignment.id) else { return 0 };
        sample.start(assignment.first, now);
        sample.prompt.len().saturating_sub(assignment.first).min(assignment.num_rows())
    }

    /// The oldest step has ended.
    fn finish_step(&mut self) {
        let Some(step) = self.in_flight.pop() else { return };
        self.publish_rows_in_flight();
        match self.executor.collect().and_then(|output| step.check(output)) {
            Ok(output) if self.failure.is_none() => self.deliver(step, output),
            // The step was computed after a failure: the scheduler drops it with the failed one.
            Ok(_) => self.fail(step, &Error::after_failure()),
            Err(error) => self.fail(step, &error),
        }
    }

    fn start_tasks(&mut self, tasks: Vec<DiskTask>) {
        for task in tasks {
            match &self.disk {
                Some(disk) => disk.submit(task),
                None => self.scheduler.disk_done(task.ticket, false),
            }
        }
    }

    /// Ends a sample that is complete, or that its client or a limit ends.
    fn end(&mut self, id: RequestId, reason: FinishReason) {
        if self.samples.contains_key(&id) {
            let departed = match reason {
                FinishReason::Stop(_) | FinishReason::Length => self.scheduler.finish(id),
                _ => self.scheduler.abort(id),
            };
            self.depart(id, reason, departed);
        }
    }

    /// Removes a sample and posts its last event, exactly once.
    fn depart(&mut self, id: RequestId, reason: FinishReason, departed: Option<Departed>) {
        let Some(sample) = self.samples.remove(&id) else { return };
        self.executor.release(id);
        // Figures first: a client that has read the last event finds its request counted.
        self.shared.progress.ended(1);
        self.shared.stats().samples_ended += 1;
        sample.finish(reason, departed, &mut self.outbox);
    }
}
