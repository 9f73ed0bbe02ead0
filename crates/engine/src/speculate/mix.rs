//! Hashes for integer keys: a multiplication or two in place of the standard library's hasher,
//! which defends against chosen keys. Tokens are chosen by the writer of a prompt, so a user of
//! these hashes must stay correct when they collide; only the drafting for that one request slows
//! down.

use std::hash::{BuildHasherDefault, Hasher};

/// A map from keys that are one `u64` or less.
pub(super) type Map<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<Mixer>>;

/// Spreads a value over all bits (the finaliser of SplitMix64, a bijection).
pub(super) fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

/// The hash of a sequence that is one token longer than one with hash `hash`.
pub(super) fn longer(hash: u64, token: u32) -> u64 {
    mix(hash.wrapping_add(0x9E37_79B9_7F4A_7C15) ^ u64::from(token) << 16)
}

#[derive(Default)]
pub(super) struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }
}

/// Random tokens from a seed, for tests: of few values, so that everything repeats.
#[cfg(test)]
pub(super) fn random_tokens(seed: u64, len: usize, alphabet: u64) -> Vec<u32> {
    (0..len as u64).map(|at| (mix(mix(seed) ^ at) % alphabet) as u32).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, hash::BuildHasher};

    use super::*;

    #[test]
    fn neighbours_lie_apart() {
        let hash = |key: u64| BuildHasherDefault::<Mixer>::default().hash_one(key);
        let (low, high): (HashSet<_>, HashSet<_>) = (0..128).map(|key| (hash(key) & 1023, hash(key) >> 57)).unzip();
        assert!(low.len() > 110 && high.len() > 60, "{} and {}", low.len(), high.len());
        assert_eq!(BuildHasherDefault::<Mixer>::default().hash_one(7u32), hash(7));
    }

    #[test]
    fn a_sequence_is_more_than_its_tokens() {
        let hash = |tokens: &[u32]| tokens.iter().fold(0, |hash, &token| longer(hash, token));
        let short: HashSet<_> = (0..64).flat_map(|a| (0..64).map(move |b| [a, b])).map(|pair| hash(&pair)).collect();
        assert_eq!(short.len(), 64 * 64);
        assert!(hash(&[0]) != hash(&[0, 0]) && hash(&[]) != hash(&[0]));
    }
}
