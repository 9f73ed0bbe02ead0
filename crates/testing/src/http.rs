//! HTTP/1.1 by hand over any byte stream, because tests do what no decent client does: leave in the
//! middle, read a few bytes at a time, stop reading.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

/// Nothing takes longer than this unless the server has forgotten its client.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// A request with a body of JSON after which the server closes the connection. Each of `fields` has
/// the end of its line.
pub fn request(method: &str, path: &str, fields: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         {fields}content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// One request on a connection of its own, to this machine.
pub fn exchange(port: u16, method: &str, path: &str, fields: &str, body: &[u8]) -> io::Result<Reply> {
    let mut connection = Connection::open(port)?;
    connection.send(&request(method, path, fields, body))?;
    connection.reply()
}

/// How a client reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    pub bytes: usize,
    pub pause: Duration,
}

impl Pace {
    pub const FULL: Self = Self { bytes: 32 << 10, pause: Duration::ZERO };
}

#[derive(Debug)]
pub struct Connection<S> {
    pub stream: S,
    pace: Pace,
    /// Received, but not used.
    ahead: Vec<u8>,
    /// All bytes that came.
    pub received: usize,
    /// Whether another request may follow the last answer.
    pub keeps: bool,
}

/// An answer, as far as it came.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// The status line and the fields, without the empty line behind them.
    pub head: String,
    pub body: Vec<u8>,
    /// Whether all came that the head promised.
    pub is_whole: bool,
    /// When its first bytes were there.
    pub began: Instant,
}

impl Reply {
    /// The first field of that name.
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut fields = self.head.split("\r\n").skip(1).filter_map(|line| line.split_once(':'));
        fields.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// How long the body is.
enum Framing {
    Length(usize),
    Chunked,
    UntilClosed,
}

impl Connection<TcpStream> {
    /// A connection to this machine.
    pub fn open(port: u16) -> io::Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_nodelay(true)?;
        Ok(Self::over(stream, Pace::FULL))
    }
}

impl<S: Read + Write> Connection<S> {
    pub fn over(stream: S, pace: Pace) -> Self {
        Self { stream, pace, ahead: Vec::new(), received: 0, keeps: true }
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// One answer to its end, or to where the connection ended.
    pub fn reply(&mut self) -> io::Result<Reply> {
        if self.ahead.is_empty() {
            self.fill()?;
        }
        let began = Instant::now();
        let head = self.head()?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.ok_or_else(|| io::Error::other(format!("no status in {head:?}")))?;
        let mut reply = Reply { status, head, body: Vec::new(), is_whole: true, began };
        let is_chunked = reply.field("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked"));
        let framing = match reply.field("content-length") {
            _ if is_chunked => Framing::Chunked,
            Some(length) => Framing::Length(length.parse().map_err(io::Error::other)?),
            None => Framing::UntilClosed,
        };
        let read = match framing {
            Framing::Length(length) => self.take(length, &mut reply.body),
            Framing::Chunked => self.chunks(&mut reply.body),
            Framing::UntilClosed => self.rest(&mut reply.body),
        };
        // A connection that breaks leaves what came before.
        match read {
            Ok(()) => {}
            Err(error) if is_break(&error) => reply.is_whole = false,
            Err(error) => return Err(error),
        }
        let closes = reply.field("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
        self.keeps = reply.is_whole && !closes && !matches!(framing, Framing::UntilClosed);
        Ok(reply)
    }

    /// Reads until this many bytes have come since the connection was opened.
    pub fn receive(&mut self, bytes: usize) -> io::Result<()> {
        while self.received < bytes {
            self.fill()?;
        }
        Ok(())
    }

    fn head(&mut self) -> io::Result<String> {
        let mut head = self.until(b"\r\n\r\n")?;
        head.truncate(head.len() - 4);
        String::from_utf8(head).map_err(io::Error::other)
    }

    fn chunks(&mut self, body: &mut Vec<u8>) -> io::Result<()> {
        loop {
            let line = self.until(b"\r\n")?;
            let digits = std::str::from_utf8(&line).map_err(io::Error::other)?.trim();
            let size = usize::from_str_radix(digits, 16).map_err(io::Error::other)?;
            self.take(size, body)?;
            self.take(2, &mut Vec::new())?;
            if size == 0 {
                return Ok(());
            }
        }
    }

    /// Takes all up to and with `end`.
    pub fn until(&mut self, end: &[u8]) -> io::Result<Vec<u8>> {
        loop {
            if let Some(at) = self.ahead.windows(end.len()).position(|window| window == end) {
                return Ok(self.ahead.drain(..at + end.len()).collect());
            }
            self.fill()?;
        }
    }

    fn take(&mut self, bytes: usize, into: &mut Vec<u8>) -> io::Result<()> {
        let end = into.len() + bytes;
        while into.len() < end {
            if self.ahead.is_empty() {
                self.fill()?;
            }
            let part = self.ahead.len().min(end - into.len());
            into.extend(self.ahead.drain(..part));
        }
        Ok(())
    }

    fn rest(&mut self, into: &mut Vec<u8>) -> io::Result<()> {
        loop {
            into.append(&mut self.ahead);
            match self.fill() {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            }
        }
    }

    fn fill(&mut self) -> io::Result<()> {
        if !self.pace.pause.is_zero() {
            std::thread::sleep(self.pace.pause);
        }
        let start = self.ahead.len();
        self.ahead.resize(start + self.pace.bytes, 0);
        let read = self.stream.read(&mut self.ahead[start..]);
        self.ahead.truncate(start + *read.as_ref().unwrap_or(&0));
        match read? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => {
                self.received += bytes;
                Ok(())
            }
        }
    }
}

