//! The terminal of a chat: lines that are typed or piped in, the settings while answers come, and
//! the signals that ask a program to stop. It knows no model.

mod lines;
mod signals;
mod state;

pub use lines::{Line, Lines, Source};
pub use signals::{Signal, Signals};
pub use state::Terminal;
