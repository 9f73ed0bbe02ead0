//! The collector: an address given at the start, and one POST to it.

use std::io::{Error, ErrorKind};
use std::str::FromStr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

const TRACES_PATH: &str = "/v1/traces";
/// One attempt, from connecting to the answer's status.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Bytes that are read of an answer.
const MOST_ANSWER_BYTES: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    #[error("the traces' address {0:?} must begin with http://; for TLS run a collector on this machine")]
    NotHttp(String),
    #[error("the traces' address {0:?} must be http://HOST[:PORT][/PATH], without user, query or fragment")]
    Malformed(String),
}

/// The address of a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The host, without the brackets of an IPv6 address.
    host: String,
    port: u16,
    /// The value of the `Host` header.
    authority: String,
    path: String,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(url: &str) -> Result<Self, EndpointError> {
        let malformed = || EndpointError::Malformed(url.to_owned());
        // Text that is written into a request's head must not be able to end it.
        if !url.bytes().all(|byte| byte.is_ascii_graphic()) || url.contains(['@', '?', '#', '\\']) {
            return Err(malformed());
        }
        let scheme = url.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://"));
        let rest = scheme.map(|_| &url[7..]).ok_or_else(|| EndpointError::NotHttp(url.to_owned()))?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => rest.split_once(']').ok_or_else(malformed)?,
            None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
        };
        let port = match port.strip_prefix(':') {
            Some(digits) => digits.parse().ok().filter(|&port| port > 0).ok_or_else(malformed)?,
            None if port.is_empty() => 80,
            None => return Err(malformed()),
        };
        if host.is_empty() || host.contains(['[', ']']) {
            return Err(malformed());
        }
        let path = path.trim_end_matches('/');
        let path = if path.ends_with(TRACES_PATH) { path.to_owned() } else { format!("{path}{TRACES_PATH}") };
        Ok(Self { host: host.to_owned(), port, authority: authority.to_owned(), path })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    Taken,
    /// It may go better another time.
    Failed,
    /// The endpoint will not take the spans, and a retry is useless.
    Refused,
}

/// One attempt, on a connection of its own.
pub async fn post(endpoint: &Endpoint, body: &str) -> Posted {
    match timeout(ATTEMPT, exchange(endpoint, body)).await {
        Ok(Ok(200..=299)) => Posted::Taken,
        // As OTLP has it: these are worth another attempt.
        Ok(Ok(429 | 502 | 503 | 504) | Err(_)) | Err(_) => Posted::Failed,
        Ok(Ok(_)) => Posted::Refused,
    }
}

async fn exchange(endpoint: &Endpoint, body: &str) -> std::io::Result<u16> {
    let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await?;
    let Endpoint { authority, path, .. } = endpoint;
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {authority}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
         user-agent: folio\r\nconnection: close\r\n\r\n"
    );
    write_all(&stream, head.as_bytes()).await?;
    write_all(&stream, body.as_bytes()).await?;
    read_status(&stream).await
}

async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn read_status(stream: &TcpStream) -> std::io::Result<u16> {
    let mut answer = [0; MOST_ANSWER_BYTES];
    let mut filled = 0;
    loop {
        stream.readable().await?;
        match stream.try_read(&mut answer[filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        if let Some(line) =
            answer[..filled].split_inclusive(|&byte| byte == b'\n').next().filter(|line| line.ends_with(b"\n"))
        {
            return status_of(line).ok_or_else(|| Error::new(ErrorKind::InvalidData, "not an answer of HTTP"));
        }
    }
}

fn status_of(line: &[u8]) -> Option<u16> {
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split_ascii_whitespace();
    words.next().filter(|version| version.starts_with("HTTP/1."))?;
    words.next()?.parse().ok().filter(|status| (200..600).contains(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_taken_apart() {
        let cases = [
            ("http://localhost:4318", ("localhost", 4318, "localhost:4318", "/v1/traces")),
            ("HTTP://collector/", ("collector", 80, "collector", "/v1/traces")),
            ("http://10.0.0.1:9/otel", ("10.0.0.1", 9, "10.0.0.1:9", "/otel/v1/traces")),
            ("http://[::1]:4318/v1/traces", ("::1", 4318, "[::1]:4318", "/v1/traces")),
            ("http://[::1]/x/v1/traces/", ("::1", 80, "[::1]", "/x/v1/traces")),
        ];
        for (url, expected) in cases {
            let Endpoint { host, port, authority, path } = url.parse().expect(url);
            assert_eq!((host.as_str(), port, authority.as_str(), path.as_str()), expected, "{url}");
        }
    }

    #[test]
    fn what_is_no_plain_address_is_refused() {
        for url in ["https://localhost:4318", "grpc://x", "localhost:4318", ""] {
            assert_eq!(url.parse::<Endpoint>(), Err(EndpointError::NotHttp(url.to_owned())));
        }
        let bad =
            ["http://", "http://:80", "http://a:0", "http://a:x", "http://a:65536", "http://[::1", "http://[::1]x"];
        for url in bad.into_iter().chain(["http://u:p@a", "http://a/?q", "http://a/\r\nx: y", "http://a b", "http://é"])
        {
            assert_eq!(url.parse::<Endpoint>(), Err(EndpointError::Malformed(url.to_owned())));
        }
    }

    #[test]
    fn only_http_is_an_answer() {
        assert_eq!(status_of(b"HTTP/1.1 200 OK\r\n"), Some(200));
        for line in ["SSH-2.0-x\r\n", "HTTP/1.1 abc\r\n", "HTTP/1.1\r\n", "HTTP/1.1 9999 x\r\n", "HTTP/1.1 100 x\r\n"] {
            assert_eq!(status_of(line.as_bytes()), None, "{line}");
        }
    }
}
