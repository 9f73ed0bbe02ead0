//! A chunk as a file: a header that identifies its blocks, the blocks, and a digest of both.
//!
//! A reader knows every byte of the header beforehand, so no value in a file is used as a size or
//! an offset: the header is compared, not parsed, and the blocks are read into the host slots that
//! wait for them. `docs/kv-tiers.md` describes the layout field by field.

use std::{
    fs::File,
    io::{self, BufWriter, Read, Write},
};

use folio_model::{Digest, Fingerprint};
use folio_scheduler::{DiskChunk, HostSlot};

use super::HostTier;

const MAGIC: [u8; 8] = *b"FOLIO-KV";
const VERSION: u32 = 1;
/// Bytes of the digest at the end.
const DIGEST: usize = 16;
const BUFFER: usize = 256 << 10;

/// The fields before the tokens: name and size, in order.
const FIXED: [(&str, usize); 10] = [
    ("magic", 8),
    ("version", 4),
    ("fingerprint", 16),
    ("key", 16),
    ("parent", 16),
    ("salt", 8),
    ("number of tokens", 4),
    ("number of groups", 4),
    ("adapter length", 4),
    ("header length", 4),
];

/// The expected file of a chunk: its header and its length.
pub(super) struct ChunkFile {
    header: Vec<u8>,
    len: u64,
    /// End of the tokens in the header.
    tokens_end: usize,
    groups: usize,
}

/// Reason why a file is not the expected chunk.
#[derive(Debug)]
pub(super) enum Refused {
    /// Its content is not what was written.
    Damaged(String),
    /// Its content is what was written, but for something else.
    Foreign(&'static str),
    Io(io::Error),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // The file became shorter while it was read.
            io::ErrorKind::UnexpectedEof => Self::Damaged("it ends too early".to_owned()),
            _ => Self::Io(error),
        }
    }
}

impl ChunkFile {
    /// `slots` and `host` give the number and the size of the blocks.
    pub fn new(
        fingerprint: Fingerprint,
        adapter: &str,
        chunk: &DiskChunk,
        slots: &[Vec<HostSlot>],
        host: &HostTier,
    ) -> Self {
        assert_eq!(slots.len(), host.num_groups(), "layer groups of the chunk and of the host tier");
        let fixed: usize = FIXED.iter().map(|(_, size)| size).sum();
        let tokens_end = fixed + 4 * chunk.tokens.len();
        let header_len = tokens_end + 16 * slots.len() + adapter.len();
        let mut header = Vec::with_capacity(header_len);
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend(fingerprint.0.to_le_bytes());
        header.extend(chunk.key.to_le_bytes());
        header.extend(chunk.parent.to_le_bytes());
        header.extend(chunk.salt.to_le_bytes());
        for count in [chunk.tokens.len(), slots.len(), adapter.len(), header_len] {
            header.extend((count as u32).to_le_bytes());
        }
        header.extend(chunk.tokens.iter().flat_map(|token| token.to_le_bytes()));
        let mut payload = 0;
        for (group, slots) in slots.iter().enumerate() {
            let block_bytes = host.group(group).block_bytes as u64;
            header.extend((slots.len() as u64).to_le_bytes());
            header.extend(block_bytes.to_le_bytes());
            payload += slots.len() as u64 * block_bytes;
        }
        header.extend(adapter.as_bytes());
        debug_assert_eq!(header.len(), header_len);
        Self { len: (header_len + DIGEST) as u64 + payload, header, tokens_end, groups: slots.len() }
    }

    /// Bytes of the whole file.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn write(&self, file: &File, slots: &[Vec<HostSlot>], host: &HostTier) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(BUFFER, file);
        let mut digest = new_digest();
        let mut put = |bytes: &[u8]| {
            digest.update(bytes);
            out.write_all(bytes)
        };
        put(&self.header)?;
        for (group, slots) in slots.iter().enumerate() {
            for &slot in slots {
                put(&host.slot(group, slot))?;
            }
        }
        out.write_all(&digest.finish().to_le_bytes())?;
        out.flush()
    }

    /// Whether a file of length `len` has the expected header; its blocks are not read.
    pub fn begins(&self, mut file: &File, len: u64) -> io::Result<bool> {
        if len != self.len {
            return Ok(false);
        }
        let mut header = vec![0; self.header.len()];
        file.read_exact(&mut header)?;
        Ok(header == self.header)
    }

    /// Reads the blocks into their slots. After an error the contents of the slots are undefined.
    pub fn read(&self, file: &File, len: u64, slots: &[Vec<HostSlot>], host: &HostTier) -> Result<(), Refused> {
        if len != self.len {
            return Err(self.judge(file, len));
        }
        let mut file = Digested { file, digest: new_digest(), left: len };
        let mut header = vec![0; self.header.len()];
        file.read_exact(&mut header)?;
        if header != self.header {
            return Err(file.judge(self.differing_field(&header)));
        }
        for (group, slots) in slots.iter().enumerate() {
            for &slot in slots {
                file.read_exact(&mut host.slot(group, slot))?;
            }
        }
        if file.ends_in_digest()? { Ok(()) } else { Err(Refused::Damaged("its digest does not match".to_owned())) }
    }

    /// The reason for a file of another length: damaged, or of another writer.
    fn judge(&self, file: &File, len: u64) -> Refused {
        let damaged = Refused::Damaged(format!("it has {len} bytes, but {} were written", self.len));
        let Some(before_digest) = len.checked_sub(DIGEST as u64) else { return damaged };
        let mut file = Digested { file, digest: new_digest(), left: len };
        let mut header = vec![0; before_digest.min(self.header.len() as u64) as usize];
        if let Err(error) = file.read_exact(&mut header) {
            return error.into();
        }
        match file.judge(self.differing_field(&header)) {
            Refused::Damaged(_) => damaged,
            other => other,
        }
    }

    /// Name of the first field that differs.
    fn differing_field(&self, found: &[u8]) -> &'static str {
        let differs = |(expected, found): (&u8, &u8)| expected != found;
        let Some(at) = self.header.iter().zip(found).position(differs) else { return "length" };
        let mut end = 0;
        for (name, size) in FIXED {
            end += size;
            if at < end {
                return name;
            }
        }
        match at {
            _ if at < self.tokens_end => "tokens",
            _ if at < self.tokens_end + 16 * self.groups => "shape",
            _ => "adapter",
        }
    }
}

fn new_digest() -> Digest {
    Digest::new("kv chunk")
}

/// A file that is digested while it is read; `left` bytes remain.
struct Digested<'a> {
    file: &'a File,
    digest: Digest,
    left: u64,
}

impl Digested<'_> {
    fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact(bytes)?;
        self.digest.update(bytes);
        self.left -= bytes.len() as u64;
        Ok(())
    }

    /// Reads the rest of the file. Returns whether it ends in its digest.
    fn ends_in_digest(mut self) -> io::Result<bool> {
        let mut buffer = vec![0; BUFFER.min(self.left as usize)];
        while self.left > DIGEST as u64 {
            let size = (self.left - DIGEST as u64).min(buffer.len() as u64) as usize;
            self.read_exact(&mut buffer[..size])?;
        }
        let mut stored = [0; DIGEST];
        self.file.read_exact(&mut stored)?;
        Ok(self.digest.finish().to_le_bytes() == stored)
    }

    /// The reason for a file whose header differs in `field`.
    fn judge(self, field: &'static str) -> Refused {
        match self.ends_in_digest() {
            Ok(true) => Refused::Foreign(field),
            Ok(false) => Refused::Damaged(format!("its {field} and its digest are not the expected ones")),
            Err(error) => error.into(),
        }
    }
}
