//! Compiled kernels of one architecture in one compressed file: what `cargo xtask kernels` writes, and what a machine
//! that compiles for itself keeps.
//!
//! `magic | sha256 of the sources | zlib of (name length u32, name, cubin length u32, cubin) ...`, little-endian.

use super::sources;

const MAGIC: &[u8; 8] = b"folio-k1";
const HEADER: usize = MAGIC.len() + 32;
/// More than any archive unpacks to.
const MAX_BYTES: usize = 256 << 20;

/// One compiled file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// Name of its source.
    pub name: String,
    pub image: Vec<u8>,
}

macro_rules! prebuilt {
    ($($architecture:literal),*) => {
        &[$(($architecture, include_bytes!(concat!("../kernels/archive/", $architecture, ".bin")))),*]
    };
}

/// What travels in the binary.
const PREBUILT: &[(&str, &[u8])] = prebuilt!["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"];

/// The prebuilt kernels of an architecture, when they were made from this build's sources.
pub fn prebuilt(architecture: &str) -> Option<Vec<Cubin>> {
    let (_, bytes) = PREBUILT.iter().find(|(name, _)| *name == architecture)?;
    unpack(bytes)
}

/// None when it is no archive, is damaged, or was made from other sources.
pub fn unpack(bytes: &[u8]) -> Option<Vec<Cubin>> {
    let body = bytes.strip_prefix(MAGIC)?.strip_prefix(&sources::hash())?;
    let body = miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(body, MAX_BYTES).ok()?;
    let mut rest = body.as_slice();
    let mut cubins = Vec::new();
    while !rest.is_empty() {
        let name = String::from_utf8(take_sized(&mut rest)?.to_vec()).ok()?;
        cubins.push(Cubin { name, image: take_sized(&mut rest)?.to_vec() });
    }
    Some(cubins)
}

pub fn pack(cubins: &[Cubin]) -> Vec<u8> {
    let mut body = Vec::new();
    for cubin in cubins {
        for part in [cubin.name.as_bytes(), &cubin.image] {
            body.extend_from_slice(&(part.len() as u32).to_le_bytes());
            body.extend_from_slice(part);
        }
    }
    let mut out = Vec::with_capacity(HEADER + body.len() / 3);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&sources::hash());
    out.extend(miniz_oxide::deflate::compress_to_vec_zlib(&body, 6));
    out
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
        for (architecture, bytes) in PREBUILT {
            let found = bytes.get(MAGIC.len()..HEADER);
            let advice = "the kernels changed since: run `cargo xtask kernels`";
            assert_eq!(found, Some(sources::hash().as_slice()), "{architecture}: {advice}");
            let cubins = prebuilt(architecture).expect("an archive that unpacks");
            let names: Vec<&str> = cubins.iter().map(|cubin| cubin.name.as_str()).collect();
            let wanted = sources::SOURCES.iter().filter(|source| source.is_for(architecture));
            assert_eq!(names, wanted.map(|source| source.name).collect::<Vec<_>>(), "{architecture}");
            assert!(cubins.iter().all(|cubin| cubin.image.starts_with(b"\x7fELF")), "{architecture}");
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
        for at in [0, MAGIC.len(), HEADER + 8] {
            let mut broken = packed.clone();
            broken[at] ^= 1;
            assert_eq!(unpack(&broken), None, "byte {at}");
        }
    }
}
