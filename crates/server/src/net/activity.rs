//! State of one connection, with times.
//!
//! The connection's task, its socket, its requests and the accept loop all look at one `Activity`.
//! It keeps times and decides by them; waiting for them is `patrol.rs`'s part.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Time in which a closed connection's input is still read and dropped: a client that is busy
/// sending would otherwise lose the answer with the reason.
const LINGER: Duration = Duration::from_secs(2);

/// Time in which a connection without a request has to end by itself (HTTP/2 has a GOAWAY).
const PARTING: Duration = Duration::from_secs(1);

/// A reader that has taken nothing for this long may be evicted for a client that finds every place
/// taken.
const READER_PAUSE: Duration = Duration::from_millis(250);

/// How long a connection may do what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub header: Duration,
    pub idle: Duration,
    pub write_stall: Duration,
}

/// Why a connection's task stops although the connection itself would go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    HeaderTimeout,
    IdleTimeout,
    WriteStall,
    Evicted,
    /// The client closed its side while a request of its was under way.
    ClientLeft,
    /// It was ending already and took too long about it.
    Overdue,
}

/// The next action of a connection's task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Finish what is being answered and end.
    Drain,
    /// Say goodbye as one does in HTTP/2, and end: it has been idle for too long.
    Retire,
    End(End),
    /// Nothing; look again at this time at the latest.
    Wait(Instant),
}

/// A connection that can be evicted, and since when. All variants but the last cost no client an
/// answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Dispensable {
    /// It has had no request since this time.
    Quiet(Instant),
    /// It has only requests whose bodies are incomplete. A client that sends them a byte at a time,
    /// on every possible connection, must not lock others out until those time out.
    Receiving(Instant),
    /// Its client does not read.
    Blocked(Instant),
}

#[derive(Debug)]
pub(super) struct Activity {
    patience: Patience,
    state: Mutex<State>,
    /// Told whenever this connection might give way to another.
    room: Arc<Notify>,
}

#[derive(Debug)]
struct State {
    /// HTTP/2 frames come without a request too, so bytes say nothing about headers.
    multiplexed: bool,
    /// From the first byte of its header being understood to the last byte of its answer being
    /// handed to hyper.
    requests: usize,
    /// Requests whose bodies are incomplete: nothing is computed for them yet.
    receiving: usize,
    /// Since when `requests` is 0; meaningless otherwise.
    quiet_since: Instant,
    /// When a request last began.
    last_began: Instant,
    /// Without a request under way: one has begun to come, or is due because the connection is new.
    header_due: bool,
    /// Since when the socket has taken nothing of what is to be written.
    write_blocked: Option<Instant>,
    /// Input has come that is not part of a request, or is part of one that is not read to its end:
    /// the client may still be sending bytes that will never be read.
    input_unread: bool,
    lingering: Option<Instant>,
    make_room: bool,
    drain: Option<Drain>,
    /// Wakes the connection's task.
    waker: Option<Waker>,
}

#[derive(Debug)]
struct Drain {
    since: Instant,
    is_ordered: bool,
}

