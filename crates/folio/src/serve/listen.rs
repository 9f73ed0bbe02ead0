//! The server's sockets, bound before anything is loaded.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use folio_server::guard::Hosts;
use folio_server::net::{Listener, Tls};

use crate::args::ListenArgs;

pub struct Bound {
    socket: Socket,
    pub tls: Option<Tls>,
    /// The second address for metrics.
    pub metrics: Option<TcpListener>,
}

enum Socket {
    Tcp(TcpListener, SocketAddr),
    #[cfg(unix)]
    Unix(std::os::unix::net::UnixListener, SocketFile),
}

/// The file of a Unix socket, removed when the server ends.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // The file may have been removed already.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Bound {
    pub fn new(args: &ListenArgs) -> Result<Self> {
        let tls = match (&args.tls_cert, &args.tls_key) {
            (Some(certificates), Some(key)) => Some(Tls::from_pem_files(certificates, key)?),
            _ => None,
        };
        let socket = match &args.uds {
            Some(path) => bind_file(path)?,
            None => {
                let (listener, address) = bind(SocketAddr::new(args.host, args.port))?;
                Socket::Tcp(listener, address)
            }
        };
        let metrics = args.metrics_listen.map(bind).transpose().context("--metrics-listen")?;
        Ok(Self { socket, tls, metrics: metrics.map(|(listener, _)| listener) })
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        match &self.socket {
            Socket::Tcp(_, address) => format!("{scheme}://{address}"),
            #[cfg(unix)]
            Socket::Unix(_, file) => format!("unix:{}", file.0.display()),
        }
    }

    /// The URL to try on this machine; a wildcard address is replaced by loopback.
    pub fn curl(&self) -> String {
        match &self.socket {
            Socket::Tcp(_, address) if address.ip().is_unspecified() => {
                let near = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), address.port());
                self.url().replace(&address.to_string(), &near.to_string())
            }
            Socket::Tcp(..) => self.url(),
            #[cfg(unix)]
            Socket::Unix(_, file) => format!("--unix-socket {} http://localhost", file.0.display()),
        }
    }

    /// Accepted Host names. Browsers cannot reach a Unix socket, so any name is accepted there.
    pub fn hosts(&self, allowed: &[String]) -> Result<Hosts> {
        match &self.socket {
            Socket::Tcp(_, address) => Hosts::new(address.ip(), allowed).context("--allowed-hosts"),
            #[cfg(unix)]
            Socket::Unix(..) if allowed.is_empty() => Ok(Hosts::any()),
            #[cfg(unix)]
            Socket::Unix(..) => Hosts::new(Ipv4Addr::LOCALHOST.into(), allowed).context("--allowed-hosts"),
        }
    }

    /// A second handle of the same socket, for the current runtime.
    pub fn listener(&self) -> Result<Listener> {
        match &self.socket {
            Socket::Tcp(listener, _) => Ok(Listener::Tcp(tokio::net::TcpListener::from_std(listener.try_clone()?)?)),
            #[cfg(unix)]
            Socket::Unix(listener, _) => Ok(Listener::Unix(tokio::net::UnixListener::from_std(listener.try_clone()?)?)),
        }
    }

    pub fn metrics_listener(&self) -> Result<Option<Listener>> {
        let Some(listener) = &self.metrics else { return Ok(None) };
        Ok(Some(Listener::Tcp(tokio::net::TcpListener::from_std(listener.try_clone()?)?)))
    }

    pub fn metrics_url(&self) -> Option<String> {
        let address = self.metrics.as_ref()?.local_addr().ok()?;
        Some(format!("http://{address}/metrics"))
    }
}

fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).with_context(|| format!("could not listen on {address}"))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Binds a Unix socket. A stale socket file is replaced; one in use, or any other file, is not.
#[cfg(unix)]
fn bind_file(path: &Path) -> Result<Socket> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    use std::os::unix::net::{UnixListener, UnixStream};
    let bind = || -> Result<Socket> {
        if let Ok(about) = std::fs::symlink_metadata(path) {
            anyhow::ensure!(about.file_type().is_socket(), "the file exists and is not a socket");
            anyhow::ensure!(UnixStream::connect(path).is_err(), "another server listens on it");
            std::fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        let file = SocketFile(path.to_path_buf());
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Socket::Unix(listener, file))
    };
    bind().with_context(|| format!("--uds {}", path.display()))
}

#[cfg(not(unix))]
fn bind_file(path: &Path) -> Result<Socket> {
    anyhow::bail!("--uds {}: this system has no Unix sockets", path.display())
}
