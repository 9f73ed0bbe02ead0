//! A model without weights: logits are a function of the tokens so far. And pseudo-random numbers.

/// Splitmix64.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// In [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }

    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// One number for a seed and a sequence of tokens.
pub fn hash(seed: u64, tokens: &[u32]) -> u64 {
    tokens.iter().fold(Random(seed).next(), |hash, &token| Random(hash ^ u64::from(token)).next())
}

/// Logits after `tokens`, each between `-spread` and `spread`.
pub fn logits(seed: u64, tokens: &[u32], vocab: usize, spread: f64) -> Vec<f32> {
    let mut random = Random(hash(seed, tokens));
    (0..vocab).map(|_| ((2.0 * random.unit() - 1.0) * spread) as f32).collect()
}
