//! Tests of the lines' format, and of a reader that does not read.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::UNIX_EPOCH;

use serde_json::Value;

use super::*;

/// A place to write to, which can be shut.
#[derive(Clone, Default)]
pub struct Sink(Arc<Shared>);

#[derive(Default)]
pub struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_shut: bool,
    bytes: Vec<u8>,
}

impl Sink {
    pub fn text(&self) -> String {
        String::from_utf8(self.state().bytes.clone()).expect("UTF-8")
    }

    fn shut(&self, is_shut: bool) {
        self.state().is_shut = is_shut;
        self.0.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let waited = self.0.changed.wait_while(self.state(), |state| state.is_shut);
        waited.unwrap_or_else(PoisonError::into_inner).bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

const LONG: Duration = Duration::from_secs(10);

#[test]
fn a_line_is_told_in_both_formats() {
    let time = UNIX_EPOCH + Duration::from_millis(1_500);
    let fields = [
        ("restarts", 3.into()),
        ("key", "a b\nc".into()),
        ("took_ms", Duration::from_micros(1_234).into()),
        ("nan", f64::NAN.into()),
        ("ok", true.into()),
    ];
    let text = line(LogFormat::Text, time, Level::Info, "engine restarted", &fields);
    let expected = "1970-01-01T00:00:01.500Z info  engine restarted restarts=3 key=\"a b\\u000ac\" took_ms=1.234 nan=null \
                    ok=true\n";
    assert_eq!(text, expected);
    let json: Value =
        serde_json::from_str(&line(LogFormat::Json, time, Level::Warn, "x\u{1b}y", &fields)).expect("JSON");
    assert_eq!((&json["time"], &json["level"]), (&"1970-01-01T00:00:01.500Z".into(), &"warn".into()));
    assert_eq!((&json["message"], &json["key"]), (&"x\u{1b}y".into(), &"a b\nc".into()));
    assert_eq!((&json["restarts"], &json["took_ms"], &json["nan"]), (&3.into(), &1.234.into(), &Value::Null));
}

#[test]
fn nothing_from_outside_makes_a_second_line() {
    for format in [LogFormat::Text, LogFormat::Json] {
        let hostile = "x\r\n1970-01-01T00:00:00.000Z error fake";
        let text = line(format, UNIX_EPOCH, Level::Info, hostile, &[(hostile, hostile.into())]);
        assert_eq!((text.matches('\n').count(), text.matches('\r').count()), (1, 0), "{text}");
    }
}

#[test]
fn levels_below_the_log_s_own_are_left_out() {
    let sink = Sink::default();
    let log = Log::to(LogFormat::Text, Level::Warn, sink.clone()).expect("a thread");
    log.debug("no", &[]);
    log.info("no", &[]);
    log.warn("first", &[]);
    log.clone().error("second", &[]);
    log.flush(LONG);
    let text = sink.text();
    assert!(text.contains(" warn  first\n") && text.contains(" error second\n") && !text.contains("no"), "{text}");
    assert!("debug".parse() == Ok(Level::Debug) && "loud".parse::<Level>().is_err());
    assert!("json".parse() == Ok(LogFormat::Json) && "xml".parse::<LogFormat>().is_err());
    Log::off().error("nobody reads this", &[]);
}

#[test]
fn a_reader_that_does_not_read_holds_nobody_up() {
    let sink = Sink::default();
    let log = Log::to(LogFormat::Text, Level::Info, sink.clone()).expect("a thread");
    sink.shut(true);
    for index in 0..QUEUE_LINES + 100 {
        log.info("line", &[("index", index.into())]);
    }
    let dropped = log.dropped();
    // One line may be in the thread's hands.
    assert!((99..=100).contains(&dropped), "{dropped}");
    log.flush(Duration::ZERO);
    sink.shut(false);
    log.flush(LONG);
    let text = sink.text();
    assert_eq!(text.matches(" line index=").count() as u64, (QUEUE_LINES + 100) as u64 - dropped);
    assert!(text.contains(&format!("log lines were dropped lines={dropped}\n")), "{}", &text[..200]);
}
