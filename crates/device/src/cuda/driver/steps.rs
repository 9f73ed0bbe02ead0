//! How long each step runs on the device, and how long the device is without work between two of them.
//!
//! A step begins where its inputs have arrived and ends behind its last kernel, so that copies to and from the host count
//! as time between steps. Two events a step are all that it costs: steps overlap and are replayed as ever.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::context::Stream;
use super::device::Device;
use super::event::Event;
use crate::Result;

/// Steps that are remembered; later ones are not timed.
const MOST_STEPS: usize = 1 << 14;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    pub rows: usize,
    /// Every sequence has one row.
    pub decodes: bool,
    /// From the last kernel of the step before to this one's first; none for the first that was timed.
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
    /// From now on steps are timed.
    pub fn start_steps(&self) {
        self.steps.steps.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.steps.running.store(true, Ordering::Relaxed);
    }

    /// The steps since then, oldest first. Comes when nothing is under way.
    pub fn end_steps(&self) -> Result<Vec<StepTime>> {
        self.steps.running.store(false, Ordering::Relaxed);
        self.synchronize(Stream::Compute)?;
        let steps = std::mem::take(&mut *self.steps.steps.lock().unwrap_or_else(PoisonError::into_inner));
        let mut before: Option<&Step> = None;
        let mut times = Vec::with_capacity(steps.len());
        // A step that failed has no end, and what came next waited for other reasons.
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

    /// A step's inputs are there.
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

    /// Behind a step's last kernel.
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
