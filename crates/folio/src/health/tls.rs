//! TLS of `folio health`, and the certificates that it trusts.
//!
//! Request and answer are no secrets, so on loopback a check of the certificate adds nothing to
//! plain HTTP: any certificate is trusted there, unless `--ca` names one. Elsewhere the certificate
//! must be the named one, or signed by a public authority.

use std::net::{IpAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    self, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme, StreamOwned,
};

/// The certificates that are trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    Any,
    /// One of these, whatever its name, or one that they signed for the server's name.
    Named(Vec<CertificateDer<'static>>),
    PublicAuthorities,
}

impl Trust {
    pub fn of(named: Option<&Path>, insecure: bool, address: IpAddr) -> Result<Self> {
        match named {
            Some(path) => Self::read(path).with_context(|| format!("--ca {}", path.display())),
            None if insecure || address.to_canonical().is_loopback() => Ok(Self::Any),
            None => Ok(Self::PublicAuthorities),
        }
    }

    fn read(path: &Path) -> Result<Self> {
        let certificates: Vec<_> = CertificateDer::pem_file_iter(path)?.collect::<Result<_, _>>()?;
        ensure!(!certificates.is_empty(), "no certificate found; expected PEM with a CERTIFICATE section");
        Ok(Self::Named(certificates))
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        match self {
            Self::Any => {}
            Self::Named(certificates) => drop(roots.add_parsable_certificates(certificates.iter().cloned())),
            Self::PublicAuthorities => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        }
        roots
    }
}

pub fn connect(stream: TcpStream, host: &str, trust: Trust) -> Result<StreamOwned<ClientConnection, TcpStream>> {
    let name = host.trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(name.to_string()).with_context(|| format!("{host} is not a valid server name"))?;
    let provider = Arc::new(ring::default_provider());
    let verifier = Verifier::new(trust, Arc::clone(&provider))?;
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    let mut connection = ClientConnection::new(Arc::new(config), name)?;
    let mut stream = stream;
    while connection.is_handshaking() {
        connection.complete_io(&mut stream).with_context(|| {
            format!("TLS handshake with {host} failed (trust its certificate with --ca FILE, or any with --insecure)")
        })?;
    }
    Ok(StreamOwned::new(connection, stream))
}

/// Checks certificates. The server must prove in any case that it holds the certificate's key.
#[derive(Debug)]
struct Verifier {
    trust: Trust,
    /// None if no authority is trusted.
    authorities: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn new(trust: Trust, provider: Arc<CryptoProvider>) -> Result<Self> {
        let roots = trust.roots();
        let authorities = match roots.is_empty() {
            true => None,
            false => Some(WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build()?),
        };
        Ok(Self { trust, authorities, provider })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match (&self.trust, &self.authorities) {
            (Trust::Any, _) => Ok(ServerCertVerified::assertion()),
            (Trust::Named(named), _) if named.contains(certificate) => Ok(ServerCertVerified::assertion()),
            (_, Some(authorities)) => authorities.verify_server_cert(certificate, between, name, ocsp, now),
            (_, None) => Err(rustls::CertificateError::UnknownIssuer.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trusted_certificates() {
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let check = |insecure: bool, text: &str, expect: Trust| {
            assert_eq!(Trust::of(None, insecure, address(text)).expect("nothing is read"), expect, "{text}");
        };
        check(false, "127.0.0.1", Trust::Any);
        check(false, "::1", Trust::Any);
        check(false, "::ffff:127.0.0.1", Trust::Any);
        check(false, "10.0.0.1", Trust::PublicAuthorities);
        check(false, "0.0.0.0", Trust::PublicAuthorities);
        check(true, "10.0.0.1", Trust::Any);
        assert!(!Trust::PublicAuthorities.roots().is_empty());
        let named = |text: &str| {
            let path = std::env::temp_dir().join(format!("folio-health-{}.pem", std::process::id()));
            std::fs::write(&path, text).expect("writable");
            // A named certificate is required on loopback too.
            let trust = Trust::of(Some(&path), false, address("127.0.0.1"));
            std::fs::remove_file(&path).expect("it is there");
            trust
        };
        let pem = include_str!("../../../server/tests/net/test-only-certificate.pem");
        assert!(matches!(named(pem), Ok(Trust::Named(certificates)) if certificates.len() == 1));
        let error = format!("{:#}", named("nothing").expect_err("it holds none"));
        assert!(error.contains("--ca") && error.contains("CERTIFICATE"), "{error}");
    }
}
