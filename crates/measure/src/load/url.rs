//! Address of the server.

use anyhow::{Result, bail};

/// A parsed http address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl {
    /// Without the brackets of an IPv6 address.
    pub host: String,
    pub port: u16,
    /// Prefix of every route, without a slash at its end.
    pub prefix: String,
}

impl BaseUrl {
    pub fn parse(url: &str) -> Result<Self> {
        let Some((scheme, rest)) = url.split_once("://") else {
            bail!("expected an address such as http://127.0.0.1:8000, found `{url}`");
        };
        match scheme.to_ascii_lowercase().as_str() {
            "http" => {}
            "https" => bail!("`{url}`: https is not supported here; give the server's http address"),
            _ => bail!("`{url}`: expected http://, found {scheme}://"),
        }
        let (authority, prefix) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = match authority.strip_prefix('[') {
            Some(address) => {
                let Some((host, port)) = address.split_once(']') else {
                    bail!("`{url}`: an IPv6 address lacks its `]`");
                };
                (host, port.strip_prefix(':'))
            }
            None => match authority.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            },
        };
        let port = match port.map(str::parse) {
            None => 80,
            Some(Ok(port)) => port,
            Some(Err(_)) => bail!("`{url}`: expected a port number after the host"),
        };
        if host.is_empty() || host.contains('@') {
            bail!("`{url}`: expected a host name or address, found `{host}`");
        }
        let prefix = path(prefix)?.trim_end_matches('/').to_string();
        Ok(Self { host: host.into(), port, prefix })
    }

    /// Value of the Host header.
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

/// A path that can stand in a request line.
pub fn path(path: &str) -> Result<&str> {
    if path.bytes().any(|byte| byte <= b' ' || byte == 0x7f || byte == b'#') {
        bail!("`{path}` is not the path of a route");
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let check = |url: &str, expect: Option<(&str, u16, &str, &str)>| {
            let found = BaseUrl::parse(url).ok();
            let found = found.as_ref().map(|url| (url.host.as_str(), url.port, url.prefix.as_str(), url.authority()));
            assert_eq!(found, expect.map(|(h, port, prefix, a)| (h, port, prefix, a.to_string())), "{url}");
        };
        check("http://127.0.0.1:8000", Some(("127.0.0.1", 8000, "", "127.0.0.1:8000")));
        check("http://localhost/", Some(("localhost", 80, "", "localhost:80")));
        check("HTTP://a.example:81/openai/", Some(("a.example", 81, "/openai", "a.example:81")));
        check("http://[::1]:9", Some(("::1", 9, "", "[::1]:9")));
        for bad in [
            "https://a.example",
            "127.0.0.1:8000",
            "ftp://a",
            "http://",
            "http://:80",
            "http://u:p@h:1",
            "http://u@h",
            "http://[::1",
            "http://h:port",
            "http://h:70000",
            "http://h/a b",
        ] {
            check(bad, None);
        }
    }
}
