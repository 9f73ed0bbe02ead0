//! Which names the server answers to.
//!
//! A page in a browser may have its own name point at 127.0.0.1 and so speak to a server there as
//! if it were its own (DNS rebinding). A server on loopback therefore answers only to names that no
//! stranger can own.

use std::net::{IpAddr, Ipv6Addr};

use axum::http::header::HOST;
use axum::http::{HeaderMap, Uri, Version};

use super::SetupError;
use crate::error::ApiError;

/// A host and, if it was given, a port, in one spelling: lower case, IPv6 shortened and in
/// brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostPort {
    pub host: String,
    pub port: Option<u16>,
}

impl HostPort {
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (address, port) = rest.split_once(']')?;
                (format!("[{}]", address.parse::<Ipv6Addr>().ok()?), port)
            }
            None => {
                let (host, port) = text.split_at(text.find(':').unwrap_or(text.len()));
                let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
                if !(1..=255).contains(&host.len()) || !host.bytes().all(sound) {
                    return None;
                }
                (host.to_ascii_lowercase(), port)
            }
        };
        let port = match port.strip_prefix(':') {
            Some(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => Some(digits.parse().ok()?),
            Some(_) => return None,
            None if port.is_empty() => None,
            None => return None,
        };
        Some(Self { host, port })
    }

    fn address(&self) -> Option<IpAddr> {
        self.host.trim_start_matches('[').trim_end_matches(']').parse().ok()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Host(String),
    /// `.example.com`: every name below it.
    Below(String),
}

/// The allow-list of hosts.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// Permitted hosts; none permits every host.
    allowed: Option<Vec<Pattern>>,
}

impl Hosts {
    /// Every name is answered to.
    pub fn any() -> Self {
        Self { allowed: None }
    }

    /// For a server bound to `bound`, with the names given in `extra`: hosts or addresses without
    /// port, `*.DOMAIN` for all names below a domain, or `*` for every host. Off where other
    /// machines reach it, unless names are given.
    pub fn new(bound: IpAddr, extra: &[String]) -> Result<Self, SetupError> {
        let bound = bound.to_canonical();
        let mut allowed = vec![Pattern::Host("localhost".into())];
        if !bound.is_unspecified() {
            allowed.push(Pattern::Host(host_of(bound)));
        }
        let mut all = extra.is_empty() && !bound.is_loopback();
        for text in extra {
            match text.strip_prefix('*') {
                Some("") => all = true,
                _ => allowed.push(read_pattern(text).ok_or_else(|| SetupError::Host(text.clone()))?),
            }
        }
        Ok(Self { allowed: (!all).then_some(allowed) })
    }

    fn allows(&self, host: &HostPort) -> bool {
        let Some(allowed) = &self.allowed else { return true };
        let matches = |pattern: &Pattern| match pattern {
            Pattern::Host(name) => *name == host.host,
            Pattern::Below(domain) => host.host.strip_suffix(domain.as_str()).is_some_and(|name| !name.is_empty()),
        };
        // Only this machine has the address of a loopback interface.
        host.address().is_some_and(|address| address.to_canonical().is_loopback()) || allowed.iter().any(matches)
    }

    /// The host that a request is for; `None` only for old clients, which need not say.
    pub(super) fn check(&self, version: Version, uri: &Uri, headers: &HeaderMap) -> Result<Option<HostPort>, ApiError> {
        let Some(host) = requested_host(version, uri, headers)? else { return Ok(None) };
        if self.allows(&host) {
            return Ok(Some(host));
        }
        Err(ApiError::Forbidden("the host is not allowed; see --allowed-hosts"))
    }
}

fn host_of(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    }
}

fn read_pattern(text: &str) -> Option<Pattern> {
    let (below, name) = text.strip_prefix("*.").map_or((false, text), |domain| (true, domain));
    let address: Option<IpAddr> = name.parse().ok();
    match (address, below) {
        (Some(address), false) => return Some(Pattern::Host(host_of(address))),
        (Some(_), true) => return None,
        (None, _) => {}
    }
    let HostPort { host, port: None } = HostPort::parse(name)? else { return None };
    Some(if below { Pattern::Below(format!(".{host}")) } else { Pattern::Host(host) })
}

