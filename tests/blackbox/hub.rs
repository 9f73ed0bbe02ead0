//! A stand-in for the hub's HTTP endpoints: one repository, range requests, and connections that
//! break on demand.

use std::collections::BTreeMap;
use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::http::{Seen, read_head};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

pub struct Hub {
    pub port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    repo: String,
    files: BTreeMap<String, Vec<u8>>,
    /// Longer downloads break off after this number of bytes, this many times.
    break_after: usize,
    breaks_left: AtomicUsize,
    /// Required as a bearer token, if any.
    token: Option<String>,
    seen: Mutex<Vec<String>>,
}

impl Hub {
    pub fn start(repo: &str, files: &[(&str, Vec<u8>)], breaks: usize, token: Option<&str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared {
            repo: repo.to_string(),
            files: files.iter().map(|(name, bytes)| (name.to_string(), bytes.clone())).collect(),
            break_after: 100_000,
            breaks_left: AtomicUsize::new(breaks),
            token: token.map(str::to_string),
            seen: Mutex::default(),
        });
        let server = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = Arc::clone(&server);
                std::thread::spawn(move || server.converse(stream));
            }
        });
        Self { port, shared }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Every request so far: path, and range if it had one.
    pub fn seen(&self) -> Vec<String> {
        self.shared.seen.lock().expect("no panic in the stand-in").clone()
    }
}

impl Shared {
    fn converse(&self, stream: TcpStream) {
        let Ok(mut writer) = stream.try_clone() else { return };
        let mut reader = BufReader::new(stream);
        while let Some(seen) = read_head(&mut reader) {
            let range = seen.header("range").unwrap_or("").to_string();
            self.seen.lock().expect("no panic in the stand-in").push(format!("{} {range}", seen.path));
            if self.answer(&seen, &mut writer).is_none() {
                return;
            }
        }
    }

    /// None if the connection is to be closed.
    fn answer(&self, seen: &Seen, writer: &mut TcpStream) -> Option<()> {
        let wanted = self.token.as_ref().map(|token| format!("Bearer {token}"));
        if wanted.is_some() && seen.header("authorization") != wanted.as_deref() {
            return send(writer, "401 Unauthorized", "", b"{}");
        }
        let path = seen.path.split('?').next().unwrap_or_default();
        if path == format!("/api/models/{}/revision/main", self.repo) {
            let files: Vec<_> = self.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
            let info = serde_json::json!({"sha": COMMIT, "siblings": files}).to_string();
            return send(writer, "200 OK", "content-type: application/json\r\n", info.as_bytes());
        }
        let name = path.strip_prefix(&format!("/{}/resolve/main/", self.repo));
        let Some(bytes) = name.and_then(|name| self.files.get(name)) else {
            return send(writer, "404 Not Found", "", b"");
        };
        let (start, end) = range(seen.header("range"), bytes.len());
        let part = &bytes[start..end];
        let head = format!(
            "x-repo-commit: {COMMIT}\r\netag: \"{}-{}\"\r\naccept-ranges: bytes\r\ncontent-range: bytes {start}-{}/{}\r\n",
            name.unwrap_or_default().replace('.', "-"),
            bytes.len(),
            end.saturating_sub(1),
            bytes.len()
        );
        if part.len() > self.break_after && take_one(&self.breaks_left) {
            let head = format!("HTTP/1.1 206 Partial Content\r\n{head}content-length: {}\r\n\r\n", part.len());
            let _ = writer.write_all(head.as_bytes()).and_then(|()| writer.write_all(&part[..self.break_after]));
            let _ = writer.shutdown(std::net::Shutdown::Both);
            return None;
        }
        send(writer, "206 Partial Content", &head, part)
    }
}

fn take_one(counter: &AtomicUsize) -> bool {
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

fn range(header: Option<&str>, len: usize) -> (usize, usize) {
    let Some((start, end)) = header.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) else {
        return (0, len);
    };
    let start = start.parse::<usize>().unwrap_or(0).min(len);
    (start, end.parse::<usize>().map_or(len, |last| (last + 1).min(len)))
}

fn send(writer: &mut TcpStream, status: &str, headers: &str, body: &[u8]) -> Option<()> {
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len());
    writer.write_all(head.as_bytes()).and_then(|()| writer.write_all(body)).ok()
}
