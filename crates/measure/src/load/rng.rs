//! Random numbers that a seed repeats: splitmix64, and the distributions of traffic.

/// Any state is valid; streams of different seeds are independent.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// One of many streams that belong to a seed.
    pub fn stream(seed: u64, stream: u64) -> Self {
        Self(Self(seed).next_u64() ^ Self(!stream).next_u64())
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `0..bound`. The bias is at most bound / 2^64, which is negligible here.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "nothing lies below zero");
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// In `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below((high - low) as u64 + 1) as usize
    }

    /// In (0, 1], so that its logarithm is finite.
    pub fn unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// By Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.unit().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// With mean `shape`, by Marsaglia and Tsang; a shape below one is sampled at one more and
    /// scaled down.
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            return self.gamma(shape + 1.0) * self.unit().powf(1.0 / shape);
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && self.unit().ln() < 0.5 * x * x + d * (1.0 - v + v.ln()) {
                return d * v;
            }
        }
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gamma_has_its_mean_and_variance() {
        for shape in [0.2, 0.5, 1.0, 3.0, 100.0] {
            let mut rng = Rng::new(7);
            let draws: Vec<f64> = (0..200_000).map(|_| rng.gamma(shape)).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            assert!((mean / shape - 1.0).abs() < 0.02, "shape {shape}: mean {mean}");
            assert!((variance / shape - 1.0).abs() < 0.05, "shape {shape}: variance {variance}");
        }
    }

    #[test]
    fn bounds_are_kept_and_reached() {
        let mut rng = Rng::new(1);
        let drawn: Vec<usize> = (0..1000).map(|_| rng.between(3, 6)).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&3), Some(&6)));
        assert!((0..1000).map(|_| rng.unit()).all(|x| x > 0.0 && x <= 1.0));
    }

    #[test]
    fn shuffling_loses_nothing_and_streams_differ() {
        let mut items: Vec<u32> = (0..100).collect();
        Rng::new(3).shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
        assert_ne!(Rng::stream(0, 1).next_u64(), Rng::stream(0, 2).next_u64());
        assert_ne!(Rng::stream(0, 1).next_u64(), Rng::stream(1, 0).next_u64());
    }
}
