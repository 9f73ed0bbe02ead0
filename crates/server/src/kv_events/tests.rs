//! The publisher over real sockets, with clients that send the bytes of libzmq 4.3.5.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use folio_engine::{KvEvent, Medium};

use super::peers::Feed;
use super::{KvEventPublisher, KvEventsConfig, encode};

/// The time after which a test fails; a passing test never takes so long.
const DEADLINE: Duration = Duration::from_secs(30);

/// The parts of a running publisher that tests observe.
#[derive(Debug)]
pub(super) struct Probe {
    live: SocketAddr,
    replay: Option<SocketAddr>,
    feed: Arc<Feed>,
}

impl Probe {
    pub fn new(live: &TcpListener, replay: Option<&TcpListener>, feed: &Arc<Feed>) -> std::io::Result<Self> {
        let replay = replay.map(TcpListener::local_addr).transpose()?;
        Ok(Self { live: live.local_addr()?, replay, feed: Arc::clone(feed) })
    }

    fn wait_until(&self, what: &str, holds: impl Fn(&Feed) -> bool) {
        let start = Instant::now();
        while !holds(&self.feed) {
            assert!(start.elapsed() < DEADLINE, "{what}");
            std::thread::yield_now();
        }
    }

    fn wait_for_subscribers(&self, count: usize) {
        self.wait_until("subscribers come and go", |feed| feed.num_subscribers() == count);
    }
}

/// The greeting of libzmq 4.3.5, which speaks ZMTP 3.1, and its READY without the identity that is
/// optional.
fn hello(socket_type: &str) -> Vec<u8> {
    let mut bytes = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL".to_vec();
    bytes.resize(64, 0);
    bytes.extend([4, 22 + socket_type.len() as u8]);
    bytes.extend(b"\x05READY\x0bSocket-Type\0\0\0");
    bytes.push(socket_type.len() as u8);
    bytes.extend(socket_type.as_bytes());
    bytes
}

struct Client(TcpStream);

