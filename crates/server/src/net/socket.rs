//! A socket that knows since when it has been waiting for its reader.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;

use super::activity::Activity;

#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
}

/// Lies under TLS, so that what counts as progress is what the kernel took.
#[derive(Debug)]
pub(super) struct Socket {
    stream: Stream,
    activity: Arc<Activity>,
    /// The last write found no room.
    blocked: bool,
}

/// Calls a method of whichever stream it is.
macro_rules! either {
    ($stream:expr, $name:ident => $call:expr) => {
        match $stream {
            Stream::Tcp($name) => $call,
            #[cfg(unix)]
            Stream::Unix($name) => $call,
        }
    };
}

impl Socket {
    pub fn new(stream: Stream, activity: Arc<Activity>) -> Self {
        Self { stream, activity, blocked: false }
    }

    /// The first byte the client sent, left where it is; `None` where the kernel cannot tell.
    pub async fn first_byte(&self) -> io::Result<Option<u8>> {
        match &self.stream {
            Stream::Tcp(stream) => {
                let mut byte = [0];
                match stream.peek(&mut byte).await? {
                    0 => Err(io::ErrorKind::UnexpectedEof.into()),
                    _ => Ok(Some(byte[0])),
                }
            }
            #[cfg(unix)]
            Stream::Unix(_) => Ok(None),
        }
    }

    /// Notes whether a write moved; `directly` asks the kernel past tokio's memory of what it said last.
    fn note(
        &mut self,
        written: Poll<io::Result<usize>>,
        directly: impl FnOnce(SockRef<'_>) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let written = match written {
            Poll::Pending if self.activity.write_is_blocked() => {
                match either!(&self.stream, stream => directly(SockRef::from(stream))) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
                    answer => Poll::Ready(answer),
                }
            }
            written => written,
        };
        if written.is_pending() {
            self.blocked = true;
        } else if std::mem::take(&mut self.blocked) {
            self.activity.write_moved();
        }
        written
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(&mut self.stream, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = either!(&mut self.stream, stream => Pin::new(stream).poll_write(cx, bytes));
        self.note(written, |socket| socket.send(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = either!(&mut self.stream, stream => Pin::new(stream).poll_write_vectored(cx, bytes));
        self.note(written, |socket| socket.send_vectored(bytes))
    }

    fn is_write_vectored(&self) -> bool {
        either!(&self.stream, stream => stream.is_write_vectored())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut self.stream, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut self.stream, stream => Pin::new(stream).poll_shutdown(cx))
    }
}
