//! A 128-bit digest of bytes that may be damaged but not forged: it shows whether weights or a file
//! changed, at the speed of memory. It is not a cryptographic hash.
//!
//! Words go to eight lanes in turn. A lane takes a word by steps that can be undone, and so do the
//! final rounds take the lanes: a change inside one aligned 8-byte word, hence every single flipped
//! bit, always gives another digest. Two changed words that go to one lane cancel with a chance of
//! about 2^-64, any wider change with about 2^-128. An attacker who chooses the bytes can find two
//! contents with one digest.

const LANES: usize = 8;
const STRIPE: usize = LANES * 8;
/// Odd, with no pattern in their bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
const MIX: u64 = 0xd6e8_feb8_6659_fd93;

#[derive(Clone)]
pub struct Digest {
    lanes: [u64; LANES],
    /// Bytes that do not fill a stripe yet.
    partial: [u8; STRIPE],
    len: u64,
}

impl Digest {
    /// Starts a digest. Digests of different purposes have nothing in common.
    pub fn new(purpose: &str) -> Self {
        let mut digest = Self { lanes: [0; LANES], partial: [0; STRIPE], len: 0 };
        for (lane, state) in digest.lanes.iter_mut().enumerate() {
            *state = absorb(MIX, lane as u64 + 1);
        }
        digest.field(purpose.as_bytes());
        digest
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        let filled = (self.len % STRIPE as u64) as usize;
        self.len += bytes.len() as u64;
        if filled > 0 {
            let (head, rest) = bytes.split_at(bytes.len().min(STRIPE - filled));
            self.partial[filled..filled + head.len()].copy_from_slice(head);
            bytes = rest;
            if filled + head.len() < STRIPE {
                return;
            }
            take(&mut self.lanes, &self.partial);
        }
        let stripes = bytes.chunks_exact(STRIPE);
        let rest = stripes.remainder();
        // A copy that stays in registers.
        let mut lanes = self.lanes;
        stripes.for_each(|stripe| take(&mut lanes, stripe));
        self.lanes = lanes;
        self.partial[..rest.len()].copy_from_slice(rest);
    }

    /// Bytes with their length in front, so that neighbouring fields cannot trade bytes.
    pub fn field(&mut self, bytes: &[u8]) {
        self.update(&(bytes.len() as u64).to_le_bytes());
        self.update(bytes);
    }

    pub fn finish(mut self) -> u128 {
        let filled = (self.len % STRIPE as u64) as usize;
        self.partial[filled..].fill(0);
        if filled > 0 {
            take(&mut self.lanes, &self.partial);
        }
        let (mut low, mut high) = (SPREAD, MIX);
        // The last rounds mix the lanes.
        for word in self.lanes.into_iter().chain([self.len, 0, 0]) {
            low = absorb(low, word);
            high = absorb(high.wrapping_add(low), word.rotate_left(32));
            low ^= high.rotate_left(23);
        }
        u128::from(low) | u128::from(high) << 64
    }
}

/// Every step can be undone: another word gives another state, and so does another state.
#[inline(always)]
fn absorb(state: u64, word: u64) -> u64 {
    let spread = (state ^ word).wrapping_mul(SPREAD);
    (spread ^ spread >> 32).wrapping_mul(MIX)
}

#[inline(always)]
fn take(lanes: &mut [u64; LANES], stripe: &[u8]) {
    for (lane, word) in lanes.iter_mut().zip(stripe.chunks_exact(8)) {
        let word = word.try_into().map_or(0, u64::from_le_bytes);
        *lane = absorb(*lane, word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(bytes: &[u8]) -> u128 {
        let mut digest = Digest::new("test");
        digest.update(bytes);
        digest.finish()
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len as u64).map(|i| (absorb(i, 7) >> 40) as u8).collect()
    }

    #[test]
    fn pieces_of_any_size_give_the_digest_of_the_whole() {
        let bytes = bytes(1000);
        let whole = digest(&bytes);
        for size in [1, 3, 63, 64, 65, 128, 200, 999] {
            let mut pieces = Digest::new("test");
            bytes.chunks(size).for_each(|piece| pieces.update(piece));
            assert_eq!(pieces.finish(), whole, "pieces of {size}");
        }
    }

    #[test]
    fn every_flipped_bit_every_truncation_and_every_pair_of_flips_shows() {
        let good = bytes(200);
        let mut seen = std::collections::HashSet::from([digest(&good)]);
        for len in 0..good.len() {
            assert!(seen.insert(digest(&good[..len])), "cut to {len}");
        }
        let bits: Vec<usize> = (0..good.len() * 8).collect();
        let flip = |bytes: &mut [u8], bit: usize| bytes[bit / 8] ^= 1 << (bit % 8);
        for &first in &bits {
            let mut bad = good.clone();
            flip(&mut bad, first);
            assert!(seen.insert(digest(&bad)), "bit {first}");
            for second in bits.iter().skip(first + 1).step_by(37) {
                let mut worse = bad.clone();
                flip(&mut worse, *second);
                assert!(seen.insert(digest(&worse)), "bits {first} and {second}");
            }
        }
    }

    #[test]
    fn zeros_of_every_length_differ_and_half_the_bits_move() {
        let mut seen = std::collections::HashSet::new();
        assert!((0..300).all(|len| seen.insert(digest(&vec![0; len]))));
        let good = bytes(256);
        let mut flipped = 0;
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            flipped += (digest(&bad) ^ digest(&good)).count_ones() as usize;
        }
        let mean = flipped as f64 / (good.len() * 8) as f64;
        assert!((mean - 64.0).abs() < 1.0, "{mean} of 128 bits move");
    }

    #[test]
    fn purposes_and_field_borders_count() {
        assert_ne!(Digest::new("a").finish(), Digest::new("b").finish());
        let fields = |parts: [&[u8]; 2]| {
            let mut digest = Digest::new("test");
            parts.iter().for_each(|part| digest.field(part));
            digest.finish()
        };
        assert_ne!(fields([b"ab", b"c"]), fields([b"a", b"bc"]));
    }
}
