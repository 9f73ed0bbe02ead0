//! Waits, beside a connection, for its time to run out, its client to disconnect, or an order to
//! come.
//!
//! hyper notices a disconnect only while it reads. While it answers one request and holds bytes of
//! the next, or an unread body, it does not read, and the answer would be computed to its end for a
//! client that has gone. A client that closes only its sending side counts as gone, as it does to
//! hyper.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

use super::activity::{Activity, End, Verdict};
use super::socket::Line;

/// Between two looks at whether a client with a request under way is still there. Unread bytes keep
/// a socket ready, so there is nothing to wait for: waiting for readiness would return at once,
/// every time.
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Drain,
    Retire,
    End(End),
}

pub(super) struct Patrol {
    activity: Arc<Activity>,
    line: Line,
    next_look: Instant,
    /// Moved only when it would fire too late: most of the time it is cheaper to wake up once for
    /// nothing.
    alarm: Pin<Box<Sleep>>,
}

impl Patrol {
    pub fn new(activity: Arc<Activity>, line: Line) -> Self {
        let now = Instant::now();
        Self { activity, line, next_look: now, alarm: Box::pin(tokio::time::sleep_until(now)) }
    }

    /// The next order. To be polled after the connection in the same task, so that what the
    /// connection has just done counts.
    pub async fn next(&mut self) -> Order {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Order> {
        loop {
            let now = Instant::now();
            let mut look_again = match self.activity.review(now, cx.waker()) {
                Verdict::Drain => return Poll::Ready(Order::Drain),
                Verdict::Retire => return Poll::Ready(Order::Retire),
                Verdict::End(end) => return Poll::Ready(Order::End(end)),
                Verdict::Wait(until) => until,
            };
            if self.activity.has_request() {
                if self.next_look <= now {
                    if self.line.client_left() {
                        return Poll::Ready(Order::End(End::ClientLeft));
                    }
                    self.next_look = now + LOOK_EVERY;
                }
                look_again = look_again.min(self.next_look);
            }
            if self.alarm.is_elapsed() || self.alarm.deadline() > look_again {
                self.alarm.as_mut().reset(look_again);
            }
            if self.alarm.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}
