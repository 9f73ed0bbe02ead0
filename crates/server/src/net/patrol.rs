//! Waits, beside a connection, for its time to run out or an order to come.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::{Instant, Sleep};

use super::activity::{Activity, End, Verdict};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Drain,
    Retire,
    End(End),
}

pub(super) struct Patrol {
    activity: Arc<Activity>,
    /// Moved only when it would fire too late: most of the time it is cheaper to wake up once for nothing.
    alarm: Pin<Box<Sleep>>,
}

impl Patrol {
    pub fn new(activity: Arc<Activity>) -> Self {
        Self { activity, alarm: Box::pin(tokio::time::sleep_until(Instant::now())) }
    }

    /// The next order. To be polled after the connection in the same task, so that what the connection has just done
    /// counts.
    pub async fn next(&mut self) -> Order {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Order> {
        loop {
            let look_again = match self.activity.review(Instant::now(), cx.waker()) {
                Verdict::Drain => return Poll::Ready(Order::Drain),
                Verdict::Retire => return Poll::Ready(Order::Retire),
                Verdict::End(end) => return Poll::Ready(Order::End(end)),
                Verdict::Wait(until) => until,
            };
            if self.alarm.is_elapsed() || self.alarm.deadline() > look_again {
                self.alarm.as_mut().reset(look_again);
            }
            if self.alarm.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}
