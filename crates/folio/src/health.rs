//! `folio health`: requests a server's health, for containers without curl.

mod tls;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::args::HealthArgs;
use tls::Trust;

/// Maximum bytes of an answer, which is one line.
const MOST_BYTES: u64 = 64 << 10;

pub fn main(args: &HealthArgs) -> Result<ExitCode> {
    let (status, body) = ask(&Url::parse(&args.url)?, args)?;
    // The exit status is the answer; failing to print the text is no error.
    let _ = outln!("{status} {}", body.trim_end());
    Ok(if status == 200 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Without a scheme, plain HTTP is tried first. A server that expects TLS answers it with 400, or
/// not with HTTP.
fn ask(url: &Url, args: &HealthArgs) -> Result<(u16, String)> {
    match url.scheme {
        Some(scheme) => ask_by(scheme, url, args),
        None => match ask_by(Scheme::Http, url, args) {
            Ok((status, body)) if status != 400 => Ok((status, body)),
            plain => match (ask_by(Scheme::Https, url, args), plain) {
                (Ok(answer), _) => Ok(answer),
                (Err(secure), Ok((status, body))) => bail!("{secure:#}; without TLS the answer is {status} {body}"),
                (Err(_), Err(plain)) => Err(plain),
            },
        },
    }
}

fn ask_by(scheme: Scheme, url: &Url, args: &HealthArgs) -> Result<(u16, String)> {
    let (patience, place) = (args.timeout.0, format!("{}:{}", url.host, url.port_of(scheme)));
    let found = || format!("could not reach {place}");
    let address = place.to_socket_addrs().with_context(found)?.next().with_context(found)?;
    let stream = TcpStream::connect_timeout(&address, patience).with_context(found)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    let request =
        format!("GET {} HTTP/1.1\r\nhost: {place}\r\nuser-agent: folio\r\nconnection: close\r\n\r\n", url.path);
    let answer = match scheme {
        Scheme::Http => exchange(stream, &request),
        Scheme::Https => {
            let trust = Trust::of(args.ca.as_deref(), args.insecure, address.ip())?;
            exchange(tls::connect(stream, url.host, trust)?, &request)
        }
    };
    let answer = answer.with_context(|| format!("{place} does not answer"))?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer is not HTTP")?;
    let status = head.strip_prefix("HTTP/1.").and_then(|head| head.split(' ').nth(1)?.parse().ok());
    Ok((status.context("the answer has no status")?, body.to_string()))
}

fn exchange(mut stream: impl Read + Write, request: &str) -> std::io::Result<String> {
    stream.write_all(request.as_bytes())?;
    stream.flush()?;
    let mut answer = Vec::new();
    match stream.take(MOST_BYTES).read_to_end(&mut answer) {
        // Some servers end a TLS connection without a close message.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof && !answer.is_empty() => {}
        read => drop(read?),
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    Http,
    Https,
}

#[derive(Debug, PartialEq, Eq)]
struct Url<'a> {
    /// None if the URL has none: both are tried.
    scheme: Option<Scheme>,
    /// The host as in the URL: an IPv6 address keeps its brackets.
    host: &'a str,
    port: Option<u16>,
    /// `/health` if the URL has none.
    path: &'a str,
}

impl<'a> Url<'a> {
    fn parse(url: &'a str) -> Result<Self> {
        let expected = "expected http://HOST:PORT, https://HOST:PORT, or HOST:PORT to detect which";
        let (scheme, rest) = match url.split_once("://") {
            Some(("http", rest)) => (Some(Scheme::Http), rest),
            Some(("https", rest)) => (Some(Scheme::Https), rest),
            Some(_) => bail!("--url {url:?}: {expected}"),
            None => (None, url),
        };
        let (place, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let port = place.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
        let (host, port) = port.map_or((place, None), |(host, port)| (host, Some(port)));
        if host.is_empty() || url.chars().any(|c| c.is_whitespace() || c.is_control()) {
            bail!("--url {url:?}: {expected}");
        }
        Ok(Self { scheme, host, port, path: if path.len() > 1 { path } else { "/health" } })
    }

    fn port_of(&self, scheme: Scheme) -> u16 {
        self.port.unwrap_or(match scheme {
            Scheme::Http => 80,
            Scheme::Https => 443,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let check = |url: &str, expect: Option<(Option<Scheme>, &str, Option<u16>, &str)>| {
            let found = Url::parse(url).ok().map(|url| (url.scheme, url.host, url.port, url.path));
            assert_eq!(found, expect, "{url}");
        };
        let (http, https) = (Some(Scheme::Http), Some(Scheme::Https));
        check("http://127.0.0.1:8000", Some((http, "127.0.0.1", Some(8000), "/health")));
        check("http://127.0.0.1:8000/", Some((http, "127.0.0.1", Some(8000), "/health")));
        check("http://[::1]:8000/ready", Some((http, "[::1]", Some(8000), "/ready")));
        check("http://localhost", Some((http, "localhost", None, "/health")));
        check("https://localhost", Some((https, "localhost", None, "/health")));
        check("https://[::1]", Some((https, "[::1]", None, "/health")));
        check("127.0.0.1:8000", Some((None, "127.0.0.1", Some(8000), "/health")));
        check("localhost/ready", Some((None, "localhost", None, "/ready")));
        check("http://", None);
        check("", None);
        check("ftp://a", None);
        check("http://a b", None);
        check("http://a/\r\nx: y", None);
    }
}
