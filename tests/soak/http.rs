//! HTTP/1.1 by hand, because the soak's clients do what no decent client does: disconnect in the
//! middle, read a few bytes at a time, stop reading.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// No reply takes longer than this unless the server has forgotten its client.
const PATIENCE: Duration = Duration::from_secs(600);

/// A client's way of reading.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    bytes: usize,
    pause: Duration,
    /// Whether the kernel may not read ahead either.
    small_window: bool,
}

impl Pace {
    pub const FULL: Self = Self { bytes: 32 << 10, pause: Duration::ZERO, small_window: false };

    pub fn slow(bytes: usize, pause: Duration) -> Self {
        Self { bytes, pause, small_window: true }
    }
}

pub struct Connection {
    stream: TcpStream,
    pace: Pace,
    /// Received, but not used.
    ahead: Vec<u8>,
    /// Total of received bytes.
    pub received: usize,
    /// Whether another request may follow the last answer.
    pub keeps: bool,
}

/// An answer, as far as it was received.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub body: Vec<u8>,
    /// Whether the length promised by its header was received.
    pub is_whole: bool,
}

/// Length of the body.
enum Framing {
    Length(usize),
    Chunked,
    UntilClosed,
}

impl Connection {
    pub fn open(port: u16, pace: Pace) -> io::Result<Self> {
        let stream =
            if pace.small_window { small_window(port)? } else { TcpStream::connect((Ipv4Addr::LOCALHOST, port))? };
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, pace, ahead: Vec::new(), received: 0, keeps: true })
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Reads one answer to its end, or to the connection's end.
    pub fn reply(&mut self) -> io::Result<Reply> {
        let head = self.head()?;
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let status = status.ok_or_else(|| io::Error::other(format!("no status in {head:?}")))?;
        let header = |name: &str| {
            let mut fields = head.split("\r\n").skip(1).filter_map(|line| line.split_once(':'));
            fields
                .find(|(known, _)| known.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.trim().to_ascii_lowercase())
        };
        let framing = match (header("transfer-encoding"), header("content-length")) {
            (Some(coding), _) if coding == "chunked" => Framing::Chunked,
            (_, Some(length)) => Framing::Length(length.parse().map_err(io::Error::other)?),
            _ => Framing::UntilClosed,
        };
        let mut body = Vec::new();
        let is_whole = match framing {
            Framing::Length(length) => self.take(length, &mut body),
            Framing::Chunked => self.chunks(&mut body),
            Framing::UntilClosed => self.rest(&mut body),
        };
        // When a connection breaks, the bytes before count.
        let is_whole = match is_whole {
            Ok(()) => true,
            Err(error) if is_break(&error) => false,
            Err(error) => return Err(error),
        };
        self.keeps =
            is_whole && !matches!(framing, Framing::UntilClosed) && header("connection").as_deref() != Some("close");
        Ok(Reply { status, body, is_whole })
    }

    /// Reads this number of bytes, or fewer if there are no more.
    pub fn receive(&mut self, bytes: usize) -> io::Result<()> {
        while self.received < bytes {
            self.fill()?;
        }
        Ok(())
    }

    fn head(&mut self) -> io::Result<String> {
        let end = loop {
            if let Some(at) = self.ahead.windows(4).position(|four| four == b"\r\n\r\n") {
                break at;
            }
            self.fill()?;
        };
        let head = self.ahead.drain(..end + 4).collect::<Vec<u8>>();
        String::from_utf8(head).map_err(io::Error::other)
    }

    fn chunks(&mut self, body: &mut Vec<u8>) -> io::Result<()> {
        loop {
            let line = loop {
                if let Some(at) = self.ahead.windows(2).position(|two| two == b"\r\n") {
                    break self.ahead.drain(..at + 2).collect::<Vec<u8>>();
                }
                self.fill()?;
            };
            let digits = std::str::from_utf8(&line).map_err(io::Error::other)?.trim();
            let size = usize::from_str_radix(digits, 16).map_err(io::Error::other)?;
            self.take(size, body)?;
            self.take(2, &mut Vec::new())?;
            if size == 0 {
                return Ok(());
            }
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

/// Whether the other side has ended the connection, orderly or not.
pub fn is_break(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe)
}

/// A connection with a receive buffer of a few kilobytes. The standard library cannot request that;
/// tokio can.
fn small_window(port: u16) -> io::Result<TcpStream> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(4 << 10)?;
        socket.connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await?.into_std()
    })?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}