/// From the request's target (HTTP/2's `:authority`, HTTP/1's absolute form) or its Host header;
/// where there are both, they must agree, so that nothing behind can take another view of it than
/// what was checked.
fn requested_host(version: Version, uri: &Uri, headers: &HeaderMap) -> Result<Option<HostPort>, ApiError> {
    let mut given = headers.get_all(HOST).iter();
    let (header, None) = (given.next(), given.next()) else { return Err(unsound("only one Host header is allowed")) };
    let header = header.map(|host| host.to_str().ok().and_then(HostPort::parse));
    let target = uri.authority().map(|authority| HostPort::parse(authority.as_str()));
    let malformed = || unsound("the Host must be a host name or an address, with or without a port");
    match (target, header) {
        (None, None) if version < Version::HTTP_11 => Ok(None),
        (None, None) => Err(unsound("the request needs a Host header")),
        (Some(host), None) | (None, Some(host)) => host.ok_or_else(malformed).map(Some),
        (Some(target), Some(header)) => match (target, header) {
            (Some(target), Some(header)) if target == header => Ok(Some(target)),
            (Some(_), Some(_)) => Err(unsound("the Host header and the request's target name different hosts")),
            _ => Err(malformed()),
        },
    }
}

fn unsound(message: &str) -> ApiError {
    ApiError::Invalid { field: None, message: message.into() }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn ask(hosts: &Hosts, uri: &str, given: &[&str]) -> u16 {
        let mut headers = HeaderMap::new();
        for host in given {
            headers.append(HOST, HeaderValue::from_str(host).unwrap());
        }
        let outcome = hosts.check(Version::HTTP_11, &uri.parse().unwrap(), &headers);
        outcome.map_or_else(|error| error.status().as_u16(), |_| 200)
    }

    fn hosts(bound: &str, extra: &[&str]) -> Hosts {
        Hosts::new(bound.parse().unwrap(), &extra.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn on_loopback_only_names_that_nobody_else_owns() {
        let loopback = hosts("127.0.0.1", &[]);
        for host in ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "[0:0::1]", "127.0.0.2"] {
            assert_eq!(ask(&loopback, "/", &[host]), 200, "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example:8000",
            "127.0.0.1.evil.example",
            "localhost.",
            "x.localhost",
            "10.0.0.1",
            "0.0.0.0:8000",
            "[::]",
            "[fe80::1]",
            "127.1",
            "localhos",
        ] {
            assert_eq!(ask(&loopback, "/", &[host]), 403, "{host}");
        }
    }

    #[test]
    fn malformed_and_missing_hosts_are_refused_everywhere() {
        for hosts in [hosts("127.0.0.1", &[]), Hosts::any()] {
            for host in [
                "",
                "a b",
                "localhost:",
                "localhost:x",
                "localhost:99999",
                "u@localhost",
                "[::1",
                "[x]",
                "::1",
                "a/b",
                "[::1]8",
            ] {
                assert_eq!(ask(&hosts, "/", &[host]), 400, "{host}");
            }
            assert_eq!(ask(&hosts, "/", &[]), 400);
            assert_eq!(ask(&hosts, "/", &["localhost", "localhost"]), 400);
            let check = |version| hosts.check(version, &"/".parse().unwrap(), &HeaderMap::new());
            assert!(check(Version::HTTP_10).unwrap().is_none());
            assert!(check(Version::HTTP_2).is_err());
        }
    }

    #[test]
    fn the_target_s_host_counts_and_must_agree() {
        let loopback = hosts("::1", &[]);
        assert_eq!(ask(&loopback, "http://localhost:80/health", &[]), 200);
        assert_eq!(ask(&loopback, "http://localhost:80/health", &["localhost:80"]), 200);
        assert_eq!(ask(&loopback, "http://evil.example/health", &[]), 403);
        assert_eq!(ask(&loopback, "http://evil.example/health", &["localhost"]), 400);
        assert_eq!(ask(&loopback, "http://localhost/health", &["evil.example"]), 400);
        assert_eq!(ask(&loopback, "http://u:p@localhost/health", &[]), 400);
    }

    #[test]
    fn elsewhere_the_list_is_off_unless_it_is_given() {
        assert_eq!(ask(&hosts("0.0.0.0", &[]), "/", &["anything.example"]), 200);
        let given = hosts("10.1.2.3", &["api.example", "*.lab.example", "2001:db8::7"]);
        for host in ["API.example:443", "10.1.2.3", "localhost", "a.lab.example", "a.b.lab.example", "[2001:db8::7]:80"]
        {
            assert_eq!(ask(&given, "/", &[host]), 200, "{host}");
        }
        for host in ["lab.example", ".lab.example", "xlab.example", "10.1.2.4", "evil.example"] {
            assert_eq!(ask(&given, "/", &[host]), 403, "{host}");
        }
        assert_eq!(ask(&hosts("127.0.0.1", &["*"]), "/", &["evil.example"]), 200);
        for wrong in ["", "a:80", "http://a", "*a", "*.", "*.10.0.0.1", "a/b", "a,b"] {
            assert!(Hosts::new("127.0.0.1".parse().unwrap(), &[wrong.into()]).is_err(), "{wrong}");
        }
    }
}
