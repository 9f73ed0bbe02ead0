//! Compiled kernels in one file: written by `cargo xtask kernels` for a generation of devices, or
//! as the cache of a machine that compiles for itself.
//!
//! `magic | sha256 of the sources | sha256 of the body | form | body`. The body is (name length
//! u32, name, cubin length u32, cubin) ..., little-endian, plain or compressed. A prebuilt cubin's
//! name is `architecture/source`, and those of one source lie side by side. They repeat each other
//! over long distances: LZMA needs half the size of deflate. For devices later than all prebuilt
//! architectures, PTX takes a cubin's place, and the driver translates it.

use std::io::Read;

use lzma_rust2::LzmaReader;
use sha2::{Digest, Sha256};

use super::sources;

const MAGIC: &[u8; 8] = b"folio-k2";
const STORED: u8 = 0;
const LZMA: u8 = 1;
/// More bytes than any archive unpacks to, and more memory than unpacking needs.
const MAX_BYTES: u64 = 256 << 20;
const MAX_KIB: u32 = 64 << 10;

/// One compiled file of kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// Name of its source.
    pub name: String,
    /// Code, or PTX with a zero byte at its end.
    pub image: Vec<u8>,
}

/// Archives in the binary: the architectures that each was made for, and its bytes.
const PREBUILT: [(&[&str], &[u8]); 3] = [
    (&["sm_80", "sm_89"], include_bytes!("../kernels/archive/ampere.bin")),
    (&["sm_90a"], include_bytes!("../kernels/archive/hopper.bin")),
    (&["compute_90"], include_bytes!("../kernels/archive/later.bin")),
];

/// The prebuilt kernels of an architecture, if they were made from this build's sources.
pub fn prebuilt(architecture: &str) -> Option<Vec<Cubin>> {
    let (_, bytes) = PREBUILT.iter().find(|(members, _)| members.contains(&architecture))?;
    let own = |Cubin { name, image }| {
        let name = name.strip_prefix(architecture)?.strip_prefix('/')?.to_owned();
        Some(Cubin { name, image })
    };
    Some(unpack(bytes)?.into_iter().filter_map(own).collect())
}

/// Kernels of an archive; none if it is damaged or was made from other sources.
pub fn unpack(bytes: &[u8]) -> Option<Vec<Cubin>> {
    let (hash, rest) = bytes.strip_prefix(MAGIC)?.strip_prefix(&sources::hash())?.split_first_chunk::<32>()?;
    let body = match rest.split_first()? {
        (&STORED, body) => body.to_vec(),
        (&LZMA, packed) => {
            let mut body = Vec::new();
            LzmaReader::new_mem_limit(packed, MAX_KIB, None).ok()?.take(MAX_BYTES).read_to_end(&mut body).ok()?;
            body
        }
        _ => return None,
    };
    if Sha256::digest(&body).as_slice() != hash {
        return None;
    }
    let mut rest = body.as_slice();
    let mut cubins = Vec::new();
    while !rest.is_empty() {
        let name = String::from_utf8(take_sized(&mut rest)?.to_vec()).ok()?;
        cubins.push(Cubin { name, image: take_sized(&mut rest)?.to_vec() });
    }
    Some(cubins)
}

/// Packs kernels without compression, for the cache on disk.
pub fn pack(cubins: &[Cubin]) -> Vec<u8> {
    let mut body = Vec::new();
    for cubin in cubins {
        for part in [cubin.name.as_bytes(), &cubin.image] {
            body.extend_from_slice(&(part.len() as u32).to_le_bytes());
            body.extend_from_slice(part);
        }
    }
    [MAGIC.as_slice(), &sources::hash(), &Sha256::digest(&body), &[STORED], &body].concat()
}

fn take_sized<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, after) = rest.split_first_chunk::<4>()?;
    let (part, after) = after.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    *rest = after;
    Some(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prebuilt_kernels_are_those_of_the_sources() {
        for (members, bytes) in PREBUILT {
            let found = bytes.get(MAGIC.len()..MAGIC.len() + 32);
            let advice = "the kernels changed since: run `cargo xtask kernels`";
            assert_eq!(found, Some(sources::hash().as_slice()), "{members:?}: {advice}");
            for architecture in members {
                let cubins = prebuilt(architecture).expect("an archive that unpacks");
                let names: Vec<&str> = cubins.iter().map(|cubin| cubin.name.as_str()).collect();
                let wanted = sources::SOURCES.iter().filter(|source| source.is_for(architecture));
                assert_eq!(names, wanted.map(|source| source.name).collect::<Vec<_>>(), "{architecture}");
                let is_ptx = architecture.starts_with("compute_");
                let sound =
                    |image: &[u8]| if is_ptx { image.ends_with(b"\n\0") } else { image.starts_with(b"\x7fELF") };
                assert!(cubins.iter().all(|cubin| sound(&cubin.image)), "{architecture}");
            }
        }
        let bytes: usize = PREBUILT.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(bytes <= 4 << 20, "the prebuilt kernels have {bytes} bytes");
    }

    #[test]
    fn what_is_packed_unpacks_and_damage_is_seen() {
        let cubin = |name: &str, byte, len| Cubin { name: name.to_owned(), image: vec![byte; len] };
        let cubins = vec![cubin("a.cu", 1, 1000), cubin("b.cu", 2, 0)];
        let packed = pack(&cubins);
        assert_eq!(unpack(&packed), Some(cubins));
        assert_eq!(unpack(&packed[..packed.len() - 1]), None);
        for at in [0, MAGIC.len(), MAGIC.len() + 32, MAGIC.len() + 64, packed.len() - 1] {
            let mut broken = packed.clone();
            broken[at] ^= 1;
            assert_eq!(unpack(&broken), None, "byte {at}");
        }
    }
}
