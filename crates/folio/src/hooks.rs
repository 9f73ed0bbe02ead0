//! Output of commands without a log while a model starts: a bar, and warnings on standard error.

use std::fmt::Arguments;

use folio_model::LoadProgress;
use folio_session::Hooks;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Hooks that print.
pub fn hooks() -> Hooks {
    Hooks {
        plan_warning: Some(plan_warning),
        progress: Some(Box::new(loading_bar())),
        load_warning: Some(warning),
        ..Hooks::default()
    }
}

/// Prints a warning about the memory plan.
pub fn plan_warning(line: Arguments<'_>) {
    say!("WARNING: {line}");
}

fn warning(line: Arguments<'_>) {
    say!("warning: {line}");
}

/// Prints the reason of a decision of the engine.
pub fn debug_line(line: Arguments<'_>) {
    say!("debug: {line}");
}

/// A function that draws a bar, if loading takes long enough to be watched. The bar is cleared when
/// the function is dropped.
pub fn loading_bar() -> impl FnMut(LoadProgress) + Send + 'static {
    let style = ProgressStyle::with_template("loading {bar:30} {bytes}/{total_bytes} {eta}");
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(4));
    let bar = bar.with_style(style.expect("the template is well formed"));
    move |progress| {
        bar.set_length(progress.bytes_total);
        bar.set_position(progress.bytes_done);
    }
}
