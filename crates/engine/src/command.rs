//! What the engine's thread hears, all through one channel: clients, the executor and the disk.

use std::{
    sync::{Arc, mpsc},
    time::Instant,
};

use folio_scheduler::RequestId;

use crate::{EngineRequest, Event, SamplingState, Wake, tiers::DiskDone};

#[derive(Debug)]
pub(crate) enum Message {
    Submit {
        /// Its samples' ids follow each other from here.
        first_id: RequestId,
        request: EngineRequest,
        /// One for each sample, made where it holds up no step.
        samplers: Vec<SamplingState>,
        submitted: Instant,
        events: flume::Sender<Event>,
    },
    Abort(RequestId),
    /// Ends the engine; what runs is aborted.
    Shutdown,
    /// A step of the executor of this number can be collected.
    StepDone {
        generation: u64,
    },
    DiskDone(DiskDone),
}

/// The clients' end. The executor and the disk hold the same channel, so its other end would never find all senders
/// gone: instead the last handle or stream says so as it goes.
///
/// A channel of std's, because it drops what is queued when its receiver goes: a request that was handed in while the
/// engine ended must not wait for ever.
#[derive(Clone, Debug)]
pub(crate) struct Line(Arc<LastOneEnds>);

#[derive(Debug)]
struct LastOneEnds(mpsc::Sender<Message>);

impl Line {
    pub fn new(sender: mpsc::Sender<Message>) -> Self {
        Self(Arc::new(LastOneEnds(sender)))
    }

    /// False when the engine is gone.
    pub fn send(&self, message: Message) -> bool {
        self.0.0.send(message).is_ok()
    }
}

impl Drop for LastOneEnds {
    fn drop(&mut self) {
        // An engine that is gone already has nothing to end.
        let _ = self.0.send(Message::Shutdown);
    }
}

/// What the executor of this number says when a step has ended.
pub(crate) fn step_done(line: mpsc::Sender<Message>, generation: u64) -> Wake {
    // An engine that has ended waits for no step.
    Box::new(move || drop(line.send(Message::StepDone { generation })))
}
