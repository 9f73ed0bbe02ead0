//! A client that costs as little as one can: connections opened beforehand, requests written
//! beforehand, answers kept as they come. Only the end is looked for while the clock runs; whether
//! an answer is right is seen afterwards.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

/// How a chunked body ends; a stream's last event stands before it.
const END: &[u8] = b"\r\n0\r\n\r\n";
const DONE: &[u8] = b"data: [DONE]\n\n";
const EVENT: &[u8] = b"data: ";
/// In every event but the last two of a stream, which say how it ended and that it did.
const GOES_ON: &[u8] = b"\"finish_reason\":null";
const READ_BYTES: usize = 16 << 10;

/// All on the thread that calls.
pub struct Client {
    runtime: Runtime,
    address: SocketAddr,
    connections: Vec<Connection>,
}

/// One request, ready to be written.
pub struct Message(Vec<u8>);

impl Message {
    pub fn new(address: SocketAddr, model: &str, prompt: &[u32], tokens: usize) -> Self {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "temperature": 0,
            "stream": true,
        });
        let body = body.to_string();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: \
             {}\r\n\r\n",
            body.len()
        );
        Self([head.into_bytes(), body.into_bytes()].concat())
    }
}

/// An answer that has come whole.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// When the last byte of the request had been written.
    pub sent: Instant,
    /// When the first event was there.
    pub first_event: Instant,
    pub ended: Instant,
    /// With a token's text; a token that ends within a character has none.
    pub events: usize,
    pub bytes: usize,
}

impl Client {
    pub fn connect(address: SocketAddr, count: usize) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let connections = runtime.block_on(async {
            let mut connections = Vec::new();
            for _ in 0..count {
                let stream = TcpStream::connect(address).await.context("could not connect")?;
                stream.set_nodelay(true)?;
                connections.push(Connection { stream, answer: Vec::with_capacity(READ_BYTES) });
            }
            Ok::<_, anyhow::Error>(connections)
        })?;
        Ok(Self { runtime, address, connections })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends all at once, each on a connection of its own, and reads them to their ends. Tells when
    /// it began, too.
    pub fn together(&mut self, messages: Vec<Message>) -> Result<(Instant, Vec<Answer>)> {
        assert!(messages.len() <= self.connections.len(), "a connection for each");
        let mut tasks = JoinSet::new();
        let began = Instant::now();
        for message in messages {
            let mut connection = self.connections.pop().context("a connection for each")?;
            let ask = async move { (connection.ask(&message.0).await, connection) };
            tasks.spawn_on(ask, self.runtime.handle());
        }
        let mut times = Vec::new();
        for (result, connection) in self.runtime.block_on(tasks.join_all()) {
            times.push(result?);
            self.connections.push(connection);
        }
        let kept = &self.connections[self.connections.len() - times.len()..];
        let answers = times.iter().zip(kept).map(|(times, connection)| times.answer(&connection.answer));
        Ok((began, answers.collect::<Result<_>>()?))
    }
}

struct Connection {
    stream: TcpStream,
    /// Head and body of the last answer, as they came.
    answer: Vec<u8>,
}

struct Times {
    sent: Instant,
    first_event: Option<Instant>,
    ended: Instant,
}

impl Connection {
    async fn ask(&mut self, message: &[u8]) -> Result<Times> {
        self.answer.clear();
        self.stream.write_all(message).await.context("a request could not be sent")?;
        let sent = Instant::now();
        let mut first_event = None;
        let mut is_stream = false;
        loop {
            self.answer.reserve(READ_BYTES);
            let before = self.answer.len();
            if self.stream.read_buf(&mut self.answer).await.context("a connection broke")? == 0 {
                bail!("the server closed a connection: {}", beginning(&self.answer));
            }
            if first_event.is_none() {
                is_stream = is_stream || is_stream_head(&self.answer)?;
                first_event = find(&self.answer[before.saturating_sub(EVENT.len())..], EVENT).then(Instant::now);
            }
            if is_stream && self.answer.ends_with(END) {
                return Ok(Times { sent, first_event, ended: Instant::now() });
            }
        }
    }
}

/// Whether the head is there; an error if it is that of anything but a stream.
fn is_stream_head(answer: &[u8]) -> Result<bool> {
    if !find(answer, b"\r\n\r\n") {
        return Ok(false);
    }
    let is_stream = answer.starts_with(b"HTTP/1.1 200 ") && find(answer, b"transfer-encoding: chunked");
    ensure!(is_stream, "expected a stream, found {}", beginning(answer));
    Ok(true)
}

impl Times {
    fn answer(&self, bytes: &[u8]) -> Result<Answer> {
        ensure!(
            bytes.strip_suffix(END).is_some_and(|body| body.ends_with(DONE)),
            "a stream ended without [DONE]: {}",
            String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(400)..])
        );
        ensure!(find(bytes, b"\"finish_reason\":\"length\""), "a stream ended early: {}", beginning(bytes));
        Ok(Answer {
            sent: self.sent,
            first_event: self.first_event.context("a stream has no event")?,
            ended: self.ended,
            events: bytes.windows(GOES_ON.len()).filter(|window| *window == GOES_ON).count(),
            bytes: bytes.len(),
        })
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

fn beginning(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    const HEAD: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";

    /// Answers of a server that sends these pieces, each on its own, to every request.
    fn answers(pieces: &'static [&'static str], requests: usize) -> Result<Vec<Answer>> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        let mut client = Client::connect(listener.local_addr()?, 1)?;
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let server = std::thread::spawn(move || {
            let mut request = [0; 4096];
            while stream.read(&mut request).is_ok_and(|read| read > 0) {
                let sent = pieces.iter().all(|piece| stream.write_all(piece.as_bytes()).is_ok());
                if !sent || pieces.is_empty() {
                    return;
                }
            }
        });
        let message = || Message::new(client.address, "m", &[1, 2, 3], 2);
        let messages: Vec<Message> = (0..requests).map(|_| message()).collect();
        let answers = messages.into_iter().map(|message| Ok(client.together(vec![message])?.1[0])).collect();
        drop(client);
        server.join().expect("the server ends with its client");
        answers
    }

    #[test]
    fn a_connection_serves_one_stream_after_another() {
        let pieces = &[
            HEAD,
            "1c\r\nda",
            "ta: \"finish_reason\":null\n\n",
            "\r\n",
            "20\r\ndata: \"finish_reason\":\"length\"\n\n\r\n",
            "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
        ];
        let answers = answers(pieces, 3).expect("three streams");
        assert_eq!(answers.iter().map(|answer| answer.events).collect::<Vec<_>>(), [1; 3]);
        let bytes = pieces.iter().map(|piece| piece.len()).sum::<usize>();
        assert!(answers.iter().all(|a| a.bytes == bytes && a.sent <= a.first_event && a.first_event <= a.ended));
    }

    #[test]
    fn what_is_no_whole_stream_is_an_error() {
        let refused = &["HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\nno"];
        let given_up = &[HEAD, "a\r\ndata: x\n\n\r\n0\r\n\r\n"];
        let stopped = &[HEAD, "a\r\ndata: x\n\n\r\n", "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"];
        for (pieces, expect) in [
            (&refused[..], "429 Too Many"),
            (given_up, "without [DONE]"),
            (stopped, "ended early"),
            (&[], "closed a connection"),
        ] {
            let error = answers(pieces, 1).expect_err(expect).to_string();
            assert!(error.contains(expect), "{error}");
        }
    }
}
