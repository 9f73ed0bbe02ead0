//! Arithmetic of the mock model and the only source of chance.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Two words into one, both of them counting in every bit.
pub fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23) ^ b.wrapping_mul(GOLDEN);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

/// What a row leaves in the cache: its token, its position, and all that it saw.
pub fn entry(token: u32, position: usize, context: u64) -> u64 {
    mix(mix(u64::from(token) + 1, position as u64 + 1), context)
}

/// Groups hold different values for the same row, so that a table of one does not pass for a table of another.
pub fn in_group(entry: u64, group: usize) -> u64 {
    entry ^ (group as u64).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// A slot's part in the sum that a row reads: where it was read counts, so that swapped blocks show.
pub fn weighted(value: u64, position: usize) -> u64 {
    value.wrapping_mul((2 * position as u64 + 1).wrapping_mul(GOLDEN | 1))
}

/// What a row that saw these sums would say next; `seed` is the request's, so that samples of one prompt differ.
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

    /// Between the two, both included.
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
