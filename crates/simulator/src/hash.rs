//! Arithmetic of the mock model and the only source of randomness.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Two words into one; every bit of both counts.
pub fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23) ^ b.wrapping_mul(GOLDEN);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

/// The value that a row writes to the cache: a hash of its token, its position, and all that it
/// read.
pub fn entry(token: u32, position: usize, context: u64) -> u64 {
    mix(mix(u64::from(token) + 1, position as u64 + 1), context)
}

/// Groups hold different values for the same row, so that the table of one cannot be used for
/// another.
pub fn in_group(entry: u64, group: usize) -> u64 {
    entry ^ (group as u64).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// A slot's part in the sum that a row reads: the position counts, so that swapped blocks show.
pub fn weighted(value: u64, position: usize) -> u64 {
    value.wrapping_mul((2 * position as u64 + 1).wrapping_mul(GOLDEN | 1))
}

/// The next token of a row with this digest; `seed` is the request's, so that samples of one prompt
/// differ.
pub fn sampled(digest: u64, seed: u64, vocab: u32) -> u32 {
    (mix(digest, seed) % u64::from(vocab)) as u32
}

/// The state of a grammar, or of anything else that follows a request's tokens one by one.
pub fn folded(state: u64, position: usize, token: u32) -> u64 {
    mix(mix(state, position as u64), u64::from(token))
}

/// Small, seeded, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0, 1)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.word() % n.max(1) as u64) as usize
    }

    /// A random number from `low` to `high`, both included.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}
