//! The number of requests in flight, of all callers and of each, and its limits.
//!
//! A request counts from the end of its header to the end of its answer's body: the permit lives in
//! that body and is returned when the body ends or is dropped. A request beyond the limit is
//! refused before its body is read.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::callers::Caller;
use crate::body_memory::Kept;

#[derive(Debug)]
pub(super) struct InFlight {
    now: Arc<AtomicUsize>,
    most: usize,
}

impl InFlight {
    pub fn new(most: usize) -> Self {
        Self { now: Arc::default(), most }
    }

    pub fn now(&self) -> usize {
        self.now.load(Ordering::Relaxed)
    }

    /// A permit for one more request of this caller; or the limit, its own or that of all, that is
    /// reached.
    pub fn take(&self, caller: &Caller) -> Result<Permit, usize> {
        let own = Place::take(&caller.in_flight, caller.max_in_flight)?;
        let common = Place::take(&self.now, self.most)?;
        Ok(Permit { _own: own, _common: common, body: Kept::default() })
    }
}

/// A view of the counts, for the routes that report them.
#[derive(Clone, Debug)]
pub struct InFlightCounts {
    all: Arc<AtomicUsize>,
    by_key: Vec<(Arc<str>, Arc<AtomicUsize>)>,
}

impl InFlightCounts {
    pub(super) fn new<'a>(all: &InFlight, callers: impl Iterator<Item = &'a Caller>) -> Self {
        let by_key = callers.map(|caller| (Arc::clone(&caller.name), Arc::clone(&caller.in_flight)));
        Self { all: Arc::clone(&all.now), by_key: by_key.collect() }
    }

    pub fn all(&self) -> usize {
        self.all.load(Ordering::Relaxed)
    }

    /// By the name of the requests' key.
    pub fn by_key(&self) -> Vec<(Arc<str>, usize)> {
        self.by_key.iter().map(|(name, count)| (Arc::clone(name), count.load(Ordering::Relaxed))).collect()
    }
}

/// Held as long as a request is in flight.
#[derive(Debug)]
pub(super) struct Permit {
    _own: Place,
    _common: Place,
    /// The memory of its body.
    pub body: Kept,
}

/// One unit of a counter, returned on drop.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(taken: &Arc<AtomicUsize>, most: usize) -> Result<Self, usize> {
        // SeqCst, with `Lifecycle`: a drain that then sees no request in flight has missed none.
        let more = |taken| if taken < most { Some(taken + 1) } else { None };
        match taken.fetch_update(Ordering::SeqCst, Ordering::Relaxed, more) {
            Ok(_) => Ok(Self(taken.clone())),
            Err(_) => Err(most),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let before = self.0.fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "a place is given back once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_limits_hold_and_a_refusal_takes_no_place() {
        let all = InFlight::new(3);
        let (alice, bob) = (Caller::anonymous(2), Caller::anonymous(5));
        let mut permits = vec![all.take(&alice).unwrap(), all.take(&alice).unwrap()];
        assert_eq!(all.take(&alice).unwrap_err(), 2, "alice's own");
        permits.push(all.take(&bob).unwrap());
        assert_eq!(all.take(&bob).unwrap_err(), 3, "that of all");
        let count = |caller: &Caller| caller.in_flight.load(Ordering::Relaxed);
        assert_eq!((all.now(), count(&alice), count(&bob)), (3, 2, 1));
        permits.remove(0);
        permits.push(all.take(&bob).unwrap());
        drop(permits);
        assert_eq!((all.now(), count(&alice), count(&bob)), (0, 0, 0));
    }

    #[test]
    fn many_threads_never_exceed_the_limit() {
        let all = InFlight::new(4);
        let callers: Vec<_> = (0..8).map(|_| Caller::anonymous(4)).collect();
        std::thread::scope(|scope| {
            for caller in &callers {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let permit = all.take(caller);
                        assert!(all.now() <= 4);
                        drop(permit);
                    }
                });
            }
        });
        assert_eq!(all.now(), 0);
    }
}