/// Whether the other side has ended the connection, in order or not.
pub fn is_break(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answers of a server, and a place for the requests.
    struct Script(io::Cursor<Vec<u8>>, Vec<u8>);

    impl Read for Script {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn over(text: &str, bytes: usize) -> Connection<Script> {
        let script = Script(io::Cursor::new(text.as_bytes().to_vec()), Vec::new());
        Connection::over(script, Pace { bytes, ..Pace::FULL })
    }

    #[test]
    fn answers_follow_each_other_however_they_are_framed() {
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 404 x\r\ntransfer-encoding: Chunked\r\n\r\n\
                    3\r\nabc\r\n2\r\nde\r\n0\r\n\r\nHTTP/1.1 500 x\r\nConnection: close\r\n\r\nend";
        for bytes in [1, 2, 7, 1000] {
            let mut connection = over(text, bytes);
            let expected = [(200, "abc", "3", true), (404, "abcde", "none", true), (500, "end", "none", false)];
            for (status, body, length, keeps) in expected {
                let reply = connection.reply().expect("an answer");
                assert_eq!((reply.status, reply.text().as_str(), reply.is_whole), (status, body, true));
                assert_eq!(reply.field("content-length").unwrap_or("none"), length);
                assert_eq!(connection.keeps, keeps);
            }
            assert_eq!(connection.received, text.len());
            assert!(is_break(&connection.reply().expect_err("nothing more comes")));
        }
    }

    #[test]
    fn an_answer_that_is_cut_is_not_whole() {
        for text in [
            "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        ] {
            let mut connection = over(text, 1000);
            let reply = connection.reply().expect("the beginning of an answer");
            assert_eq!((reply.text().as_str(), reply.is_whole, connection.keeps), ("abc", false, false));
        }
        assert!(over("SSH-2.0-x\r\n\r\n", 1000).reply().is_err());
    }

    #[test]
    fn requests_say_how_long_they_are() {
        let mut connection = over("", 1);
        connection.send(&request("POST", "/x", "a: b\r\n", b"{}")).expect("taken");
        let expected = "POST /x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
                        a: b\r\ncontent-length: 2\r\n\r\n{}";
        assert_eq!(String::from_utf8_lossy(&connection.stream.1), expected);
    }
}
