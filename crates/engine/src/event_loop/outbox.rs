//! Events on their way to clients.
//!
//! Waking a reader takes microseconds, and a step may wait for the plan that the same thread makes.
//! Events are therefore posted while a step's results are processed, and sent after the next step
//! has been submitted.

use crate::Event;

/// Posted events and their readers. A reader of several events in a row is listed once, with their
/// number: every access to a channel has a cost, because the reader's thread uses the same memory.
#[derive(Default)]
pub(super) struct Outbox {
    readers: Vec<(flume::Sender<Event>, usize)>,
    events: Vec<Event>,
}

impl Outbox {
    pub fn post(&mut self, to: &flume::Sender<Event>, event: Event) {
        match self.readers.last_mut() {
            Some((last, count)) if last.same_channel(to) => *count += 1,
            _ => self.readers.push((to.clone(), 1)),
        }
        self.events.push(event);
    }

    /// Sends all events in the order of posting. A reader that is gone is not an error: its abort
    /// is in the channel.
    pub fn send(&mut self) {
        let mut events = self.events.drain(..);
        for (to, count) in self.readers.drain(..) {
            for event in events.by_ref().take(count) {
                let _ = to.send(event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_arrive_in_order_and_not_before_they_are_sent() {
        let (sender, reader) = flume::unbounded();
        let (gone, _) = flume::unbounded();
        let mut outbox = Outbox::default();
        let token = |token| Event::Token { sample: 0, token, logprobs: None };
        outbox.post(&sender, token(1));
        outbox.post(&gone, token(2));
        outbox.post(&sender, token(3));
        assert!(reader.is_empty());
        outbox.send();
        assert_eq!(reader.drain().collect::<Vec<_>>(), [token(1), token(3)]);
        outbox.send();
        assert!(reader.is_empty(), "an event is sent once");
    }
}
