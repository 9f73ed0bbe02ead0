//! HTTP/1.1 to one server: reused connections, requests of known length, answers read as they
//! arrive.
//!
//! There is no TLS, no redirect and no retry, except for one case: the server may have closed a
//! reused connection meanwhile, and then the request is sent once more on a new one.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::framing::Framing;
use super::url::BaseUrl;

const READ_BYTES: usize = 16 << 10;
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Most bytes of an answer that is read whole.
const MAX_WHOLE_BYTES: usize = 256 << 20;
const WHOLE_TIMEOUT: Duration = Duration::from_secs(120);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

pub struct Client {
    addresses: Vec<SocketAddr>,
    /// The constant part of a request's head.
    headers: String,
    prefix: String,
    idle: Mutex<Vec<Connection>>,
}

impl Client {
    /// Looks up the server's address; connects to nothing yet.
    pub async fn new(url: &BaseUrl, api_key: Option<&str>) -> Result<Arc<Self>> {
        let found = tokio::net::lookup_host((url.host.as_str(), url.port)).await;
        let addresses: Vec<SocketAddr> = found.with_context(|| format!("could not find {}", url.host))?.collect();
        let mut headers = format!(
            "Host: {}\r\nUser-Agent: folio-bench/{}\r\nAccept: */*\r\nContent-Type: application/json\r\n",
            url.authority(),
            env!("CARGO_PKG_VERSION"),
        );
        if let Some(key) = api_key {
            if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                bail!("the API key holds characters that no header can");
            }
            headers.push_str(&format!("Authorization: Bearer {key}\r\n"));
        }
        Ok(Arc::new(Self { addresses, headers, prefix: url.prefix.clone(), idle: Mutex::default() }))
    }

    /// Returns when the head of the answer has arrived.
    pub async fn send(self: &Arc<Self>, method: &str, path: &str, body: &[u8]) -> Result<Response> {
        let head = format!(
            "{method} {}{path} HTTP/1.1\r\n{}Content-Length: {}\r\n\r\n",
            self.prefix,
            self.headers,
            body.len()
        );
        let mut message = head.into_bytes();
        message.extend_from_slice(body);
        let kept = self.idle().pop();
        if let Some(connection) = kept {
            match self.exchange(connection, &message).await {
                Err(Failure::Unanswered(_)) => {}
                Err(Failure::Broken(error)) => return Err(error),
                Ok(response) => return Ok(response),
            }
        }
        let connection = self.connect().await?;
        self.exchange(connection, &message).await.map_err(|failure| match failure {
            Failure::Unanswered(error) | Failure::Broken(error) => error,
        })
    }

    /// Sends and reads everything: the status, and the JSON of the answer, or null if it has none.
    pub async fn json(self: &Arc<Self>, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let asked = tokio::time::timeout(WHOLE_TIMEOUT, async {
            let mut response = self.send(method, path, body.as_bytes()).await?;
            let whole = response.whole(MAX_WHOLE_BYTES).await?;
            Ok((response.status, serde_json::from_slice(&whole).unwrap_or(Value::Null)))
        });
        asked.await.unwrap_or_else(|_| Err(anyhow!("{path} gave no answer within {} s", WHOLE_TIMEOUT.as_secs())))
    }

    async fn connect(&self) -> Result<Connection> {
        let connecting = TcpStream::connect(self.addresses.as_slice());
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
        let connected = connected.map_err(|_| anyhow!("no connection within {} s", CONNECT_TIMEOUT.as_secs()))?;
        let stream = connected.context("could not connect")?;
        // A request is one write; waiting for more would only delay it.
        stream.set_nodelay(true)?;
        Ok(Connection { stream, buffer: vec![0; READ_BYTES].into(), start: 0, end: 0 })
    }

    async fn exchange(
        self: &Arc<Self>,
        mut connection: Connection,
        message: &[u8],
    ) -> std::result::Result<Response, Failure> {
        let sent = connection.stream.write_all(message).await.context("the request could not be sent");
        sent.map_err(Failure::Unanswered)?;
        match connection.fill().await {
            Ok(true) => {}
            Ok(false) => {
                return Err(Failure::Unanswered(anyhow!("the server closed the connection without an answer")));
            }
            Err(error) => return Err(Failure::Unanswered(error)),
        }
        let head = connection.head().await.map_err(Failure::Broken)?;
        Ok(Response {
            status: head.status,
            framing: head.framing(),
            is_kept: head.is_kept,
            reason: head.reason,
            connection: Some(connection),
            client: self.clone(),
        })
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Failure {
    /// No byte of an answer was received.
    Unanswered(anyhow::Error),
    Broken(anyhow::Error),
}

struct Connection {
    stream: TcpStream,
    buffer: Box<[u8]>,
    /// `buffer[start..end]` has been received and not read yet.
    start: usize,
    end: usize,
}

impl Connection {
    /// Receives more once everything is read; false if the server has closed.
    async fn fill(&mut self) -> Result<bool> {
        debug_assert_eq!(self.start, self.end, "what has not been read would be lost");
        (self.start, self.end) = (0, 0);
        self.end = self.stream.read(&mut self.buffer).await.context("the connection broke")?;
        Ok(self.end > 0)
    }

    fn unread(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    async fn head(&mut self) -> Result<Head> {
        let mut bytes = Vec::with_capacity(512);
        loop {
            if self.unread().is_empty() && !self.fill().await? {
                bail!("the server closed the connection in the middle of an answer's head");
            }
            bytes.push(self.buffer[self.start]);
            self.start += 1;
            if bytes.ends_with(b"\r\n\r\n") {
                let head = Head::parse(&bytes)?;
                // Interim answers precede the final one.
                if head.status >= 200 {
                    return Ok(head);
                }
                bytes.clear();
            }
            if bytes.len() > MAX_HEAD_BYTES {
                bail!("the head of an answer is longer than {MAX_HEAD_BYTES} bytes");
            }
        }
    }
}

/// Status of an answer, and the headers that matter here.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    status: u16,
    reason: String,
    is_kept: bool,
    is_chunked: bool,
    length: Option<u64>,
}

impl Head {
    fn parse(bytes: &[u8]) -> Result<Self> {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.split("\r\n");
        let first = lines.next().unwrap_or_default();
        let mut words = first.splitn(3, ' ');
        let (version, status) = (words.next().unwrap_or_default(), words.next().and_then(|word| word.parse().ok()));
        let (true, Some(status)) = (version.starts_with("HTTP/1."), status) else {
            bail!("expected an answer in HTTP/1.1, found `{}`", first.chars().take(80).collect::<String>());
        };
        let reason = words.next().unwrap_or_default().to_string();
        let mut head = Self { status, reason, is_kept: version != "HTTP/1.0", is_chunked: false, length: None };
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            let value = value.trim().to_ascii_lowercase();
            match name.to_ascii_lowercase().as_str() {
                "connection" => head.is_kept = value != "close" && (head.is_kept || value == "keep-alive"),
                "transfer-encoding" if value == "chunked" => head.is_chunked = true,
                "transfer-encoding" => bail!("the transfer encoding `{value}` is not supported"),
                "content-length" => {
                    let Ok(length) = value.parse() else { bail!("the content length `{value}` is not a number") };
                    head.length = Some(length);
                }
                _ => {}
            }
        }
        Ok(head)
    }

    fn framing(&self) -> Framing {
        match self {
            Self { status: 204 | 304, .. } => Framing::Length(0),
            Self { is_chunked: true, .. } => Framing::chunked(),
            Self { length: Some(length), .. } => Framing::Length(*length),
            _ => Framing::UntilClose,
        }
    }
}

