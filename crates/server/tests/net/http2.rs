//! HTTP/2: by prior knowledge on the plain port, and within its own limits.

use std::future::poll_fn;

use axum::http::{Request, Response, StatusCode};
use folio_server::net::NetConfig;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::support::{SOON, Server, config, eventually, millis};

pub type Sender = SendRequest<axum::body::Bytes>;

pub async fn connect(server: &Server) -> (Sender, JoinHandle<()>) {
    over(server.connect().await.0).await
}

pub async fn over(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> (Sender, JoinHandle<()>) {
    let (sender, connection) = timeout(SOON, h2::client::handshake(io)).await.expect("a handshake").unwrap();
    let connection = tokio::spawn(async move {
        let _ = connection.await;
    });
    (timeout(SOON, sender.ready()).await.expect("it is ready").unwrap(), connection)
}

pub fn get(client: &mut Sender, path: &str) -> ResponseFuture {
    client.send_request(request(path), true).unwrap().0
}

fn request(path: &str) -> Request<()> {
    Request::get(format!("http://localhost{path}")).body(()).unwrap()
}

pub async fn read(mut body: RecvStream) -> Result<String, h2::Error> {
    let mut text = String::new();
    while let Some(data) = timeout(SOON, body.data()).await.expect("the answer goes on") {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        text.push_str(std::str::from_utf8(&data).unwrap());
    }
    Ok(text)
}

async fn status(answer: ResponseFuture) -> Result<StatusCode, h2::Error> {
    timeout(SOON, answer).await.expect("an answer").map(|answer: Response<RecvStream>| answer.status())
}

#[tokio::test]
async fn by_prior_knowledge() {
    let server = Server::start(config()).await;
    let (mut client, _connection) = connect(&server).await;
    let answer = get(&mut client, "/health").await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(read(answer.into_body()).await.unwrap(), "ok");
    // More than any window, in one piece on the server's side.
    let answer = get(&mut client, "/large").await.unwrap();
    assert_eq!(read(answer.into_body()).await.unwrap().len(), 1 << 20);
}

#[tokio::test]
async fn a_request_s_body_arrives_whole() {
    let server = Server::start(config()).await;
    let (mut client, _connection) = connect(&server).await;
    let post = Request::post("http://localhost/pieces").body(()).unwrap();
    let (answer, mut body) = client.send_request(post, false).unwrap();
    let mut left = 1_000_000;
    while left > 0 {
        body.reserve_capacity(left);
        let room = timeout(SOON, poll_fn(|cx| body.poll_capacity(cx))).await.expect("room").unwrap().unwrap();
        body.send_data(vec![b'x'; room.min(left)].into(), false).unwrap();
        left -= room.min(left);
    }
    body.send_data(Default::default(), true).unwrap();
    let answer = read(answer.await.unwrap().into_body()).await.unwrap();
    assert!(answer.starts_with("1000000 bytes"), "{answer}");
}

#[tokio::test]
async fn headers_beyond_the_limits_are_refused() {
    let server = Server::start(config()).await;
    let (mut client, _connection) = connect(&server).await;
    let with = |fields: usize, bytes: usize| {
        let mut request = request("/health");
        for field in 0..fields {
            let name = axum::http::HeaderName::from_bytes(format!("field-{field}").as_bytes()).unwrap();
            request.headers_mut().insert(name, "x".repeat(bytes).parse().unwrap());
        }
        request
    };
    for (request, expected) in
        [(with(64, 1), 200), (with(65, 1), 431), (with(1, 30 << 10), 200), (with(1, 40 << 10), 431)]
    {
        let answer = client.send_request(request, true).unwrap().0;
        assert_eq!(status(answer).await.unwrap(), expected);
    }
    server.is_healthy().await;
}

#[tokio::test]
async fn streams_are_bounded() {
    let server = Server::start(config()).await;
    let (mut client, _connection) = connect(&server).await;
    get(&mut client, "/health").await.unwrap();
    assert_eq!(client.current_max_send_streams(), 128);
}

#[tokio::test]
async fn a_panic_ends_one_stream() {
    let server = Server::start(config()).await;
    let (mut client, _connection) = connect(&server).await;
    assert!(status(get(&mut client, "/panic")).await.is_err());
    assert_eq!(status(get(&mut client, "/health")).await.unwrap(), 200);
}

/// A stream whose client opens no window is reset; its neighbours on the same connection are not.
#[tokio::test]
async fn a_stream_that_nobody_reads_is_given_up_alone() {
    let server = Server::start(NetConfig { write_stall: millis(300), ..config() }).await;
    let (mut client, _connection) = connect(&server).await;
    for path in ["/endless", "/large"] {
        let dropped = server.seen.dropped();
        let stalls = server.config.stats.counts().write_stalls;
        let answer = get(&mut client, path).await.unwrap();
        assert_eq!(status(get(&mut client, "/health")).await.unwrap(), 200);
        let stalled = || server.config.stats.counts().write_stalls == stalls + 1;
        eventually("it is given up", stalled).await;
        if path == "/endless" {
            eventually("its body is dropped", || server.seen.dropped() == dropped + 1).await;
        }
        let error = read(answer.into_body()).await.expect_err("the answer is not whole");
        assert_eq!(error.reason(), Some(Reason::CANCEL));
        assert_eq!(status(get(&mut client, "/health")).await.unwrap(), 200);
    }
}

#[tokio::test]
async fn a_stream_that_is_read_slowly_is_kept() {
    let server = Server::start(NetConfig { write_stall: millis(500), ..config() }).await;
    let (mut client, _connection) = connect(&server).await;
    let mut body = get(&mut client, "/large").await.unwrap().into_body();
    let mut bytes = 0;
    let slow_until = Instant::now() + millis(1500);
    while let Some(data) = timeout(SOON, body.data()).await.expect("the answer goes on") {
        let data = data.unwrap();
        bytes += data.len();
        if Instant::now() < slow_until {
            tokio::time::sleep(millis(20)).await;
        }
        body.flow_control().release_capacity(data.len()).unwrap();
    }
    assert_eq!(bytes, 1 << 20);
}

#[tokio::test]
async fn an_idle_connection_is_told_goodbye() {
    let server = Server::start(NetConfig { idle_timeout: millis(150), ..config() }).await;
    let (mut client, connection) = connect(&server).await;
    assert_eq!(status(get(&mut client, "/health")).await.unwrap(), 200);
    timeout(SOON, connection).await.expect("the connection ends").unwrap();
    assert_eq!(server.config.stats.counts().idle_timeouts, 1);
    eventually("its place is free", || server.open() == 0).await;
}

/// Thousands of streams opened and reset at once: the connection may be closed for it, the server
/// goes on.
#[tokio::test]
async fn rapid_resets_harm_nobody() {
    let server = Server::start(config()).await;
    let (mut client, _connection) = connect(&server).await;
    for _ in 0..5_000 {
        match client.send_request(request("/hang"), true) {
            Ok((_, mut stream)) => stream.send_reset(Reason::CANCEL),
            Err(_) => break,
        }
        tokio::task::yield_now().await;
        if poll_fn(|cx| std::task::Poll::Ready(client.poll_ready(cx))).await.is_pending() {
            let _ = timeout(SOON, poll_fn(|cx| client.poll_ready(cx))).await.expect("room for a stream");
        }
    }
    server.is_healthy().await;
    eventually("nothing is left under way", || server.seen.begun() == server.seen.dropped()).await;
}