impl Client {
    fn connect(address: SocketAddr, socket_type: &str, server_type: &str) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut client = Self(stream);
        client.say(&hello(socket_type));
        let mut expect = hello(server_type);
        expect[11] = 0; // We speak 3.0.
        assert_eq!(client.read(expect.len()), expect);
        client
    }

    fn subscribe(publisher: &KvEventPublisher, prefix: &[u8]) -> Self {
        let mut client = Self::connect(publisher.probe.live, "SUB", "PUB");
        client.say(&[&[0, prefix.len() as u8 + 1, 1], prefix].concat());
        client
    }

    fn say(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn message(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        loop {
            let flags = self.read(1)[0];
            let len = if flags & 2 == 0 {
                self.read(1)[0].into()
            } else {
                u64::from_be_bytes(self.read(8).try_into().unwrap()) as usize
            };
            frames.push(self.read(len));
            if flags & 1 == 0 {
                return frames;
            }
        }
    }

    fn seq(&mut self) -> u64 {
        u64::from_be_bytes(self.message()[1].as_slice().try_into().unwrap())
    }

    /// Asks for a replay and gives the sequence numbers of the answer, up to the end mark.
    fn replay(&mut self, start: u64, topic: &[u8]) -> Vec<u64> {
        self.say(&[&[1, 0, 0, 8][..], &start.to_be_bytes()].concat());
        let mut seqs = Vec::new();
        loop {
            let frames = self.message();
            let [empty, found, seq, payload] = frames.as_slice() else { panic!("{frames:?}") };
            assert!(empty.is_empty());
            if seq == &[0xff; 8] {
                assert!(found.is_empty() && payload.is_empty(), "{frames:?}");
                return seqs;
            }
            assert_eq!(found, topic);
            let seq = u64::from_be_bytes(seq.as_slice().try_into().unwrap());
            assert_eq!(untimed(payload), untimed(&encode::batch(0.0, &[event(seq)], &[])));
            seqs.push(seq);
        }
    }

    fn assert_closed(&mut self) {
        match self.0.read(&mut [0; 256]) {
            Ok(0) => {}
            Ok(_) => self.assert_closed(),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }
}

/// A payload without its time, which is nine bytes after the first.
fn untimed(payload: &[u8]) -> Vec<u8> {
    [&payload[..1], &payload[10..]].concat()
}

fn event(hash: u64) -> KvEvent {
    KvEvent::Removed { hashes: vec![hash], medium: Medium::Device, group: 0 }
}

fn start(config: KvEventsConfig) -> (KvEventPublisher, flume::Sender<Vec<KvEvent>>) {
    let (events, received) = flume::bounded(1);
    let endpoint = "tcp://127.0.0.1:0".to_string();
    let replay_endpoint = Some(endpoint.clone());
    let publisher = KvEventPublisher::start(KvEventsConfig { endpoint, replay_endpoint, ..config }, received).unwrap();
    (publisher, events)
}

#[test]
fn a_subscriber_gets_every_batch_in_three_frames() {
    let topic = "kv@pod@model".to_string();
    let windows = vec![None, Some(32)];
    let (publisher, events) = start(KvEventsConfig { topic, windows: windows.clone(), ..KvEventsConfig::default() });
    let mut client = Client::subscribe(&publisher, b"kv@");
    publisher.probe.wait_for_subscribers(1);
    let stored = |group| KvEvent::Stored {
        hashes: vec![8, u64::MAX],
        parent: Some(7),
        tokens: (0..32).collect(),
        block_tokens: 16,
        medium: Medium::Host,
        group,
    };
    let batches = [vec![stored(0), stored(1)], vec![event(1), KvEvent::Cleared], vec![event(2)]];
    events.send(Vec::new()).unwrap(); // No events: no message, no number.
    for batch in &batches {
        events.send(batch.clone()).unwrap();
    }
    for (seq, batch) in batches.iter().enumerate() {
        let frames = client.message();
        let [topic, number, payload] = frames.as_slice() else { panic!("{frames:?}") };
        assert_eq!((topic.as_slice(), number.as_slice()), (&b"kv@pod@model"[..], &(seq as u64).to_be_bytes()[..]));
        let seconds = f64::from_be_bytes(payload[2..10].try_into().unwrap());
        assert_eq!(payload, &encode::batch(seconds, batch, &windows));
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        assert!((now - seconds).abs() < DEADLINE.as_secs_f64(), "{seconds} is not about {now}");
    }
}

#[test]
fn only_what_is_subscribed_to_is_sent() {
    let (publisher, events) = start(KvEventsConfig { topic: "kv@pod".into(), ..KvEventsConfig::default() });
    let mut other = Client::subscribe(&publisher, b"kv@node");
    let mut client = Client::subscribe(&publisher, b"");
    // The same subscription twice as ZMTP 3.1 writes it, and one of them cancelled: a batch is
    // still sent, and sent once.
    client.say(b"\x04\x0d\x09SUBSCRIBEkv@\x04\x07\x06CANCEL");
    client.say(b"\x04\x09\x04PING\0\0hi");
    assert_eq!(client.read(9), b"\x04\x07\x04PONGhi");
    publisher.probe.wait_for_subscribers(1);
    for hash in 0..3 {
        events.send(vec![event(hash)]).unwrap();
    }
    assert_eq!([client.seq(), client.seq(), client.seq()], [0, 1, 2]);
    other.say(b"\x04\x07\x04PING\0\0");
    assert_eq!(other.read(7), b"\x04\x05\x04PONG");

    client.say(b"\0\x04\0kv@");
    publisher.probe.wait_for_subscribers(0);
    events.send(vec![event(3)]).unwrap();
    publisher.probe.wait_until("the batch is published", |feed| feed.log.next_seq() == 4);
    client.say(b"\0\x01\x01");
    publisher.probe.wait_for_subscribers(1);
    events.send(vec![event(4)]).unwrap();
    assert_eq!(client.seq(), 4);
}

#[test]
fn missed_batches_are_replayed() {
    let topic = "kv@pod@model";
    let config = KvEventsConfig { topic: topic.into(), buffer_steps: 300, ..KvEventsConfig::default() };
    let (publisher, events) = start(config);
    let replay = publisher.probe.replay.unwrap();
    let mut client = Client::connect(replay, "DEALER", "ROUTER");
    assert!(client.replay(0, topic.as_bytes()).is_empty());
    for hash in 0..500 {
        events.send(vec![event(hash)]).unwrap();
    }
    publisher.probe.wait_until("the batches are published", |feed| feed.log.next_seq() == 500);
    for (from, expect) in [(0, 200..500), (200, 200..500), (498, 498..500), (500, 0..0), (u64::MAX, 0..0)] {
        assert_eq!(client.replay(from, topic.as_bytes()), expect.collect::<Vec<u64>>(), "from {from}");
    }
    // Malformed requests are skipped: too short, without the empty frame, with one frame too many.
    client.say(b"\x01\0\0\x01\x05\0\x08\0\0\0\0\0\0\0\0\x01\0\x01\x01x\0\x08\0\0\0\0\0\0\0\0");
    client.say(b"\x04\x07\x04PING\0\0");
    assert_eq!(client.read(7), b"\x04\x05\x04PONG");
    assert_eq!(client.replay(499, topic.as_bytes()), [499]);
    assert_eq!(Client::connect(replay, "REQ", "ROUTER").replay(499, topic.as_bytes()), [499]);
}

#[test]
fn a_subscriber_that_does_not_read_blocks_no_other_and_sees_its_gap() {
    const BATCHES: u64 = 800;
    let (publisher, events) = start(KvEventsConfig { buffer_steps: 4, ..KvEventsConfig::default() });
    let mut slow = Client::subscribe(&publisher, b"");
    publisher.probe.wait_for_subscribers(1);
    // All batches together exceed the sockets' buffers.
    let large = KvEvent::Removed { hashes: vec![u64::MAX; 16_000], medium: Medium::Device, group: 0 };
    for _ in 0..BATCHES {
        events.send_timeout(vec![large.clone()], DEADLINE).expect("the publisher takes batches up");
    }
    publisher.probe.wait_until("the batches are published", |feed| feed.log.next_seq() == BATCHES);
    let mut seqs = vec![slow.seq()];
    while seqs[seqs.len() - 1] != BATCHES - 1 {
        seqs.push(slow.seq());
    }
    assert!(seqs.is_sorted_by(|a, b| a < b), "{seqs:?}");
    assert!((seqs.len() as u64) < BATCHES, "nothing was skipped");
}

#[test]
fn strangers_are_turned_away() {
    let (publisher, events) = start(KvEventsConfig::default());
    let huge_frame = [&hello("SUB")[..], b"\x02\x10\0\0\0\0\0\0\0"].concat();
    let wrong_kind = hello("PULL");
    let mut secured = hello("SUB");
    secured[12..17].copy_from_slice(b"CURVE");
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &huge_frame, &wrong_kind, &secured] {
        let mut stranger = Client(TcpStream::connect(publisher.probe.live).unwrap());
        stranger.0.set_read_timeout(Some(DEADLINE)).unwrap();
        stranger.say(bytes);
        stranger.assert_closed();
    }
    let mut client = Client::subscribe(&publisher, b"");
    publisher.probe.wait_for_subscribers(1);
    events.send(vec![event(0)]).unwrap();
    assert_eq!(client.seq(), 0);
    drop(client);
    publisher.probe.wait_for_subscribers(0);
}

#[test]
fn an_endpoint_that_cannot_be_bound_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp://{}", taken.local_addr().unwrap());
    let no_port = "tcp://127.0.0.1".to_string();
    for bad in [&taken, &no_port, "ipc:///tmp/kv", "tcp://*:high", "tcp://*:70000"] {
        for in_replay in [false, true] {
            let mut config = KvEventsConfig { endpoint: "tcp://*:0".into(), ..KvEventsConfig::default() };
            if in_replay {
                config.replay_endpoint = Some(bad.to_string())
            } else {
                config.endpoint = bad.to_string()
            }
            let error = KvEventPublisher::start(config, flume::unbounded().1).unwrap_err();
            assert!(format!("{error:#}").contains(bad), "{error:#}");
        }
    }
}

#[test]
fn dropping_the_publisher_ends_it() {
    let (publisher, events) = start(KvEventsConfig::default());
    let mut client = Client::subscribe(&publisher, b"");
    publisher.probe.wait_for_subscribers(1);
    let address = publisher.probe.live;
    drop(publisher);
    assert!(events.send(vec![KvEvent::Cleared]).is_err());
    client.assert_closed();
    assert!(TcpStream::connect(address).is_err());
}
