//! Just enough HTTP/1.1 for the tests, both ends of it.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;

use folio_testing::http::{self, Connection, Pace, exchange};

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
    let reply = exchange(port, method, path, fields, body.as_bytes()).expect("the server answers");
    assert!(reply.is_whole, "{method} {path}: only {:?} came", reply.text());
    Answer { status: reply.status, body: String::from_utf8(reply.body).expect("UTF-8") }
}

/// The status of `/health` behind a Unix socket.
#[cfg(unix)]
pub fn health_at(socket: &std::path::Path) -> std::io::Result<u16> {
    let mut connection = Connection::over(std::os::unix::net::UnixStream::connect(socket)?, Pace::FULL);
    connection.send(&http::request("GET", "/health", "", b""))?;
    Ok(connection.reply()?.status)
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
