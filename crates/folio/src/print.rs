//! All that the program prints.
//!
//! The reader of the output may leave early, as in `folio inspect | head -1`. A command runs for
//! its standard output, so it ends then: quietly, and with success, because the reader had all it
//! wanted ([`ReaderLeft`]). Any other failure to write there, such as a full disk, is an error.
//! Standard error is for watching: without a reader the message is dropped and the work goes on.
//! The standard library's macros panic in both cases; clippy keeps them out of every crate that
//! ships.

use std::fmt;
use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};

/// Standard output has no reader any more.
#[derive(Debug)]
pub struct ReaderLeft;

impl fmt::Display for ReaderLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl std::error::Error for ReaderLeft {}

/// Text on standard output, as it is and at once.
macro_rules! out {
    ($($text:tt)*) => { $crate::print::to_stdout(format_args!($($text)*)) };
}

/// A line on standard output.
macro_rules! outln {
    ($($text:tt)*) => { $crate::print::to_stdout(format_args!("{}\n", format_args!($($text)*))) };
}

/// A line on standard error, if it has a reader.
macro_rules! say {
    ($($text:tt)*) => { $crate::print::to_stderr(format_args!($($text)*)) };
}

pub fn to_stdout(text: fmt::Arguments<'_>) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_fmt(text).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderLeft.into()),
        written => written.context("could not write to standard output"),
    }
}

pub fn to_stderr(line: fmt::Arguments<'_>) {
    // In one write, so that lines of several threads do not mix.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}
