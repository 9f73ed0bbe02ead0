//! How long a request waits for its turn at most.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use folio_scheduler::RequestId;

use crate::{FinishReason, core::Core};

/// Requests that came, oldest first, with the moment until which they wait; one whose first sample has begun to run or
/// has left is forgotten when it comes to the front. The other samples are started behind the first, however much
/// later: once it runs, the request has had its turn.
#[derive(Debug)]
pub(crate) struct Patience {
    timeout: Option<Duration>,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    until: Instant,
    first_id: RequestId,
    num_samples: usize,
}

impl Patience {
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, waiting: VecDeque::new() }
    }

    pub fn came(&mut self, first_id: RequestId, num_samples: usize, submitted: Instant) {
        // What is too far away to be told is no end.
        let until = self.timeout.and_then(|timeout| submitted.checked_add(timeout));
        self.waiting.extend(until.map(|until| Waiting { until, first_id, num_samples }));
    }

    /// When the first of them may run out of it.
    pub fn next(&self) -> Option<Instant> {
        self.waiting.front().map(|waiting| waiting.until)
    }
}

impl Core {
    /// Ends those who have waited too long.
    pub(crate) fn expire_waiting(&mut self) {
        while let Some(&Waiting { until, first_id, num_samples }) = self.patience.waiting.front() {
            let waits = self.waits(first_id);
            if waits && until > Instant::now() {
                return;
            }
            self.patience.waiting.pop_front();
            let samples = if waits { num_samples as u64 } else { 0 };
            for id in (first_id.0..first_id.0 + samples).map(RequestId) {
                if self.waits(id) {
                    self.end(id, FinishReason::QueueTimeout);
                }
            }
        }
    }

    fn waits(&self, id: RequestId) -> bool {
        self.samples.get(&id).is_some_and(|sample| !sample.times.has_started())
    }
}
