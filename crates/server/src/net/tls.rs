//! TLS by rustls: a certificate chain and its key, read once at the start.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// Protocols that are offered, best first.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// A server's certificate and key, checked to belong together.
#[derive(Clone)]
pub struct Tls(Arc<ServerConfig>);

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {}: {why}", path.display())]
    Read { path: PathBuf, why: std::io::Error },
    #[error("{} is not valid PEM: {why}", path.display())]
    Pem { path: PathBuf, why: String },
    #[error("{} holds no certificate; expected PEM with a CERTIFICATE section", path.display())]
    NoCertificate { path: PathBuf },
    #[error("{} holds no private key; expected PEM with a PRIVATE KEY section that is not encrypted", path.display())]
    NoKey { path: PathBuf },
    #[error("the key in {} does not belong to the first certificate in {}", key.display(), certificates.display())]
    KeyDoesNotFit { certificates: PathBuf, key: PathBuf },
    #[error("cannot use the certificates in {} with the key in {}: {why}", certificates.display(), key.display())]
    Refused { certificates: PathBuf, key: PathBuf, why: rustls::Error },
}

impl Tls {
    /// Reads a chain, the server's own certificate first, and its key. Both may be in one file.
    pub fn from_pem_files(certificates: impl AsRef<Path>, key: impl AsRef<Path>) -> Result<Self, TlsError> {
        let (certificates, key) = (certificates.as_ref(), key.as_ref());
        let unreadable = |path: &Path, why| match why {
            pem::Error::Io(why) => TlsError::Read { path: path.into(), why },
            other => TlsError::Pem { path: path.into(), why: other.to_string() },
        };
        let chain = CertificateDer::pem_file_iter(certificates)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|why| unreadable(certificates, why))?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate { path: certificates.into() });
        }
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|why| match why {
            pem::Error::NoItemsFound => TlsError::NoKey { path: key.into() },
            other => unreadable(key, other),
        })?;
        let refused = |why| match why {
            rustls::Error::InconsistentKeys(rustls::InconsistentKeys::KeyMismatch) => {
                TlsError::KeyDoesNotFit { certificates: certificates.into(), key: key.into() }
            }
            why => TlsError::Refused { certificates: certificates.into(), key: key.into(), why },
        };
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(refused)?
            .with_no_client_auth()
            .with_single_cert(chain, secret)
            .map_err(refused)?;
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).into();
        Ok(Self(Arc::new(config)))
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.0.clone())
    }
}

/// The key stays out of logs.
impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}
