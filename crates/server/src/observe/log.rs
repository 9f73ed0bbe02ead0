//! The log: whole lines on standard error, as text or as JSON, written by its own thread.
//!
//! A reader that does not read blocks that thread only: lines that find the queue full are dropped
//! and counted, and the log reports the number when it continues. Every string passes through
//! [`escape`].

use std::fmt::Write as _;
use std::io::Write;
use std::str::FromStr;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use super::escape;
use super::registry::Counter;

/// Lines that wait to be written.
const QUEUE_LINES: usize = 4096;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("log format must be text or json, not {other:?}")),
        }
    }
}

/// How much a line matters; a log shows its own level and what matters more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Debug,
    #[default]
    Info,
    Warn,
    Error,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let levels = [Self::Debug, Self::Info, Self::Warn, Self::Error];
        let found = levels.into_iter().find(|level| level.name() == text);
        found.ok_or_else(|| format!("log level must be debug, info, warn or error, not {text:?}"))
    }
}

/// One thing that a line says beside its message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Field<'a> {
    Text(&'a str),
    Count(u64),
    Signed(i64),
    Real(f64),
    Flag(bool),
}

macro_rules! field_from {
    ($($type:ty => $variant:ident as $as:ty),* $(,)?) => {
        $(impl From<$type> for Field<'_> {
            fn from(value: $type) -> Self {
                Self::$variant(value as $as)
            }
        })*
    };
}

field_from!(u16 => Count as u64, u32 => Count as u64, u64 => Count as u64, usize => Count as u64,
    i32 => Signed as i64, i64 => Signed as i64, f64 => Real as f64, bool => Flag as bool);

impl<'a> From<&'a str> for Field<'a> {
    fn from(value: &'a str) -> Self {
        Self::Text(value)
    }
}

impl<'a> From<&'a String> for Field<'a> {
    fn from(value: &'a String) -> Self {
        Self::Text(value)
    }
}

/// A duration is logged in milliseconds, to the microsecond.
impl From<Duration> for Field<'_> {
    fn from(value: Duration) -> Self {
        Self::Real((value.as_secs_f64() * 1e6).round() / 1e3)
    }
}

#[derive(Debug)]
enum Message {
    Line(String),
    /// Answered when all lines before it are written.
    Flush(SyncSender<()>),
}

/// A handle on the log; clones write to the same one.
#[derive(Clone, Debug)]
pub struct Log {
    format: LogFormat,
    level: Level,
    /// The writer's queue; none if nothing is to be written.
    queue: Option<SyncSender<Message>>,
    dropped: Counter,
}

impl Log {
    /// A log on standard error.
    pub fn start(format: LogFormat, level: Level) -> std::io::Result<Log> {
        Self::to(format, level, std::io::stderr())
    }

    /// A log on anything else.
    pub fn to(format: LogFormat, level: Level, writer: impl Write + Send + 'static) -> std::io::Result<Log> {
        let (sender, receiver) = sync_channel(QUEUE_LINES);
        let dropped = Counter::default();
        let counter = dropped.clone();
        std::thread::Builder::new()
            .name("folio-log".into())
            .spawn(move || write_lines(&receiver, writer, format, &counter))?;
        Ok(Log { format, level, queue: Some(sender), dropped })
    }

    /// A log that discards its lines.
    pub fn off() -> Log {
        Log { format: LogFormat::Text, level: Level::Error, queue: None, dropped: Counter::default() }
    }

