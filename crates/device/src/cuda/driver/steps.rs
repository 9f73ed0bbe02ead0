//! Run times of each step on the device, and its idle times between two of them.
//!
//! A step begins when its inputs have arrived and ends behind its last kernel, so that copies to
//! and from the host count as time between steps. The only cost is two events per step: steps
//! overlap and are replayed as usual.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::context::Stream;
use super::device::Device;
use super::event::Event;
use crate::Result;

/// Most steps that are timed.
const MOST_STEPS: usize = 1 << 14;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    pub rows: usize,
    /// Whether every sequence has one row.
    pub decodes: bool,
    /// From the last kernel of the previous step to this one's first; none for the first timed
    /// step.
    pub gap_ms: Option<f32>,
    pub busy_ms: f32,
}

#[derive(Default)]
pub(super) struct StepClock {
    running: AtomicBool,
    steps: Mutex<Vec<Step>>,
}

struct Step {
    rows: usize,
    decodes: bool,
    begin: Event,
    end: Event,
    has_ended: bool,
}

impl Device {
    /// Starts to time steps.
    pub fn start_steps(&self) {
        self.steps.steps.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.steps.running.store(true, Ordering::Relaxed);
    }

    /// The steps since then, oldest first. Called when no step is in flight.
    pub fn end_steps(&self) -> Result<Vec<StepTime>> {
        self.steps.running.store(false, Ordering::Relaxed);
        self.synchronize(Stream::Compute)?;
        let steps = std::mem::take(&mut *self.steps.steps.lock().unwrap_or_else(PoisonError::into_inner));
        let mut before: Option<&Step> = None;
        let mut times = Vec::with_capacity(steps.len());
        // A failed step has no end, and the next one waited for other reasons.
        for step in &steps {
            if step.has_ended {
                let gap_ms = before.map(|before| before.end.elapsed_ms(&step.begin)).transpose()?;
                let busy_ms = step.begin.elapsed_ms(&step.end)?;
                times.push(StepTime { rows: step.rows, decodes: step.decodes, gap_ms, busy_ms });
            }
            before = step.has_ended.then_some(step);
        }
        Ok(times)
    }

    /// Marks that a step's inputs have arrived.
    pub(in super::super) fn step_begins(&self, rows: usize, decodes: bool) {
        if !self.steps.running.load(Ordering::Relaxed) {
            return;
        }
        let mut steps = self.steps.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let (Ok(begin), Ok(end)) = (self.timing_event(), self.timing_event()) else { return };
        if steps.len() < MOST_STEPS {
            self.record(&begin, Stream::Compute);
            steps.push(Step { rows, decodes, begin, end, has_ended: false });
        }
    }

    /// Marks the end of a step's last kernel.
    pub(in super::super) fn step_ends(&self) {
        if !self.steps.running.load(Ordering::Relaxed) {
            return;
        }
        let mut steps = self.steps.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(step) = steps.last_mut().filter(|step| !step.has_ended) {
            self.record(&step.end, Stream::Compute);
            step.has_ended = true;
        }
    }
}
