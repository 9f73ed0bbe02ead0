//! A sign of life from the middle of an operation.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Reports whether anything was computed since the last question. All threads may beat at every
/// part of an operation: until the next question, a beat only reads a cache line that all of them
/// share.
#[derive(Clone, Debug, Default)]
pub struct Pulse(Arc<Line>);

/// On cache lines of its own: neighbouring data might be written all the time.
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