    pub fn debug(&self, message: &str, fields: &[(&str, Field<'_>)]) {
        self.write(Level::Debug, message, fields);
    }

    pub fn info(&self, message: &str, fields: &[(&str, Field<'_>)]) {
        self.write(Level::Info, message, fields);
    }

    pub fn warn(&self, message: &str, fields: &[(&str, Field<'_>)]) {
        self.write(Level::Warn, message, fields);
    }

    pub fn error(&self, message: &str, fields: &[(&str, Field<'_>)]) {
        self.write(Level::Error, message, fields);
    }

    /// True if lines of this level are shown.
    pub fn shows(&self, level: Level) -> bool {
        self.queue.is_some() && level >= self.level
    }

    /// Queues a line without waiting; it is dropped if the queue is full.
    pub fn write(&self, level: Level, message: &str, fields: &[(&str, Field<'_>)]) {
        let Some(queue) = self.queue.as_ref().filter(|_| level >= self.level) else { return };
        let line = line(self.format, SystemTime::now(), level, message, fields);
        if queue.try_send(Message::Line(line)).is_err() {
            self.dropped.add(1);
        }
    }

    /// Lines that found the queue full.
    pub fn dropped(&self) -> u64 {
        self.dropped.get()
    }

    /// Waits, at most for `most`, until all lines so far are written. Blocks its thread.
    pub fn flush(&self, most: Duration) {
        let Some(queue) = &self.queue else { return };
        let deadline = Instant::now() + most;
        let (sender, done) = sync_channel(1);
        let mut message = Message::Flush(sender);
        while let Err(TrySendError::Full(back)) = queue.try_send(message) {
            if Instant::now() >= deadline {
                return;
            }
            message = back;
            std::thread::sleep(Duration::from_millis(5));
        }
        // A reader that does not read is not waited for.
        let _ = done.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

/// The thread's work: one write a line, so that lines of several processes on one terminal do not
/// mix.
fn write_lines(queue: &Receiver<Message>, mut writer: impl Write, format: LogFormat, dropped: &Counter) {
    let mut reported = 0;
    while let Ok(message) = queue.recv() {
        // An error of the log itself cannot be reported.
        match message {
            Message::Line(text) => drop(writer.write_all(text.as_bytes())),
            Message::Flush(done) => {
                let _ = writer.flush();
                let _ = done.try_send(());
            }
        }
        let lost = dropped.get();
        if lost > reported {
            let fields = [("lines", (lost - reported).into())];
            let text = line(format, SystemTime::now(), Level::Warn, "log lines were dropped", &fields);
            let _ = writer.write_all(text.as_bytes());
            reported = lost;
        }
    }
}

fn line(format: LogFormat, time: SystemTime, level: Level, message: &str, fields: &[(&str, Field<'_>)]) -> String {
    let mut out = String::with_capacity(256);
    match format {
        LogFormat::Json => {
            out.push_str("{\"time\":\"");
            escape::timestamp(&mut out, time);
            // Writing to a string cannot fail.
            let _ = write!(out, "\",\"level\":\"{}\",\"message\":", level.name());
            escape::json(&mut out, message);
        }
        LogFormat::Text => {
            escape::timestamp(&mut out, time);
            let _ = write!(out, " {:<5} ", level.name());
            // A message of our own reads as a sentence; one with anything odd in it is quoted.
            let is_plain = |char: char| (' '..='~').contains(&char) && char != '"' && char != '\\';
            if message.chars().all(is_plain) { out.push_str(message) } else { escape::json(&mut out, message) }
        }
    }
    for (name, value) in fields {
        match format {
            LogFormat::Json => {
                out.push(',');
                escape::json(&mut out, name);
                out.push(':');
            }
            LogFormat::Text => {
                out.push(' ');
                escape::word(&mut out, name);
                out.push('=');
            }
        }
        match *value {
            Field::Text(text) if format == LogFormat::Json => escape::json(&mut out, text),
            Field::Text(text) => escape::word(&mut out, text),
            Field::Count(count) => drop(write!(out, "{count}")),
            Field::Signed(number) => drop(write!(out, "{number}")),
            Field::Real(number) if number.is_finite() => drop(write!(out, "{number}")),
            Field::Real(_) => out.push_str("null"),
            Field::Flag(flag) => drop(write!(out, "{flag}")),
        }
    }
    out.push_str(if format == LogFormat::Json { "}\n" } else { "\n" });
    out
}

#[cfg(test)]
pub mod tests;
