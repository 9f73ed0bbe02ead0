//! `folio health`, over HTTP and TLS.

use std::process::Output;

use crate::output;
use crate::server::Server;

/// Self-signed and marked as an authority, as `openssl req -x509` makes certificates, for another
/// name than the requested address; the key is in the same file.
const OWN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/blackbox/test-only-authority.pem");
/// Another server's, for localhost.
const OTHER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../server/tests/net/test-only-certificate.pem");

fn health(url: &str, flags: &[&str]) -> Output {
    output(&[&["health", "--url", url], flags].concat())
}

#[test]
fn a_server_with_tls_is_asked_by_tls() {
    let server = Server::start(&["--max-num-seqs", "1", "--tls-cert", OWN, "--tls-key", OWN]);
    let place = format!("127.0.0.1:{}", server.port);
    let https = format!("https://{place}");
    let check = |url: &str, flags: &[&str], code: i32, part: &str| {
        let output = health(url, flags);
        let said = [&output.stdout[..], &output.stderr[..]].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(output.status.code() == Some(code) && said.contains(part), "{url} {flags:?}: {code}, {part:?}: {said}");
    };
    // Like a container's check, which knows only the port; loopback needs no secret.
    check(&place, &[], 0, "200");
    check(&https, &[], 0, "200");
    check(&https, &["--ca", OWN], 0, "200");
    check(&place, &["--ca", OWN], 0, "200");
    check(&https, &["--insecure"], 0, "200");
    // A named certificate must be the server's.
    check(&https, &["--ca", OTHER], 1, "--ca FILE");
    check(&place, &["--ca", OTHER], 1, "--ca FILE");
    check(&https, &["--ca", "/no/such/file"], 1, "/no/such/file");
    check(&format!("http://{place}"), &[], 1, "400");
}

#[test]
fn a_server_without_tls_is_asked_without() {
    let server = Server::start(&["--max-num-seqs", "1"]);
    let place = format!("127.0.0.1:{}", server.port);
    assert_eq!(health(&place, &[]).status.code(), Some(0));
    assert_eq!(health(&format!("http://{place}"), &[]).status.code(), Some(0));
    assert_eq!(health(&format!("https://{place}"), &[]).status.code(), Some(1));
    drop(server);
    let output = health(&place, &[]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("could not reach"), "{said}");
}
