//! A socket that knows since when it has been waiting for its reader.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
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

/// A stream in two hands: its socket reads and writes it, and the patrol looks whether its client
/// is there. Both belong to one task, so neither waits for the other.
#[derive(Clone, Debug)]
pub(super) struct Line(Arc<Mutex<Stream>>);

/// Lies under TLS, so that what counts as progress is what the kernel took.
#[derive(Debug)]
pub(super) struct Socket {
    line: Line,
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

impl Line {
    pub fn new(stream: Stream) -> Self {
        Self(Arc::new(Mutex::new(stream)))
    }

    fn stream(&self) -> MutexGuard<'_, Stream> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the client has closed its side, also behind bytes that are still unread. This checks
    /// the kernel's last report and not the kernel: it costs no system call and takes no byte.
    pub fn client_left(&self) -> bool {
        let stream = self.stream();
        // The reader keeps its own waker: this one is never stored for longer than the call.
        let mut cx = Context::from_waker(Waker::noop());
        match either!(&*stream, stream => pin!(stream.ready(Interest::READABLE)).poll(&mut cx)) {
            Poll::Ready(Ok(ready)) => ready.is_read_closed(),
            // The runtime is ending, and the connection with it.
            Poll::Ready(Err(_)) | Poll::Pending => false,
        }
    }
}

impl Socket {
    pub fn new(line: Line, activity: Arc<Activity>) -> Self {
        Self { line, activity, blocked: false }
    }

    /// The first byte the client sent, left where it is; `None` where the kernel cannot tell.
    pub async fn first_byte(&self) -> io::Result<Option<u8>> {
        poll_fn(|cx| match &*self.line.stream() {
            Stream::Tcp(stream) => {
                let mut byte = [0];
                Poll::Ready(match ready!(stream.poll_peek(cx, &mut ReadBuf::new(&mut byte)))? {
                    0 => Err(io::ErrorKind::UnexpectedEof.into()),
                    _ => Ok(Some(byte[0])),
                })
            }
            #[cfg(unix)]
            Stream::Unix(_) => Poll::Ready(Ok(None)),
        })
        .await
    }

    /// Notes whether a write moved; `directly` asks the kernel past tokio's memory of what it said
    /// last.
    fn note(
        &mut self,
        written: Poll<io::Result<usize>>,
        directly: impl FnOnce(SockRef<'_>) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let written = match written {
            Poll::Pending if self.activity.write_is_blocked() => {
                match either!(&*self.line.stream(), stream => directly(SockRef::from(stream))) {
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
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(&mut *self.line.stream(), stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = either!(&mut *self.line.stream(), stream => Pin::new(stream).poll_write(cx, bytes));
        self.note(written, |socket| socket.send(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = either!(&mut *self.line.stream(), stream => Pin::new(stream).poll_write_vectored(cx, bytes));
        self.note(written, |socket| socket.send_vectored(bytes))
    }

    fn is_write_vectored(&self) -> bool {
        either!(&*self.line.stream(), stream => stream.is_write_vectored())
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut *self.line.stream(), stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut *self.line.stream(), stream => Pin::new(stream).poll_shutdown(cx))
    }
}
