//! The wire protocol of ZeroMQ, as far as a publisher needs it: the handshake of ZMTP 3.0 without
//! security, frames, and a subscriber's commands as versions 3.0 and 3.1 write them.

use std::io::{self, ErrorKind};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

const GREETING_BYTES: usize = 64;
/// Peers send names, topics and numbers. A longer frame is refused before memory is allocated for
/// it.
const MAX_FRAME_BYTES: u64 = 4096;

/// The socket type of this end.
#[derive(Clone, Copy, Debug)]
pub enum Role {
    Pub,
    Router,
}

impl Role {
    fn name(self) -> &'static [u8] {
        match self {
            Role::Pub => b"PUB",
            Role::Router => b"ROUTER",
        }
    }

    fn talks_to(self, peer: &[u8]) -> bool {
        match self {
            Role::Pub => matches!(peer, b"SUB" | b"XSUB"),
            Role::Router => matches!(peer, b"REQ" | b"DEALER" | b"ROUTER"),
        }
    }
}

/// A frame from a peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    Message { body: Vec<u8>, more: bool },
    Command { name: Vec<u8>, body: Vec<u8> },
}

/// The meaning of a subscriber's frame.
#[derive(Debug, PartialEq, Eq)]
pub enum PeerCommand<'a> {
    /// Send the messages whose topic has this prefix.
    Subscribe(&'a [u8]),
    /// Send the messages with this prefix no longer.
    Cancel(&'a [u8]),
    /// Answer with a PONG that carries this context.
    Ping(&'a [u8]),
    /// A command that a publisher ignores.
    Other,
}

impl Frame {
    pub fn command(&self) -> PeerCommand<'_> {
        match self {
            Frame::Message { body, .. } => match body.split_first() {
                Some((1, prefix)) => PeerCommand::Subscribe(prefix),
                Some((0, prefix)) => PeerCommand::Cancel(prefix),
                _ => PeerCommand::Other,
            },
            Frame::Command { name, body } => match name.as_slice() {
                b"SUBSCRIBE" => PeerCommand::Subscribe(body),
                b"CANCEL" => PeerCommand::Cancel(body),
                // Two bytes give the peer's timeout; the rest is the context, which the PONG
                // repeats.
                b"PING" => PeerCommand::Ping(body.get(2..).unwrap_or_default()),
                _ => PeerCommand::Other,
            },
        }
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// Exchanges greetings and READY commands, and checks the peer's protocol version and socket type.
pub async fn shake_hands<S: AsyncRead + AsyncWrite + Unpin>(peer: &mut S, role: Role) -> io::Result<()> {
    peer.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING_BYTES];
    // A peer of an older version sends fewer bytes and waits; the first bytes show its version.
    peer.read_exact(&mut theirs[..11]).await?;
    if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 {
        return Err(broken("expected a greeting of ZMTP 3"));
    }
    peer.read_exact(&mut theirs[11..]).await?;
    if theirs[12..32] != greeting()[12..32] {
        return Err(broken("expected no security mechanism"));
    }
    let mut out = Vec::new();
    put_command(&mut out, "READY", &properties(role));
    peer.write_all(&out).await?;
    match read_frame(peer).await? {
        Frame::Command { name, body } if name == b"READY" => match socket_type(&body) {
            Some(kind) if role.talks_to(kind) => Ok(()),
            _ => Err(broken("expected a socket that is our counterpart")),
        },
        _ => Err(broken("expected the command READY")),
    }
}

fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[0] = 0xff;
    bytes[8] = 1;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn properties(role: Role) -> Vec<u8> {
    let mut body = Vec::new();
    body.push(b"Socket-Type".len() as u8);
    body.extend(b"Socket-Type");
    body.extend((role.name().len() as u32).to_be_bytes());
    body.extend(role.name());
    body
}

/// The peer's socket type among its properties. A property is a name, whose length has one byte,
/// and a value, whose length has four.
fn socket_type(mut body: &[u8]) -> Option<&[u8]> {
    loop {
        let (&name_len, rest) = body.split_first()?;
        let (name, rest) = rest.split_at_checked(name_len.into())?;
        let (value_len, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*value_len) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        body = rest;
    }
}

pub async fn read_frame<S: AsyncRead + Unpin>(peer: &mut S) -> io::Result<Frame> {
    let flags = peer.read_u8().await?;
    let len = if flags & LONG == 0 { peer.read_u8().await?.into() } else { peer.read_u64().await? };
    if len > MAX_FRAME_BYTES {
        return Err(broken("expected a shorter frame"));
    }
    let mut body = vec![0; len as usize];
    peer.read_exact(&mut body).await?;
    if flags & COMMAND == 0 {
        return Ok(Frame::Message { body, more: flags & MORE != 0 });
    }
    let (name, body) = body
        .split_first()
        .and_then(|(&len, rest)| rest.split_at_checked(len.into()))
        .ok_or_else(|| broken("expected the command's name"))?;
    Ok(Frame::Command { name: name.into(), body: body.into() })
}

/// Appends one message of several frames.
pub fn put_message(out: &mut Vec<u8>, frames: &[&[u8]]) {
    for (at, frame) in frames.iter().enumerate() {
        put_frame(out, if at + 1 < frames.len() { MORE } else { 0 }, frame);
    }
}

pub fn put_command(out: &mut Vec<u8>, name: &str, body: &[u8]) {
    let mut command = vec![name.len() as u8];
    command.extend(name.as_bytes());
    command.extend(body);
    put_frame(out, COMMAND, &command);
}

fn put_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => out.extend([flags, len]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((body.len() as u64).to_be_bytes());
        }
    }
    out.extend(body);
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(bytes: &[u8]) -> io::Result<Frame> {
        read_frame(&mut { bytes }).await
    }

    /// Golden bytes: captured from a PUB and a ROUTER socket of libzmq 4.3.5.
    #[test]
    fn messages_are_those_of_libzmq() {
        let mut out = Vec::new();
        put_message(&mut out, &[b"kv@x@m", &5_u64.to_be_bytes(), &[b'p'; 300]]);
        let mut expect = b"\x01\x06kv@x@m\x01\x08\0\0\0\0\0\0\0\x05\x02\0\0\0\0\0\0\x01\x2c".to_vec();
        expect.extend([b'p'; 300]);
        assert_eq!(out, expect);

        out.clear();
        put_message(&mut out, &[b"", b"kv@x@m", &3_u64.to_be_bytes(), b"pp"]);
        put_message(&mut out, &[b"", b"", &[0xff; 8], b""]);
        let reply = b"\x01\0\x01\x06kv@x@m\x01\x08\0\0\0\0\0\0\0\x03\0\x02pp";
        let end = b"\x01\0\x01\0\x01\x08\xff\xff\xff\xff\xff\xff\xff\xff\0\0";
        assert_eq!(out, [&reply[..], end].concat());
    }

    /// Golden bytes: captured from SUB sockets of libzmq 4.3.5 that received greetings of ZMTP 3.0
    /// and 3.1.
    #[tokio::test]
    async fn commands_of_libzmq_are_understood() {
        for (bytes, command) in [
            (&b"\0\x04\x01kv@"[..], PeerCommand::Subscribe(b"kv@")),
            (b"\0\x01\x01", PeerCommand::Subscribe(b"")),
            (b"\0\x01\0", PeerCommand::Cancel(b"")),
            (b"\x04\x0d\x09SUBSCRIBEkv@", PeerCommand::Subscribe(b"kv@")),
            (b"\x04\x0a\x09SUBSCRIBE", PeerCommand::Subscribe(b"")),
            (b"\x04\x07\x06CANCEL", PeerCommand::Cancel(b"")),
            (b"\x04\x07\x04PING\0\0", PeerCommand::Ping(b"")),
            (b"\x04\x09\x04PING\0\x0aab", PeerCommand::Ping(b"ab")),
            (b"\x04\x06\x05ERROR", PeerCommand::Other),
            (b"\0\0", PeerCommand::Other),
        ] {
            assert_eq!(read(bytes).await.unwrap().command(), command, "{bytes:?}");
        }
    }

    #[tokio::test]
    async fn malformed_frames_are_refused() {
        for bytes in [
            &b"\x02\x10\0\0\0\0\0\0\0"[..], // an exabyte
            b"\x02\0\0\0\0\0\0\x10\x01",    // one byte more than allowed
            b"\x04\0",                      // a command without a name
            b"\x04\x02\x05RE",              // ... whose name ends too soon
            b"\0\x05abc",                   // a frame cut short
        ] {
            assert!(read(bytes).await.is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn the_socket_type_is_found_among_properties() {
        let mut body = b"\x08Identity\0\0\0\x02id\x0bSocket-Type\0\0\0\x03SUB".to_vec();
        assert_eq!(socket_type(&body), Some(&b"SUB"[..]));
        body.truncate(body.len() - 1);
        assert_eq!(socket_type(&body), None);
        assert_eq!(socket_type(&properties(Role::Router)), Some(&b"ROUTER"[..]));
    }
}
