//! Just enough HTTP/1.1 for the tests, both ends of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

pub struct Answer {
    pub status: u16,
    pub body: String,
}

/// One request on its own connection; the answer is read to its end.
pub fn request(port: u16, method: &str, path: &str, body: &str) -> Answer {
    request_with(port, method, path, "", body)
}

/// The same with more fields in its head, each with its line's end.
pub fn request_with(port: u16, method: &str, path: &str, fields: &str, body: &str) -> Answer {
    let text = exchange(port, method, path, fields, body).expect("the server listens, and its answer is UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Answer { status, body: if chunked { unchunk(body) } else { body.to_string() } }
}

/// The same where the server may be gone at any moment: head and body as they came.
pub fn try_request(port: u16, method: &str, path: &str, body: &str) -> std::io::Result<String> {
    exchange(port, method, path, "", body)
}

fn exchange(port: u16, method: &str, path: &str, fields: &str, body: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{fields}connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn unchunk(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).expect("a chunk size");
        if size == 0 {
            break;
        }
        out.push_str(&rest[..size]);
        body = &rest[size + 2..];
    }
    out
}

/// A request as a stand-in server sees it: its path and, in lower case, its headers.
pub struct Seen {
    pub path: String,
    pub headers: Vec<(String, String)>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// Reads one request's head; none when the client has closed the connection.
pub fn read_head(reader: &mut BufReader<TcpStream>) -> Option<Seen> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&bytes| bytes > 0)?;
    let path = line.split(' ').nth(1)?.to_string();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_string())),
            None => return Some(Seen { path, headers }),
        }
    }
}
