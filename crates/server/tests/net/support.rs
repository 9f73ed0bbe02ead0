//! A server with a small router, and a client that sends bytes as they are.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::routing::{any, get, post};
use axum::{Extension, Router};
use folio_server::net::{Listener, NetConfig, Peer, Shutdown, ShutdownHandle, serve};
use futures_core::Stream;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

/// A bound for things that should happen soon, however busy the machine is.
pub const SOON: Duration = Duration::from_secs(20);

pub fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Long limits, so that only the one a test sets can be reached.
pub fn config() -> NetConfig {
    let long = SOON * 10;
    let (header_timeout, idle_timeout, write_stall, unread_timeout) = (long, long, long, long);
    NetConfig { header_timeout, idle_timeout, write_stall, unread_timeout, ..NetConfig::default() }
}

/// The requests that the routes saw.
#[derive(Default)]
pub struct Seen {
    /// Requests whose heads have been read, whatever becomes of them.
    pub heads: AtomicUsize,
    /// Requests to routes that take their time.
    pub begun: AtomicUsize,
    /// Requests to `/hang`, `/ignore-body` and `/held`, and bodies of `/endless` and `/fed` that
    /// were dropped.
    pub dropped: AtomicUsize,
    /// Says what `/fed` streams; closed ends it.
    pub feed: std::sync::Mutex<Option<mpsc::Receiver<&'static str>>>,
    /// Lets one request to `/held` have its answer.
    pub release: Notify,
}

impl Seen {
    pub fn heads(&self) -> usize {
        self.heads.load(Ordering::SeqCst)
    }

    pub fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    pub fn dropped(&self) -> usize {
        self.dropped.load(Ordering::SeqCst)
    }

    fn watch(self: Arc<Self>) -> Watched {
        self.begun.fetch_add(1, Ordering::SeqCst);
        Watched(self)
    }
}

struct Watched(Arc<Seen>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

/// A body that never ends, as fast as it is read.
struct Endless(#[expect(dead_code, reason = "counts when it is dropped")] Watched);

impl Stream for Endless {
    type Item = io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(Some(Ok(Bytes::from_static(&[b'x'; 1024]))))
    }
}

/// A body that a test writes.
struct Fed(mpsc::Receiver<&'static str>, #[expect(dead_code, reason = "counts when it is dropped")] Watched);

impl Stream for Fed {
    type Item = io::Result<&'static str>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|piece| piece.map(Ok))
    }
}

async fn read_impatiently(request: Request) -> StatusCode {
    match timeout(millis(100), axum::body::to_bytes(request.into_body(), 1 << 20)).await {
        Ok(Ok(_)) => StatusCode::OK,
        Ok(Err(_)) => StatusCode::BAD_REQUEST,
        Err(_) => StatusCode::REQUEST_TIMEOUT,
    }
}

async fn count_pieces(request: Request) -> String {
    let mut body = request.into_body().into_data_stream();
    let (mut pieces, mut bytes) = (0, 0);
    while let Some(Ok(piece)) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_next(cx)).await {
        pieces += 1;
        bytes += piece.len();
    }
    format!("{bytes} bytes in {pieces} pieces")
}

