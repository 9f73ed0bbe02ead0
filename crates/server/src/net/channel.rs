//! The byte stream below hyper: a socket, with or without TLS, that notes when a request begins to
//! arrive.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;

use super::activity::Activity;
use super::socket::Socket;

/// How every HTTP/2 connection begins.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Most bytes that are read and dropped from a client that sends after its answer.
const LINGER_BYTES: usize = 64 << 20;

pub(super) enum Transport {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

pub(super) struct Channel {
    transport: Transport,
    activity: Arc<Activity>,
    /// Read to find out the protocol, to be read again.
    ahead: Vec<u8>,
    output_closed: bool,
    lingered_bytes: usize,
}

macro_rules! either {
    ($transport:expr, $name:ident => $call:expr) => {
        match $transport {
            Transport::Plain($name) => $call,
            Transport::Tls($name) => $call,
        }
    };
}

impl Channel {
    pub fn new(transport: Transport, activity: Arc<Activity>) -> Self {
        Self { transport, activity, ahead: Vec::new(), output_closed: false, lingered_bytes: 0 }
    }

    /// The client's protocol: as agreed in the handshake, or by its first bytes.
    pub async fn protocol(&mut self) -> io::Result<Protocol> {
        if let Transport::Tls(stream) = &self.transport {
            match stream.get_ref().1.alpn_protocol() {
                Some(b"h2") => return Ok(Protocol::Http2),
                Some(_) => return Ok(Protocol::Http1),
                None => {}
            }
        }
        while PREFACE.starts_with(&self.ahead) && self.ahead.len() < PREFACE.len() {
            let mut bytes = [0; PREFACE.len()];
            let mut buffer = ReadBuf::new(&mut bytes[self.ahead.len()..]);
            poll_fn(|cx| self.poll_transport(cx, &mut buffer)).await?;
            if buffer.filled().is_empty() {
                break;
            }
            self.ahead.extend_from_slice(buffer.filled());
        }
        Ok(if self.ahead == PREFACE { Protocol::Http2 } else { Protocol::Http1 })
    }

    fn poll_transport(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(either!(&mut self.transport, stream => Pin::new(stream).poll_read(cx, buf)))?;
        if buf.filled().len() > before {
            self.activity.bytes_came();
        }
        Poll::Ready(Ok(()))
    }

    /// Reads and forgets, until the client has nothing more to say or has said too much.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut bytes = [0; 4096];
        while self.lingered_bytes < LINGER_BYTES {
            let mut buffer = ReadBuf::new(&mut bytes);
            match ready!(self.poll_transport(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => self.lingered_bytes += buffer.filled().len(),
                _ => break,
            }
        }
        Poll::Ready(())
    }
}

impl AsyncRead for Channel {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.ahead.is_empty() {
            let count = self.ahead.len().min(buf.remaining());
            buf.put_slice(&self.ahead[..count]);
            self.ahead.drain(..count);
            return Poll::Ready(Ok(()));
        }
        self.poll_transport(cx, buf)
    }
}

impl AsyncWrite for Channel {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(&mut self.transport, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(&mut self.transport, stream => Pin::new(stream).poll_write_vectored(cx, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        either!(&self.transport, stream => stream.is_write_vectored())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut self.transport, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.output_closed {
            ready!(either!(&mut self.transport, stream => Pin::new(stream).poll_shutdown(cx)))?;
            self.output_closed = true;
        }
        if self.activity.lingers() {
            ready!(self.poll_linger(cx));
        }
        Poll::Ready(Ok(()))
    }
}
