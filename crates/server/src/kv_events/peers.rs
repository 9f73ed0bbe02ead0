//! The conversation with one peer, a subscriber or a client of the replay socket, until it leaves.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::log::{Batch, Log};
use super::zmtp::{self, Frame, PeerCommand, Role};

/// The longest handshake, and the longest time in which a peer may read nothing, before its
/// connection is closed.
const PEER_TIMEOUT: Duration = Duration::from_secs(30);
/// A replay is written in pieces of about this size.
const REPLAY_CHUNK_BYTES: usize = 64 << 10;
/// The sequence number of the message that ends a replay.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];

/// The state that all peers of a publisher share.
#[derive(Debug)]
pub struct Feed {
    pub log: Log,
    topic: Vec<u8>,
    /// Each active subscriber holds a clone, so that the count of clones counts subscribers.
    subscribed: Arc<()>,
}

impl Feed {
    pub fn new(log: Log, topic: String) -> Self {
        Self { log, topic: topic.into_bytes(), subscribed: Arc::new(()) }
    }

    #[cfg(test)]
    pub fn num_subscribers(&self) -> usize {
        Arc::strong_count(&self.subscribed) - 1
    }
}

/// The number of a peer's subscriptions that match the topic; a batch is sent once, whatever their
/// number.
#[derive(Default)]
struct Subscriptions {
    matching: usize,
    held: Option<Arc<()>>,
}

impl Subscriptions {
    fn add(&mut self, feed: &Feed) {
        self.matching += 1;
        self.held.get_or_insert_with(|| Arc::clone(&feed.subscribed));
    }

    fn cancel(&mut self) {
        self.matching = self.matching.saturating_sub(1);
        if self.matching == 0 {
            self.held = None;
        }
    }
}

/// A change that a subscriber's frame makes to the task that sends to it.
enum Order {
    Subscribe,
    Cancel,
    Pong(Vec<u8>),
}

/// Sends a subscriber every batch after its subscription, as long as it keeps up with the log.
pub async fn serve_subscriber(mut peer: TcpStream, feed: Arc<Feed>) -> io::Result<()> {
    peer.set_nodelay(true)?;
    in_time(zmtp::shake_hands(&mut peer, Role::Pub)).await?;
    let (reader, writer) = peer.into_split();
    let (orders, ordered) = mpsc::channel(16);
    // Neither of the two futures is dropped within a frame, except at the end of both.
    tokio::select! {
        end = read_orders(BufReader::new(reader), &feed.topic, orders) => end,
        end = send_batches(writer, &feed, ordered) => end,
    }
}

async fn read_orders(mut peer: impl AsyncRead + Unpin, topic: &[u8], orders: mpsc::Sender<Order>) -> io::Result<()> {
    loop {
        let frame = zmtp::read_frame(&mut peer).await?;
        // The only topic decides at once whether a prefix matches, so that prefixes are not stored.
        let order = match frame.command() {
            PeerCommand::Subscribe(prefix) if topic.starts_with(prefix) => Order::Subscribe,
            PeerCommand::Cancel(prefix) if topic.starts_with(prefix) => Order::Cancel,
            PeerCommand::Ping(context) => Order::Pong(context.into()),
            _ => continue,
        };
        orders.send(order).await.map_err(io::Error::other)?;
    }
}

async fn send_batches(
    mut peer: impl AsyncWrite + Unpin,
    feed: &Feed,
    mut orders: mpsc::Receiver<Order>,
) -> io::Result<()> {
    let mut subscriptions = Subscriptions::default();
    let mut next_seq = 0;
    let mut out = Vec::new();
    loop {
        out.clear();
        tokio::select! {
            biased;
            order = orders.recv() => match order {
                None => return Ok(()),
                Some(Order::Pong(context)) => zmtp::put_command(&mut out, "PONG", &context),
                Some(Order::Cancel) => subscriptions.cancel(),
                Some(Order::Subscribe) => {
                    if subscriptions.matching == 0 {
                        next_seq = feed.log.next_seq();
                    }
                    subscriptions.add(feed);
                }
            },
            batch = feed.log.at_or_after(next_seq), if subscriptions.matching > 0 => {
                next_seq = batch.seq + 1;
                zmtp::put_message(&mut out, &[&feed.topic, &batch.seq.to_be_bytes(), &batch.payload]);
            }
        }
        in_time(peer.write_all(&out)).await?;
    }
}

/// Answers each request (an empty frame and a number of eight bytes) with the batches from that
/// number on, each as it was published after an empty frame, and with an end mark.
pub async fn serve_replay(mut peer: TcpStream, feed: Arc<Feed>) -> io::Result<()> {
    peer.set_nodelay(true)?;
    in_time(zmtp::shake_hands(&mut peer, Role::Router)).await?;
    let (reader, mut writer) = peer.into_split();
    let mut reader = BufReader::new(reader);
    loop {
        let start = read_request(&mut reader, &mut writer).await?;
        let batches = feed.log.since(start);
        let mut out = Vec::new();
        for batch in batches {
            let Batch { seq, payload } = &*batch;
            zmtp::put_message(&mut out, &[&[], &feed.topic, &seq.to_be_bytes(), payload]);
            if out.len() >= REPLAY_CHUNK_BYTES {
                in_time(writer.write_all(&out)).await?;
                out.clear();
            }
        }
        zmtp::put_message(&mut out, &[&[], &[], &END_OF_REPLAY, &[]]);
        in_time(writer.write_all(&out)).await?;
    }
}

/// The first sequence number of the next well-formed request; malformed ones are skipped, as in
/// vLLM.
async fn read_request(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
) -> io::Result<u64> {
    let mut delimited = false;
    let mut num_frames = 0_u8;
    loop {
        let frame = zmtp::read_frame(reader).await?;
        let Frame::Message { body, more } = &frame else {
            if let PeerCommand::Ping(context) = frame.command() {
                let mut out = Vec::new();
                zmtp::put_command(&mut out, "PONG", context);
                in_time(writer.write_all(&out)).await?;
            }
            continue;
        };
        num_frames = num_frames.saturating_add(1);
        match <[u8; 8]>::try_from(body.as_slice()) {
            Ok(start) if num_frames == 2 && delimited && !more => return Ok(u64::from_be_bytes(start)),
            _ if *more => delimited = num_frames == 1 && body.is_empty(),
            _ => num_frames = 0,
        }
    }
}

async fn in_time<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(PEER_TIMEOUT, work).await.map_err(|_| io::Error::from(ErrorKind::TimedOut))?
}
