//! Messages to the engine's thread. Clients, the executor and the disk tier share one channel.

use std::{
    sync::{Arc, mpsc},
    time::Instant,
};

use folio_scheduler::RequestId;

use crate::{EngineRequest, Event, SamplingState, Wake, tiers::DiskDone};

#[derive(Debug)]
pub(crate) enum Message {
    Submit {
        /// The ids of the request's samples count up from here.
        first_id: RequestId,
        request: EngineRequest,
        /// One for each sample, built on the client's thread so that no step waits for it.
        samplers: Vec<SamplingState>,
        submitted: Instant,
        events: flume::Sender<Event>,
    },
    Abort(RequestId),
    /// Ends the engine and aborts its requests.
    Shutdown,
    /// The executor of this generation has a step to collect.
    StepDone {
        generation: u64,
    },
    DiskDone(DiskDone),
}

/// The clients' end of the channel. The executor and the disk tier hold senders too, so the engine
/// would never see all senders gone: instead the last handle or stream sends
/// [`Message::Shutdown`] when it is dropped.
///
/// The channel is std's because that one drops its queued messages with its receiver: a request
/// that was submitted while the engine ended must not wait for ever.
#[derive(Clone, Debug)]
pub(crate) struct MessageSender(Arc<ShutdownOnDrop>);

#[derive(Debug)]
struct ShutdownOnDrop(mpsc::Sender<Message>);

impl MessageSender {
    pub fn new(sender: mpsc::Sender<Message>) -> Self {
        Self(Arc::new(ShutdownOnDrop(sender)))
    }

    /// False when the engine has ended.
    pub fn send(&self, message: Message) -> bool {
        self.0.0.send(message).is_ok()
    }
}

impl Drop for ShutdownOnDrop {
    fn drop(&mut self) {
        // An engine that has ended needs no shutdown.
        let _ = self.0.send(Message::Shutdown);
    }
}

/// The executor of this generation calls it when a step has ended.
pub(crate) fn step_done(sender: mpsc::Sender<Message>, generation: u64) -> Wake {
    // An engine that has ended collects no step.
    Box::new(move || drop(sender.send(Message::StepDone { generation })))
}
