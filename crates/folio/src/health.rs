//! `folio health`: asks a server on this machine or another whether it is well, for containers without curl.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::args::HealthArgs;

/// A health answer is a line.
const MOST_BYTES: u64 = 64 << 10;

pub fn main(args: &HealthArgs) -> Result<ExitCode> {
    let (status, body) = ask(&args.url, args.timeout.0)?;
    println!("{status} {}", body.trim_end());
    Ok(if status == 200 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn ask(url: &str, patience: Duration) -> Result<(u16, String)> {
    let (host, path) = split(url)?;
    let found = || format!("could not reach {host}");
    let address = host.to_socket_addrs().with_context(found)?.next().with_context(found)?;
    let mut stream = TcpStream::connect_timeout(&address, patience).with_context(found)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {host}\r\nuser-agent: folio\r\nconnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(MOST_BYTES).read_to_end(&mut answer).with_context(|| format!("{host} does not answer"))?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer is no HTTP")?;
    let status = head.strip_prefix("HTTP/1.").and_then(|head| head.split(' ').nth(1)?.parse().ok());
    Ok((status.context("the answer has no status")?, body.to_string()))
}

/// HOST:PORT and path of an http URL; without a path, `/health`.
fn split(url: &str) -> Result<(String, &str)> {
    let Some(rest) = url.strip_prefix("http://") else {
        bail!("--url {url:?}: expected http://HOST:PORT; `folio health` does not speak TLS");
    };
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    if host.is_empty() || url.chars().any(|c| c.is_whitespace() || c.is_control()) {
        bail!("--url {url:?}: expected http://HOST:PORT");
    }
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let host = if has_port { host.to_string() } else { format!("{host}:80") };
    Ok((host, if path.len() > 1 { path } else { "/health" }))
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn urls() {
        let check = |url: &str, expect: Option<(&str, &str)>| {
            let found = split(url).ok();
            assert_eq!(found.as_ref().map(|(host, path)| (host.as_str(), *path)), expect, "{url}");
        };
        check("http://127.0.0.1:8000", Some(("127.0.0.1:8000", "/health")));
        check("http://127.0.0.1:8000/", Some(("127.0.0.1:8000", "/health")));
        check("http://[::1]:8000/ready", Some(("[::1]:8000", "/ready")));
        check("http://localhost", Some(("localhost:80", "/health")));
        check("https://localhost", None);
        check("http://", None);
        check("http://a b", None);
        check("http://a/\r\nx: y", None);
    }
}