impl Activity {
    pub fn new(patience: Patience, room: Arc<Notify>) -> Self {
        let state = State {
            multiplexed: false,
            requests: 0,
            receiving: 0,
            quiet_since: Instant::now(),
            last_began: Instant::now(),
            header_due: true,
            write_blocked: None,
            input_unread: false,
            lingering: None,
            make_room: false,
            drain: None,
            waker: None,
        };
        Self { patience, state: Mutex::new(state), room }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is one assignment or two: a panic elsewhere leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handshake is over: the clock of the first header starts.
    pub fn opened(&self) {
        self.state().quiet_since = Instant::now();
    }

    pub fn speaks_http2(&self) {
        let mut state = self.state();
        state.multiplexed = true;
        state.header_due = false;
    }

    pub fn bytes_came(&self) {
        let mut state = self.state();
        if state.requests == 0 && !state.multiplexed {
            state.input_unread = true;
            if !state.header_due {
                state.header_due = true;
                state.quiet_since = Instant::now();
            }
        }
    }

    /// A request is under way until what is returned is dropped.
    pub fn request_began(self: &Arc<Self>) -> UnderWay {
        let mut state = self.state();
        state.requests += 1;
        state.last_began = Instant::now();
        state.header_due = false;
        state.input_unread = false;
        UnderWay(self.clone())
    }

    fn request_ended(&self) {
        let mut state = self.state();
        state.requests -= 1;
        if state.requests == 0 {
            state.quiet_since = Instant::now();
            if state.drain.is_some() {
                state.wake();
            }
        }
        drop(state);
        self.room.notify_one();
    }

    pub fn has_request(&self) -> bool {
        self.state().requests > 0
    }

    /// A request's body is being received until what is returned is dropped.
    pub fn body_began(self: &Arc<Self>) -> Receiving {
        self.state().receiving += 1;
        Receiving(self.clone())
    }

    /// An answer is on its way while its request's body is not read to the end.
    pub fn input_is_unread(&self) {
        self.state().input_unread = true;
    }

    /// Whether to read on after the last byte has been written: asked when the connection is about
    /// to close.
    pub fn lingers(&self) -> bool {
        let mut state = self.state();
        let lingers = !state.multiplexed && state.input_unread;
        if lingers && state.lingering.is_none() {
            state.lingering = Some(Instant::now());
        }
        lingers
    }

    /// The socket takes nothing. True when that has lasted so long that the kernel should be asked
    /// directly: it says "writable" only when a good part of its buffer is free, which a slow but
    /// steady reader may take minutes for.
    pub fn write_is_blocked(&self) -> bool {
        let now = Instant::now();
        let since = *self.state().write_blocked.get_or_insert(now);
        now >= since + self.patience.write_stall / 2
    }

    pub fn write_moved(&self) {
        self.state().write_blocked = None;
    }

    /// Whether this connection could give way to another; the least goes first.
    pub fn dispensable(&self) -> Option<Dispensable> {
        self.state().dispensable(Instant::now())
    }

    pub fn make_room(&self) {
        let mut state = self.state();
        state.make_room = true;
        state.wake();
    }

    pub fn drain(&self) {
        let mut state = self.state();
        state.drain.get_or_insert(Drain { since: Instant::now(), is_ordered: false });
        state.wake();
    }

    /// The action of the connection's task at `now`. `waker` wakes it when an order comes before
    /// its time.
    pub fn review(&self, now: Instant, waker: &Waker) -> Verdict {
        let mut state = self.state();
        if !state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            state.waker = Some(waker.clone());
        }
        if let Some(drain) = &mut state.drain
            && !drain.is_ordered
        {
            drain.is_ordered = true;
            return Verdict::Drain;
        }
        if state.make_room {
            if state.dispensable(now).is_some() {
                return Verdict::End(End::Evicted);
            }
            // A request came first: it will have to be another connection.
            state.make_room = false;
            self.room.notify_one();
        }
        match state.deadline(self.patience) {
            Some((at, End::IdleTimeout)) if at <= now && state.multiplexed => {
                state.drain = Some(Drain { since: now, is_ordered: true });
                Verdict::Retire
            }
            Some((at, end)) if at <= now => Verdict::End(end),
            Some((at, End::WriteStall)) => {
                // Half-way the task is woken so that the socket is tried once more: see
                // `write_is_blocked`.
                let half_way = at - self.patience.write_stall / 2;
                Verdict::Wait(if half_way > now { half_way } else { at })
            }
            Some((at, _)) => Verdict::Wait(at),
            // The end of a request may not wake this task, so it looks by itself now and then.
            None => Verdict::Wait(now + self.patience.header.min(self.patience.idle)),
        }
    }
}

impl State {
    fn dispensable(&self, now: Instant) -> Option<Dispensable> {
        if let Some(since) = self.write_blocked {
            (since + READER_PAUSE <= now).then_some(Dispensable::Blocked(since))
        } else if self.requests == 0 {
            Some(Dispensable::Quiet(self.quiet_since))
        } else {
            (self.receiving == self.requests).then_some(Dispensable::Receiving(self.last_began))
        }
    }

    fn deadline(&self, patience: Patience) -> Option<(Instant, End)> {
        if let Some(since) = self.lingering {
            return Some((since + LINGER, End::Overdue));
        }
        if let Some(since) = self.write_blocked {
            return Some((since + patience.write_stall, End::WriteStall));
        }
        if self.requests > 0 {
            return None;
        }
        if let Some(drain) = &self.drain {
            return Some((drain.since.max(self.quiet_since) + PARTING, End::Overdue));
        }
        Some(if self.header_due {
            (self.quiet_since + patience.header, End::HeaderTimeout)
        } else {
            (self.quiet_since + patience.idle, End::IdleTimeout)
        })
    }

    fn wake(&self) {
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }
}

/// One request in flight on the connection.
#[derive(Debug)]
pub(super) struct UnderWay(Arc<Activity>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.request_ended();
    }
}

/// One body that has not come to its end.
#[derive(Debug)]
pub(super) struct Receiving(Arc<Activity>);

impl Drop for Receiving {
    fn drop(&mut self) {
        self.0.state().receiving -= 1;
    }
}
