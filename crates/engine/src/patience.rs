//! How long a request waits for its turn at most.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use folio_scheduler::RequestId;

use crate::{FinishReason, core::Core};

/// Those who came, oldest first, with the moment until which they wait; one that has begun to run or has left is
/// forgotten when it comes to the front.
#[derive(Debug)]
pub(crate) struct Patience {
    timeout: Option<Duration>,
    waiting: VecDeque<(Instant, RequestId)>,
}

impl Patience {
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, waiting: VecDeque::new() }
    }

    pub fn came(&mut self, id: RequestId, submitted: Instant) {
        // What is too far away to be told is no end.
        let until = self.timeout.and_then(|timeout| submitted.checked_add(timeout));
        self.waiting.extend(until.map(|until| (until, id)));
    }

    /// When the first of them may run out of it.
    pub fn next(&self) -> Option<Instant> {
        self.waiting.front().map(|&(until, _)| until)
    }
}

impl Core {
    /// Ends those who have waited too long.
    pub(crate) fn expire_waiting(&mut self) {
        while let Some(&(until, id)) = self.patience.waiting.front() {
            let waits = self.samples.get(&id).is_some_and(|sample| !sample.times.has_started());
            if waits && until > Instant::now() {
                return;
            }
            self.patience.waiting.pop_front();
            if waits {
                self.end(id, FinishReason::QueueTimeout);
            }
        }
    }
}
