//! Run times of each kernel, measured by the device itself.
//!
//! During a profile every launch stands between two events and none overlaps, so a step takes
//! longer than otherwise; the times of the kernels themselves are right. Recorded graphs cannot be
//! profiled: steps run eagerly then.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::context::Stream;
use super::device::Device;
use super::event::Event;
use crate::Result;

/// Time and number of all launches of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    pub name: String,
    pub calls: u64,
    pub milliseconds: f64,
}

#[derive(Default)]
pub(super) struct Profiler {
    running: AtomicBool,
    spans: Mutex<Vec<Span>>,
}

struct Span {
    name: String,
    begin: Event,
    end: Event,
}

impl Profiler {
    #[inline]
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Relaxed)
    }
}

impl Device {
    pub fn start_profile(&self) {
        self.profiler.spans.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.profiler.running.store(true, Ordering::Relaxed);
    }

    pub fn is_profiled(&self) -> bool {
        self.profiler.is_running()
    }

    /// Ends the profile; the longest total time comes first.
    pub fn end_profile(&self) -> Result<Vec<KernelTime>> {
        self.profiler.running.store(false, Ordering::Relaxed);
        self.synchronize(Stream::Compute)?;
        let spans = std::mem::take(&mut *self.profiler.spans.lock().unwrap_or_else(PoisonError::into_inner));
        let mut times: BTreeMap<String, (u64, f64)> = BTreeMap::new();
        for span in spans {
            let entry = times.entry(span.name).or_default();
            entry.0 += 1;
            entry.1 += f64::from(span.begin.elapsed_ms(&span.end)?);
        }
        let all = times.into_iter().map(|(name, (calls, milliseconds))| KernelTime { name, calls, milliseconds });
        let mut all: Vec<KernelTime> = all.collect();
        all.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
        Ok(all)
    }

    /// Queues the work, timed under this name during a profile: for libraries' calls.
    /// [`Device::launch`] times kernels.
    pub fn profiled(&self, name: &str, queue: impl FnOnce()) {
        if !self.profiler.is_running() {
            return queue();
        }
        let (Ok(begin), Ok(end)) = (self.timing_event(), self.timing_event()) else { return queue() };
        self.record(&begin, Stream::Compute);
        queue();
        self.record(&end, Stream::Compute);
        let span = Span { name: name.to_owned(), begin, end };
        self.profiler.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }
}
