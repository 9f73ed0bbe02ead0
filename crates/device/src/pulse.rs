//! A sign of life out of the middle of an operation.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Says whether anything has been done since that was last asked. It may be given by all threads at every part of an operation:
/// as long as nobody asks, they only read a cache line that all of them have.
#[derive(Clone, Debug, Default)]
pub struct Pulse(Arc<Line>);

/// On cache lines of its own: what lies beside it might be written all the time.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicBool);

impl Pulse {
    pub fn beat(&self) {
        let Line(has_beaten) = &*self.0;
        if !has_beaten.load(Ordering::Relaxed) {
            has_beaten.store(true, Ordering::Relaxed);
        }
    }

    /// Whether it has beaten since the last call.
    pub fn take(&self) -> bool {
        self.0.0.swap(false, Ordering::Relaxed)
    }
}
