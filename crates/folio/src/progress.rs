//! Progress bars of measurements: on standard error, and only where that is a terminal.

use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

use folio_measure::Progress;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};

/// One bar at a time, a new one for every stage.
pub struct Bar {
    style: ProgressStyle,
    bar: Mutex<ProgressBar>,
}

impl Bar {
    /// A template of indicatif, which may show a stage's `{rate}`, too.
    pub fn new(template: &'static str) -> Self {
        let style = ProgressStyle::with_template(template).expect("the template is well formed");
        let style = style.with_key("rate", |state: &ProgressState, out: &mut dyn Write| {
            // A line that cannot be drawn is not worth an error.
            let _ = write!(out, "{:.1}/s", state.per_sec());
        });
        Self { style, bar: Mutex::new(ProgressBar::hidden()) }
    }

    fn replace(&self, bar: ProgressBar) {
        std::mem::replace(&mut *self.bar.lock().unwrap_or_else(PoisonError::into_inner), bar).finish_and_clear();
    }
}

impl Progress for Bar {
    fn begin(&self, stage: &str, units: usize) {
        let bar = ProgressBar::new(units as u64).with_style(self.style.clone());
        self.replace(bar.with_message(stage.to_owned()));
    }

    fn advance(&self, units: usize) {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner).inc(units as u64);
    }

    fn note(&self, text: &str) {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner).set_message(text.to_owned());
    }

    fn end(&self) {
        self.replace(ProgressBar::hidden());
    }
}

impl Drop for Bar {
    /// A measurement that fails ends within a stage.
    fn drop(&mut self) {
        self.end();
    }
}
