//! Events on their way to clients.
//!
//! To wake a reader takes microseconds, and a step may wait for the plan that the same thread makes: events are posted while
//! a step's results are looked through, and sent when the next step has been handed over.

use crate::Event;

/// A reader that gets several events in a row is named once, with their number: each time costs, as the reader's own thread
/// looks at the same memory.
#[derive(Default)]
pub(crate) struct Mail {
    readers: Vec<(flume::Sender<Event>, usize)>,
    events: Vec<Event>,
}

impl Mail {
    pub fn post(&mut self, to: &flume::Sender<Event>, event: Event) {
        match self.readers.last_mut() {
            Some((last, count)) if last.same_channel(to) => *count += 1,
            _ => self.readers.push((to.clone(), 1)),
        }
        self.events.push(event);
    }

    /// In the order of posting. A reader that has gone is not an error: its abort is on the way.
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
    fn events_come_in_order_and_not_before_they_are_sent() {
        let (sender, reader) = flume::unbounded();
        let (gone, _) = flume::unbounded();
        let mut mail = Mail::default();
        let token = |token| Event::Token { sample: 0, token, logprobs: None };
        mail.post(&sender, token(1));
        mail.post(&gone, token(2));
        mail.post(&sender, token(3));
        assert!(reader.is_empty());
        mail.send();
        assert_eq!(reader.drain().collect::<Vec<_>>(), [token(1), token(3)]);
        mail.send();
        assert!(reader.is_empty(), "nothing is sent twice");
    }
}