/// An answer with a body that is being received.
pub struct Response {
    pub status: u16,
    pub reason: String,
    is_kept: bool,
    framing: Framing,
    /// None once the body has been read.
    connection: Option<Connection>,
    client: Arc<Client>,
}

impl Response {
    /// Replaces `piece` by the next part of the body; false if the body has ended.
    pub async fn read(&mut self, piece: &mut Vec<u8>) -> Result<bool> {
        piece.clear();
        while let Some(connection) = &mut self.connection {
            if self.framing.is_done() {
                let connection = self.connection.take();
                // Bytes after an answer make the connection unusable.
                let kept = connection.filter(|connection| self.is_kept && connection.unread().is_empty());
                self.client.idle().extend(kept);
                break;
            }
            if connection.unread().is_empty() && !connection.fill().await? {
                if !matches!(self.framing, Framing::UntilClose) {
                    bail!("the server closed the connection in the middle of an answer");
                }
                self.connection = None;
                break;
            }
            let used = self.framing.decode(connection.unread(), piece)?;
            connection.start += used;
            if !piece.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub async fn whole(&mut self, max_bytes: usize) -> Result<Vec<u8>> {
        let (mut whole, mut piece) = (Vec::new(), Vec::new());
        while self.read(&mut piece).await? {
            if whole.len() + piece.len() > max_bytes {
                bail!("an answer is longer than {max_bytes} bytes");
            }
            whole.extend_from_slice(&piece);
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads() {
        let check = |text: &str, expect: Option<(u16, &str, bool, bool, Option<u64>)>| {
            let found = Head::parse(text.as_bytes()).ok();
            let expect = expect.map(|(status, reason, is_kept, is_chunked, length)| Head {
                status,
                reason: reason.into(),
                is_kept,
                is_chunked,
                length,
            });
            assert_eq!(found, expect, "{text}");
        };
        check("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", Some((200, "OK", true, false, Some(5))));
        check("HTTP/1.1 200\r\nTransfer-Encoding: Chunked\r\n\r\n", Some((200, "", true, true, None)));
        let closing = "HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\n\r\n";
        check(closing, Some((429, "Too Many Requests", false, false, None)));
        check("HTTP/1.0 200 OK\r\n\r\n", Some((200, "OK", false, false, None)));
        check("HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n\r\n", Some((200, "OK", true, false, None)));
        for bad in [
            "SSH-2.0-OpenSSH\r\n\r\n",
            "HTTP/2 200\r\n\r\n",
            "HTTP/1.1 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        ] {
            check(bad, None);
        }
    }
}
