//! Server-sent events from bytes in arbitrary pieces.
//!
//! Only `data` matters here: other fields and comments are skipped. A line ends with LF, CR or
//! both, an event with an empty line or with the stream.

use anyhow::{Result, bail};

/// Far more than any event of an answer.
const MAX_EVENT_BYTES: usize = 16 << 20;

#[derive(Debug, Default)]
pub struct SseParser {
    /// A line that has not ended yet.
    line: Vec<u8>,
    /// The data of the event that has not ended yet, its lines joined by LF.
    data: Vec<u8>,
    has_data: bool,
    /// Whether the last byte was a CR: an LF that follows belongs to it.
    after_cr: bool,
}

impl SseParser {
    /// Passes the data of every event that ends within `bytes` to `event`.
    pub fn push(&mut self, mut bytes: &[u8], event: &mut impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if std::mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
            bytes = &bytes[1..];
        }
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n' || byte == b'\r') {
            let (line, rest) = bytes.split_at(end);
            if self.line.is_empty() {
                self.line_ended(line, event)?;
            } else {
                let mut whole = std::mem::take(&mut self.line);
                whole.extend_from_slice(line);
                self.line_ended(&whole, event)?;
            }
            bytes = match rest {
                [b'\r', b'\n', rest @ ..] => rest,
                [b'\r'] => {
                    self.after_cr = true;
                    &[]
                }
                _ => &rest[1..],
            };
        }
        if self.line.len() + self.data.len() + bytes.len() > MAX_EVENT_BYTES {
            bail!("an event of the stream is longer than {MAX_EVENT_BYTES} bytes");
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    /// Handles the end of the stream: data without its empty line is an event all the same.
    pub fn finish(&mut self, event: &mut impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let line = std::mem::take(&mut self.line);
        if !line.is_empty() {
            self.line_ended(&line, event)?;
        }
        self.line_ended(&[], event)
    }

    fn line_ended(&mut self, line: &[u8], event: &mut impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        if line.is_empty() {
            if std::mem::take(&mut self.has_data) {
                let result = event(&self.data);
                self.data.clear();
                return result;
            }
            return Ok(());
        }
        let Some(value) = line.strip_prefix(b"data") else { return Ok(()) };
        let value = match value {
            [] => value,
            [b':', b' ', value @ ..] | [b':', value @ ..] => value,
            // Another field with the same beginning.
            _ => return Ok(()),
        };
        if self.has_data {
            self.data.push(b'\n');
        }
        self.data.extend_from_slice(value);
        self.has_data = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::rng::Rng;

    fn events<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
        let mut found = Vec::new();
        let mut collect = |data: &[u8]| {
            found.push(String::from_utf8(data.to_vec()).expect("text"));
            Ok(())
        };
        let mut parser = SseParser::default();
        for piece in pieces {
            parser.push(piece, &mut collect).expect("a short event");
        }
        parser.finish(&mut collect).expect("a short event");
        found
    }

    const STREAM: &str = ": ping\n\ndata: {\"text\":\"é\"}\n\nevent: x\ndata:two\r\ndata:  lines\r\n\r\nid: 4\rdata\r\rdatax: \
                          no\n\n\n\ndata: [DONE]\n\ndata: unfinished";

    #[test]
    fn fields_comments_and_line_ends() {
        let expect = ["{\"text\":\"é\"}", "two\n lines", "", "[DONE]", "unfinished"];
        assert_eq!(events([STREAM.as_bytes()]), expect);
        assert_eq!(events([b"data: a\n\r\n".as_slice()]), ["a"]);
        assert!(events([b"".as_slice(), b"\n\n\n"]).is_empty());
    }

    #[test]
    fn any_split_gives_the_same_events() {
        let whole = events([STREAM.as_bytes()]);
        assert_eq!(events(STREAM.as_bytes().chunks(1)), whole);
        for first in 0..STREAM.len() {
            let (left, right) = STREAM.as_bytes().split_at(first);
            assert_eq!(events([left, right]), whole, "split at {first}");
        }
        let mut rng = Rng::new(11);
        for _ in 0..500 {
            let mut rest = STREAM.as_bytes();
            let mut pieces = Vec::new();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rng.between(0, rest.len().min(9)));
                pieces.push(piece);
                rest = after;
            }
            assert_eq!(events(pieces), whole);
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut parser = SseParser::default();
        let mut ignore = |_: &[u8]| Ok(());
        let megabyte = vec![b'x'; 1 << 20];
        let pushed = (0..20).take_while(|_| parser.push(&megabyte, &mut ignore).is_ok()).count();
        assert_eq!(pushed, 16);
    }
}
