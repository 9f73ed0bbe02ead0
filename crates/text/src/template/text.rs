//! A text in the making, as long as there is room for it.

use std::fmt;

use minijinja::{Error, Value};

use super::ledger;

/// Room that is asked for at a time.
const STEP_BYTES: usize = 4096;

#[derive(Debug, Default)]
pub struct Text {
    out: String,
    /// How long it may get before more room is asked for.
    room: usize,
    refusal: Option<Error>,
}

impl Text {
    pub fn push(&mut self, text: &str) -> Result<(), Error> {
        let len = self.out.len() + text.len();
        if len > self.room {
            // A string grows by half of itself at least, and is copied once into its value.
            let room = (len + len / 2).max(STEP_BYTES);
            ledger::spend(room - self.room)?;
            ledger::make_room(room)?;
            self.room = room;
        }
        self.out.push_str(text);
        Ok(())
    }

    pub fn push_fmt(&mut self, arguments: fmt::Arguments<'_>) -> Result<(), Error> {
        let written = fmt::Write::write_fmt(self, arguments);
        match self.refusal.take() {
            Some(refusal) => Err(refusal),
            None => written.map_err(Error::from),
        }
    }

    pub fn into_string(self) -> String {
        self.out
    }
}

impl fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text).map_err(|refusal| {
            self.refusal = Some(refusal);
            fmt::Error
        })
    }
}

/// How long a value is when it is shown, as far as there is room for so much.
pub fn shown_len(value: &Value) -> Result<usize, Error> {
    struct Counted {
        len: usize,
        refusal: Option<Error>,
    }
    impl fmt::Write for Counted {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.len += text.len();
            let counted = ledger::spend(text.len()).and_then(|()| ledger::make_room(self.len));
            counted.map_err(|refusal| {
                self.refusal = Some(refusal);
                fmt::Error
            })
        }
    }
    if let Some(text) = value.as_str() {
        return Ok(text.len());
    }
    let mut counted = Counted { len: 0, refusal: None };
    let written = fmt::Write::write_fmt(&mut counted, format_args!("{value}"));
    match counted.refusal {
        Some(refusal) => Err(refusal),
        None => written.map(|()| counted.len).map_err(Error::from),
    }
}
