//! Hashes of full blocks: a keyed hash, chained over all tokens before the block.
//!
//! A hash only finds candidates. The tree compares tokens, so a collision costs a miss and never a
//! wrong answer. The key is secret, so that a client cannot make collisions on purpose.

/// Hash of a block's tokens and of all tokens before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChainHash(pub u128);

impl ChainHash {
    /// The hash before the first block.
    pub const START: ChainHash = ChainHash(0);
}

/// The tokens of a full block, and the hash of the sequence up to its end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockKey<'a> {
    pub hash: ChainHash,
    pub salt: u64,
    pub tokens: &'a [u32],
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Hasher {
    pub key: [u64; 2],
    /// Bits of the hash that are used.
    pub bits: u32,
}

impl Hasher {
    /// SipHash-2-4 with 128 bits of output, over words instead of bytes.
    pub fn hash(&self, parent: ChainHash, salt: u64, tokens: &[u32]) -> ChainHash {
        let [k0, k1] = self.key;
        let mut state = Sip {
            a: k0 ^ 0x736f_6d65_7073_6575,
            b: k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
            c: k0 ^ 0x6c79_6765_6e65_7261,
            d: k1 ^ 0x7465_6462_7974_6573,
        };
        state.absorb(parent.0 as u64);
        state.absorb((parent.0 >> 64) as u64);
        state.absorb(salt);
        for pair in tokens.chunks(2) {
            let high = pair.get(1).map_or(0, |&t| u64::from(t));
            state.absorb(u64::from(pair[0]) | high << 32);
        }
        state.absorb(tokens.len() as u64);
        state.c ^= 0xee;
        let low = state.squeeze();
        state.b ^= 0xdd;
        let high = state.squeeze();
        let hash = u128::from(low) | u128::from(high) << 64;
        ChainHash(if self.bits >= 128 { hash } else { hash & ((1 << self.bits) - 1) })
    }
}

struct Sip {
    a: u64,
    b: u64,
    c: u64,
    d: u64,
}

impl Sip {
    fn round(&mut self) {
        self.a = self.a.wrapping_add(self.b);
        self.c = self.c.wrapping_add(self.d);
        self.b = self.b.rotate_left(13) ^ self.a;
        self.d = self.d.rotate_left(16) ^ self.c;
        self.a = self.a.rotate_left(32);
        self.c = self.c.wrapping_add(self.b);
        self.a = self.a.wrapping_add(self.d);
        self.b = self.b.rotate_left(17) ^ self.c;
        self.d = self.d.rotate_left(21) ^ self.a;
        self.c = self.c.rotate_left(32);
    }

    fn absorb(&mut self, word: u64) {
        self.d ^= word;
        self.round();
        self.round();
        self.a ^= word;
    }

    fn squeeze(&mut self) -> u64 {
        for _ in 0..4 {
            self.round();
        }
        self.a ^ self.b ^ self.c ^ self.d
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_key_counts() {
        let hasher = Hasher { key: [1, 2], bits: 128 };
        let base = hasher.hash(ChainHash(5), 0, &[1, 2, 3]);
        assert_eq!(base, hasher.hash(ChainHash(5), 0, &[1, 2, 3]));
        let others = [
            hasher.hash(ChainHash(6), 0, &[1, 2, 3]),
            hasher.hash(ChainHash(5 << 64), 0, &[1, 2, 3]),
            hasher.hash(ChainHash(5), 1, &[1, 2, 3]),
            hasher.hash(ChainHash(5), 0, &[2, 1, 3]),
            hasher.hash(ChainHash(5), 0, &[1, 2, 3, 0]),
            Hasher { key: [1, 3], bits: 128 }.hash(ChainHash(5), 0, &[1, 2, 3]),
        ];
        for other in others {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn truncation_keeps_the_low_bits() {
        let tokens = [9, 8, 7];
        let whole = Hasher { key: [3, 4], bits: 128 }.hash(ChainHash::START, 0, &tokens);
        let short = Hasher { key: [3, 4], bits: 4 }.hash(ChainHash::START, 0, &tokens);
        assert_eq!(short.0, whole.0 & 15);
    }

    #[test]
    fn output_bits_are_balanced() {
        let hasher = Hasher { key: [7, 11], bits: 128 };
        let mut ones = [0u32; 128];
        for i in 0..2000u32 {
            let hash = hasher.hash(ChainHash::START, 0, &[i]).0;
            for (bit, count) in ones.iter_mut().enumerate() {
                *count += (hash >> bit & 1) as u32;
            }
        }
        assert!(ones.iter().all(|&n| (850..1150).contains(&n)), "{ones:?}");
    }
}
