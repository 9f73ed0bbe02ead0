//! The same corpus in HTTP/2, as far as it can be said there: a second way in has the same checks.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderName, HeaderValue, Method, Request};
use h2::client::SendRequest;

use crate::corpus::client::{Answer, verdict};
use crate::corpus::{Case, Expect, ROUTES, cases};
use crate::harness::{Setup, start_with};

/// A case as HTTP/2 would have it; none where it is about what only HTTP/1 has.
fn translated(case: &Case) -> Option<(Request<()>, Bytes)> {
    if matches!(case.expect, Expect::Unsound(_)) {
        return None;
    }
    let end = case.request.windows(4).position(|window| window == b"\r\n\r\n")?;
    let body = Bytes::copy_from_slice(&case.request[end + 4..]);
    let mut lines = std::str::from_utf8(&case.request[..end]).ok()?.split("\r\n");
    let mut words = lines.next()?.split(' ');
    let (method, target) = (words.next()?, words.next()?);
    if !target.starts_with('/') {
        return None;
    }
    let mut request = Request::builder()
        .method(Method::from_bytes(method.as_bytes()).ok()?)
        .uri(format!("http://localhost{target}"))
        .body(())
        .ok()?;
    let mut has_host = false;
    for line in lines {
        let (name, value) = line.split_once(':')?;
        match name {
            "host" if value == " localhost" => {
                has_host = true;
                continue;
            }
            "host" | "connection" | "transfer-encoding" | "upgrade" => return None,
            "content-length" if value.trim() != body.len().to_string() => return None,
            _ => {}
        }
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        request.headers_mut().append(name, HeaderValue::from_str(value.trim()).ok()?);
    }
    has_host.then_some((request, body))
}

async fn connect(address: SocketAddr) -> SendRequest<Bytes> {
    let socket = tokio::net::TcpStream::connect(address).await.expect("it listens");
    socket.set_nodelay(true).expect("a socket");
    let (sender, connection) = h2::client::handshake(socket).await.expect("a handshake");
    tokio::spawn(connection);
    sender
}

/// `None`: the connection ended.
async fn ask(sender: &SendRequest<Bytes>, request: Request<()>, body: Bytes) -> Option<Answer> {
    let mut sender = sender.clone().ready().await.ok()?;
    let (answer, mut stream) = sender.send_request(request, body.is_empty()).ok()?;
    let mut rest = body;
    while !rest.is_empty() {
        stream.reserve_capacity(rest.len());
        // A server that has refused already takes no more.
        let Some(Ok(room)) = poll_fn(|context| stream.poll_capacity(context)).await else { break };
        let piece = rest.split_to(room.min(rest.len()));
        if stream.send_data(piece, rest.is_empty()).is_err() {
            break;
        }
    }
    let (head, mut body) = answer.await.ok()?.into_parts();
    let mut bytes = Vec::new();
    while let Some(Ok(data)) = body.data().await {
        let _ = body.flow_control().release_capacity(data.len());
        bytes.extend_from_slice(&data);
    }
    Some(Answer::new(head.status.as_u16(), String::from_utf8_lossy(&bytes).into_owned()))
}

#[tokio::test]
async fn the_corpus_in_http2() {
    let server = start_with(Setup {
        keys: "0123456789abcdef0123456789abcdef name=corpus",
        max_seqs: 32,
        all_bytes: true,
        ..Setup::default()
    });
    let mut sender = connect(server.address).await;
    let (mut count, mut wrong) = (0, Vec::new());
    for case in ROUTES.iter().flat_map(cases) {
        let Some((request, body)) = translated(&case) else { continue };
        count += 1;
        let answer = tokio::time::timeout(Duration::from_secs(60), ask(&sender, request, body));
        match answer.await {
            Ok(Some(answer)) => wrong.extend(verdict(&case, &answer).err()),
            _ => {
                wrong.push(format!("{} {}: no answer", case.route.path, case.name));
                sender = connect(server.address).await;
            }
        }
    }
    println!("{count} requests");
    assert!(count >= 400 * ROUTES.len() / 2, "{count} requests");
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(server.connections.counts().accepted, 1, "one connection served them all");
}
