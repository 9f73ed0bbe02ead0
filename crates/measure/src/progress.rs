//! The progress of a long measurement, for a caller that shows it.

/// A listener. Stages follow one another; each has a number of units, such as requests.
pub trait Progress: Send + Sync {
    /// A stage begins, and the one before it ends.
    fn begin(&self, stage: &str, units: usize);

    /// Units of the stage that are done in addition to those before.
    fn advance(&self, units: usize);

    /// A remark on the work before the next stage begins.
    fn note(&self, text: &str);

    /// The last stage ends.
    fn end(&self);
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Progress for Unwatched {
    fn begin(&self, _: &str, _: usize) {}

    fn advance(&self, _: usize) {}

    fn note(&self, _: &str) {}

    fn end(&self) {}
}
