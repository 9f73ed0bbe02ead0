//! TLS: what is agreed, and what is said when the files or the client are wrong.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use folio_server::net::{NetConfig, Tls, TlsError};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::support::{Client, HEALTH, Server, config, eventually};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/net").join(name)
}

pub fn identity() -> Tls {
    Tls::from_pem_files(file("test-only-certificate.pem"), file("test-only-key.pem")).unwrap()
}

pub async fn connect(server: &Server, protocols: &[&[u8]]) -> Client<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(file("test-only-certificate.pem")).unwrap()).unwrap();
    let mut client = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    client.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let connector = TlsConnector::from(Arc::new(client));
    let tcp = server.connect().await.0;
    Client(connector.connect(ServerName::try_from("localhost").unwrap(), tcp).await.unwrap())
}

async fn server() -> Server {
    Server::start(NetConfig { tls: Some(identity()), ..config() }).await
}

#[tokio::test]
async fn http1_by_agreement_and_without() {
    let server = server().await;
    for protocols in [&[&b"http/1.1"[..]][..], &[]] {
        let mut client = connect(&server, protocols).await;
        client.send(HEALTH).await;
        assert!(client.answer().await.ends_with("ok"));
        client.send("GET /peer HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
        assert!(client.rest().await.ends_with("true true"));
    }
}

#[tokio::test]
async fn http2_by_agreement() {
    let server = server().await;
    let client = connect(&server, &[b"h2", b"http/1.1"]).await;
    assert_eq!(client.0.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut client, _connection) = crate::http2::over(client.0).await;
    let answer = crate::http2::get(&mut client, "/large").await.unwrap();
    assert_eq!(crate::http2::read(answer.into_body()).await.unwrap().len(), 1 << 20);
}

#[tokio::test]
async fn a_reader_that_takes_nothing_is_given_up() {
    let write_stall = crate::support::millis(200);
    let server = Server::start(NetConfig { write_stall, tls: Some(identity()), ..config() }).await;
    let mut client = connect(&server, &[]).await;
    client.send("GET /endless HTTP/1.1\r\nhost: x\r\n\r\n").await;
    eventually("its body is dropped", || server.seen.dropped() == 1).await;
    assert_eq!(server.config.stats.counts().write_stalls, 1);
}

#[tokio::test]
async fn plain_http_is_told_what_is_expected() {
    let server = server().await;
    let mut client = server.connect().await;
    client.send(HEALTH).await;
    let answer = client.rest().await;
    assert!(answer.starts_with("HTTP/1.1 400") && answer.ends_with("this address expects https:\n"), "{answer}");
    assert_eq!(server.config.stats.counts().tls_failures, 1);
}

#[tokio::test]
async fn garbage_ends_its_connection_alone() {
    let server = server().await;
    let mut client = server.connect().await;
    client.send([0xff; 1000]).await;
    client.rest().await;
    drop(client);
    eventually("it is counted and gone", || server.config.stats.counts().tls_failures == 1 && server.open() == 0).await;
    let mut client = connect(&server, &[]).await;
    client.send(HEALTH).await;
    assert!(client.answer().await.ends_with("ok"));
}

#[test]
fn files_that_do_not_do() {
    let (certificate, key) = (file("test-only-certificate.pem"), file("test-only-key.pem"));
    let check = |certificate: &Path, key: &Path, expected: &str| {
        let error: TlsError = Tls::from_pem_files(certificate, key).expect_err(expected);
        let text = error.to_string();
        assert!(text.contains(expected), "{text}");
    };
    check(Path::new("no-such-file"), &key, "cannot read no-such-file: ");
    check(&certificate, Path::new("no-such-file"), "cannot read no-such-file: ");
    check(&key, &key, "test-only-key.pem holds no certificate");
    check(&certificate, &certificate, "test-only-certificate.pem holds no private key");
    check(&certificate, &file("other-test-only-key.pem"), "other-test-only-key.pem does not belong");
    check(&file("main.rs"), &key, "main.rs holds no certificate");
}