pub fn router(seen: &Arc<Seen>) -> Router {
    let [all, hang, ignore, held, endless, fed] = std::array::from_fn(|_| seen.clone());
    Router::new()
        .route("/health", get(async || "ok"))
        .route("/echo", post(async |body: Bytes| body))
        .route("/large", get(async || vec![b'x'; 1 << 20]))
        .route("/pieces", post(count_pieces))
        .route("/impatient", post(read_impatiently))
        .route("/unread", post(async || StatusCode::UNAUTHORIZED))
        .route(
            "/peer",
            get(async |Extension(peer): Extension<Peer>| format!("{} {}", peer.address.is_some(), peer.tls)),
        )
        .route("/panic", get(async || -> StatusCode { panic!("a handler's bug, on purpose") }))
        .route(
            "/hang",
            any(async move || {
                let _watched = hang.watch();
                std::future::pending::<StatusCode>().await
            }),
        )
        .route(
            "/ignore-body",
            post(async move |request: Request| {
                let _watched = (ignore.watch(), request);
                std::future::pending::<StatusCode>().await
            }),
        )
        .route(
            "/held",
            any(async move |body: Bytes| {
                let watched = held.watch();
                watched.0.release.notified().await;
                body
            }),
        )
        .route("/endless", get(async move || Body::from_stream(Endless(endless.watch()))))
        .route(
            "/fed",
            get(async move || {
                let feed = fed.feed.lock().unwrap().take().expect("one request a feed");
                Body::from_stream(Fed(feed, fed.watch()))
            }),
        )
        .fallback(async || StatusCode::NOT_FOUND)
        .layer(axum::middleware::from_fn(move |request: Request, next: Next| {
            all.heads.fetch_add(1, Ordering::SeqCst);
            next.run(request)
        }))
}

pub struct Server {
    pub address: SocketAddr,
    pub seen: Arc<Seen>,
    pub shutdown: ShutdownHandle,
    pub config: NetConfig,
    pub task: JoinHandle<io::Result<()>>,
}

impl Server {
    pub async fn start(config: NetConfig) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Seen>::default();
        let (handle, shutdown) = Shutdown::new();
        let task = tokio::spawn(serve(Listener::Tcp(listener), router(&seen), config.clone(), shutdown));
        Self { address, seen, shutdown: handle, config, task }
    }

    pub async fn connect(&self) -> Client<TcpStream> {
        Client(TcpStream::connect(self.address).await.unwrap())
    }

    /// A new client is answered: the server is alive.
    pub async fn is_healthy(&self) {
        let mut client = self.connect().await;
        client.send("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
        let answer = client.rest().await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    }

    pub fn open(&self) -> u64 {
        self.config.stats.counts().open
    }

    /// `serve` returns, without an error.
    pub async fn ends(self) {
        timeout(SOON, self.task).await.expect("the server ends").unwrap().unwrap();
    }
}

/// A connection on which nothing is read or written but what a test asks for.
pub struct Client<S>(pub S);

impl<S: AsyncRead + AsyncWrite + Unpin> Client<S> {
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        timeout(SOON, self.0.write_all(bytes.as_ref())).await.expect("the server takes it").unwrap();
    }

    /// An answer with a content-length: head and body.
    pub async fn answer(&mut self) -> String {
        let mut answer = self.until("\r\n\r\n").await;
        let length = answer
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .map_or(0, |length| length.parse::<usize>().unwrap());
        let mut body = vec![0; length];
        timeout(SOON, self.0.read_exact(&mut body)).await.expect("a body comes").unwrap();
        answer.push_str(std::str::from_utf8(&body).unwrap());
        answer
    }

    /// Reads byte by byte up to and with `end`.
    pub async fn until(&mut self, end: &str) -> String {
        let mut read = Vec::new();
        while !read.ends_with(end.as_bytes()) {
            let byte = timeout(SOON, self.0.read_u8()).await.unwrap_or_else(|_| panic!("no {end:?} in {read:?}"));
            read.push(byte.unwrap_or_else(|error| panic!("{error} after {:?}", String::from_utf8_lossy(&read))));
        }
        String::from_utf8(read).unwrap()
    }

    /// Everything up to the connection's end, whether it was closed or reset.
    pub async fn rest(&mut self) -> String {
        let mut rest = Vec::new();
        let mut bytes = [0; 4096];
        loop {
            match timeout(SOON, self.0.read(&mut bytes)).await.expect("the server closes the connection") {
                Ok(0) | Err(_) => return String::from_utf8_lossy(&rest).into_owned(),
                Ok(count) => rest.extend_from_slice(&bytes[..count]),
            }
        }
    }
}

pub const HEALTH: &str = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";

/// Polls, with a deadline.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(millis(2)).await;
    }
}
