//! The end of an HTTP/1.1 answer's body: by its chunks, by its length, or with the connection.

use anyhow::{Result, bail};

/// Longest line between chunks, extensions and trailers included.
const MAX_LINE_BYTES: usize = 8 << 10;

/// The rest of a body.
#[derive(Debug)]
pub enum Framing {
    Chunked(Chunked),
    /// This many bytes.
    Length(u64),
    UntilClose,
}

#[derive(Debug)]
pub struct Chunked {
    expects: Expects,
    /// Bytes of the current line, to bound it.
    line_bytes: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Expects {
    /// The size of a chunk; none before its first digit.
    Size(Option<u64>),
    /// The rest of the line after a chunk's size.
    SizeEnd(u64),
    Data(u64),
    /// The line end after a chunk.
    DataEnd,
    /// A trailer, or the empty line that ends all.
    Trailer,
    Nothing,
}

impl Framing {
    pub fn chunked() -> Self {
        Self::Chunked(Chunked { expects: Expects::Size(None), line_bytes: 0 })
    }

    pub fn is_done(&self) -> bool {
        match self {
            Self::Chunked(chunked) => chunked.expects == Expects::Nothing,
            Self::Length(left) => *left == 0,
            Self::UntilClose => false,
        }
    }

    /// Appends the part of the body in `input` to `body`; returns the number of used bytes, all of
    /// them unless the body ends within.
    pub fn decode(&mut self, input: &[u8], body: &mut Vec<u8>) -> Result<usize> {
        match self {
            Self::Chunked(chunked) => chunked.decode(input, body),
            Self::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                body.extend_from_slice(&input[..taken]);
                *left -= taken as u64;
                Ok(taken)
            }
            Self::UntilClose => {
                body.extend_from_slice(input);
                Ok(input.len())
            }
        }
    }
}

impl Chunked {
    fn decode(&mut self, input: &[u8], body: &mut Vec<u8>) -> Result<usize> {
        let mut at = 0;
        while at < input.len() && self.expects != Expects::Nothing {
            if let Expects::Data(left) = &mut self.expects {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len() - at);
                body.extend_from_slice(&input[at..at + taken]);
                at += taken;
                *left -= taken as u64;
                if *left == 0 {
                    self.expects = Expects::DataEnd;
                }
                continue;
            }
            self.line_byte(input[at])?;
            at += 1;
        }
        Ok(at)
    }

    /// A byte outside of chunks. A CR is skipped anywhere, so that LF alone ends a line.
    fn line_byte(&mut self, byte: u8) -> Result<()> {
        self.line_bytes += 1;
        if self.line_bytes > MAX_LINE_BYTES {
            bail!("a line between two chunks is longer than {MAX_LINE_BYTES} bytes");
        }
        if byte == b'\n' {
            let was_empty = self.line_bytes <= 2;
            self.line_bytes = 0;
            self.expects = match self.expects {
                Expects::Size(Some(0)) | Expects::SizeEnd(0) => Expects::Trailer,
                Expects::Size(Some(size)) | Expects::SizeEnd(size) => Expects::Data(size),
                Expects::DataEnd => Expects::Size(None),
                Expects::Trailer if was_empty => Expects::Nothing,
                Expects::Trailer => Expects::Trailer,
                Expects::Size(None) | Expects::Data(_) | Expects::Nothing => bail!("a chunk has no size"),
            };
            return Ok(());
        }
        match self.expects {
            _ if byte == b'\r' => {}
            Expects::Size(size) => match (char::from(byte).to_digit(16), size) {
                (Some(digit), size) => {
                    let grown = size.unwrap_or(0).checked_mul(16).map(|size| size | u64::from(digit));
                    let Some(grown) = grown else { bail!("the size of a chunk is too large") };
                    self.expects = Expects::Size(Some(grown));
                }
                (None, Some(size)) if matches!(byte, b';' | b' ' | b'\t') => self.expects = Expects::SizeEnd(size),
                _ => bail!("expected the size of a chunk, found byte {byte:#04x}"),
            },
            Expects::DataEnd => bail!("a chunk is longer than its size"),
            Expects::SizeEnd(_) | Expects::Trailer | Expects::Data(_) | Expects::Nothing => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::rng::Rng;

    fn decode<'a>(mut framing: Framing, pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<(Vec<u8>, usize, bool)> {
        let (mut body, mut used) = (Vec::new(), 0);
        for piece in pieces {
            used += framing.decode(piece, &mut body)?;
        }
        Ok((body, used, framing.is_done()))
    }

    const CHUNKS: &[u8] = b"4\r\nWiki\r\n6;name=value\r\npedia \r\nE\r\nin \r\n\r\nchunks.\r\n0\r\nTrailer: x\r\n\r\n";

    #[test]
    fn chunks_in_any_split() {
        let expect = b"Wikipedia in \r\n\r\nchunks.".to_vec();
        let whole = (expect, CHUNKS.len(), true);
        assert_eq!(decode(Framing::chunked(), [CHUNKS]).expect("valid"), whole);
        assert_eq!(decode(Framing::chunked(), CHUNKS.chunks(1)).expect("valid"), whole);
        let mut rng = Rng::new(2);
        for _ in 0..300 {
            let mut rest = CHUNKS;
            let mut pieces = Vec::new();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rng.between(1, rest.len().min(12)));
                pieces.push(piece);
                rest = after;
            }
            assert_eq!(decode(Framing::chunked(), pieces).expect("valid"), whole);
        }
    }

    #[test]
    fn what_follows_a_body_is_left_alone() {
        let both = [CHUNKS, b"HTTP/1.1 200 OK"].concat();
        assert_eq!(decode(Framing::chunked(), [both.as_slice()]).expect("valid").1, CHUNKS.len());
        let found = decode(Framing::Length(3), [b"ab".as_slice(), b"cd"]).expect("valid");
        assert_eq!(found, (b"abc".to_vec(), 3, true));
        assert!(!decode(Framing::UntilClose, [b"ab".as_slice()]).expect("valid").2);
    }

    #[test]
    fn bad_chunks_are_refused_and_short_ones_are_not_done() {
        let long = [b"1;".as_slice(), &vec![b'x'; MAX_LINE_BYTES]].concat();
        for bad in [b"\r\n".as_slice(), b"g\r\n", b"-1\r\n", b"1\r\nab\r\n", b"10000000000000000\r\n", &long] {
            assert!(decode(Framing::chunked(), [bad]).is_err(), "{}", String::from_utf8_lossy(bad));
        }
        for end in 0..CHUNKS.len() {
            assert!(!decode(Framing::chunked(), [&CHUNKS[..end]]).expect("valid so far").2, "{end}");
        }
    }
}
