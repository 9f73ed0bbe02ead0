//! A server that answers with known tokens and fails on demand.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

#[derive(Clone, Copy, Default)]
pub struct Behaviour {
    /// Whether it has `/tokenize` and `/detokenize`.
    pub tokenizes: bool,
    /// One request in this number is refused.
    pub refuses_every: Option<usize>,
    /// After this number of requests it ends in the middle of the next answer.
    pub dies_after: Option<usize>,
    /// Ends every stream with an error.
    pub breaks_off: bool,
    /// Reads requests and answers none.
    pub hangs: bool,
    /// Closes connections after an answer without saying so.
    pub closes: bool,
    /// The key that it requires.
    pub key: Option<&'static str>,
}

struct Shared {
    behaviour: Behaviour,
    connections: AtomicUsize,
    asked: AtomicUsize,
    seen: Mutex<Vec<Value>>,
    /// Token to word.
    words: Mutex<HashMap<u64, String>>,
}

pub struct FakeServer {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

impl FakeServer {
    pub fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound listener");
        let shared = Arc::new(Shared {
            behaviour,
            connections: AtomicUsize::new(0),
            asked: AtomicUsize::new(0),
            seen: Mutex::default(),
            words: Mutex::default(),
        });
        let state = shared.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                if state.is_dead() {
                    return;
                }
                state.connections.fetch_add(1, Ordering::SeqCst);
                let (state, connection) = (state.clone(), connection.expect("a connection"));
                // A client that disconnects ends its thread.
                std::thread::spawn(move || drop(state.serve(connection)));
            }
        });
        Self { address, shared }
    }

    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// The bodies of all requests for an answer.
    pub fn seen(&self) -> Vec<Value> {
        self.shared.seen.lock().expect("no panic").clone()
    }
}

impl Shared {
    fn is_dead(&self) -> bool {
        self.behaviour.dies_after.is_some_and(|count| self.asked.load(Ordering::SeqCst) > count)
    }

    fn serve(&self, mut connection: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(connection.try_clone()?);
        loop {
            let (mut head, mut line) = (String::new(), String::new());
            while reader.read_line(&mut line)? > 2 {
                head.push_str(&line);
                line.clear();
            }
            let Some(path) = head.split(' ').nth(1).map(str::to_string) else { return Ok(()) };
            let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
            let mut body = vec![0; length.and_then(|length| length.parse().ok()).unwrap_or(0)];
            reader.read_exact(&mut body)?;
            let body: Value = serde_json::from_slice(&body).unwrap_or_default();
            let is_allowed = self.behaviour.key.is_none_or(|key| head.contains(&format!("Bearer {key}\r\n")));
            match path.as_str() {
                _ if !is_allowed => whole(&mut connection, "401 Unauthorized", &json!({"error": {"message": "no"}}))?,
                "/v1/models" => whole(&mut connection, "200 OK", &json!({"data": [{"id": "org/fake"}]}))?,
                "/v1/completions" | "/v1/chat/completions" => self.answer(&mut connection, body)?,
                "/tokenize" if self.behaviour.tokenizes => {
                    let tokens = self.encode(body["prompt"].as_str().unwrap_or(""), body["add_special_tokens"] == true);
                    whole(&mut connection, "200 OK", &json!({"count": tokens.len(), "tokens": tokens}))?;
                }
                "/detokenize" if self.behaviour.tokenizes => {
                    whole(&mut connection, "200 OK", &json!({"prompt": self.decode(&body["tokens"])}))?;
                }
                _ => whole(&mut connection, "404 Not Found", &json!({"error": {"message": "no such route"}}))?,
            }
            if self.behaviour.closes || self.is_dead() {
                return connection.shutdown(std::net::Shutdown::Both);
            }
        }
    }

    fn answer(&self, connection: &mut TcpStream, body: Value) -> std::io::Result<()> {
        let number = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        self.seen.lock().expect("no panic").push(body.clone());
        if self.behaviour.hangs {
            return Ok(());
        }
        if self.behaviour.refuses_every.is_some_and(|every| number.is_multiple_of(every)) {
            return whole(connection, "429 Too Many Requests", &json!({"error": {"message": "not now"}}));
        }
        let events = self.events(&body);
        let mut stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n".to_vec();
        stream.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
        // Chunk borders are independent of events, and write borders of chunks.
        for piece in events.as_bytes().chunks(37) {
            stream.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            stream.extend_from_slice(piece);
            stream.extend_from_slice(b"\r\n");
        }
        stream.extend_from_slice(b"0\r\n\r\n");
        let end = if self.is_dead() { stream.len() / 2 } else { stream.len() };
        for piece in stream[..end].chunks(53) {
            connection.write_all(piece)?;
        }
        Ok(())
    }

    fn events(&self, body: &Value) -> String {
        let is_chat = body.get("messages").is_some();
        let count = body["max_tokens"].as_u64().or(body["max_completion_tokens"].as_u64()).unwrap_or(0);
        let mut events = String::from(": hello\n\n");
        let mut event = |data: Value| events.push_str(&format!("data: {data}\n\n"));
        if is_chat {
            event(json!({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}));
        }
        for token in 0..count {
            let text = format!("é{token} ");
            let finish = (token + 1 == count).then_some("length");
            event(match is_chat {
                true => json!({"choices": [{"delta": {"content": text}, "finish_reason": finish}], "usage": null}),
                false => json!({"choices": [{"text": text, "finish_reason": finish}], "usage": null}),
            });
        }
        if self.behaviour.breaks_off {
            event(json!({"error": {"message": "out of blocks", "code": 500}}));
            return events;
        }
        let prompt_tokens = match &body["prompt"] {
            Value::Array(tokens) => tokens.len(),
            Value::String(text) => self.encode(text, true).len(),
            _ => 0,
        };
        event(json!({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count}}));
        events + "data: [DONE]\n\n"
    }

    /// A word is a token, and equal words in a row are one.
    fn encode(&self, text: &str, add_special_tokens: bool) -> Vec<u64> {
        let mut words = self.words.lock().expect("no panic");
        let mut tokens: Vec<u64> = Vec::new();
        for word in text.split_whitespace() {
            let token = word.bytes().fold(2, |token, byte| (token * 31 + u64::from(byte)) & 0xff_ffff);
            words.insert(token, word.into());
            if tokens.last() != Some(&token) {
                tokens.push(token);
            }
        }
        if add_special_tokens {
            tokens.insert(0, 1);
        }
        tokens
    }

    fn decode(&self, tokens: &Value) -> String {
        let words = self.words.lock().expect("no panic");
        let known = tokens.as_array().into_iter().flatten().filter_map(|token| words.get(&token.as_u64()?));
        known.fold(String::new(), |text, word| text + " " + word)
    }
}

fn whole(connection: &mut TcpStream, status: &str, body: &Value) -> std::io::Result<()> {
    let body = body.to_string();
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
    connection.write_all((head + &body).as_bytes())
}
