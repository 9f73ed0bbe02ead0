//! Numbers that look random and come from a seed, so that a failing run can be repeated.

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const STREAM: u64 = 0xd134_2543_de82_ef95;

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream of its own for each `(seed, stream)`.
    pub fn stream(seed: u64, stream: u64) -> Self {
        let mut rng = Self(seed ^ stream.wrapping_mul(STREAM));
        rng.word();
        rng
    }

    /// The stream that belongs to a name. `tests/golden/models/weights.py` has the same.
    pub fn named(seed: u64, name: &str) -> Self {
        Self(fnv1a(format!("{seed}/{name}").bytes()))
    }

    /// Number `index` of stream `seed`. `crates/formats/tests/golden/make.py` has the same.
    pub fn at(seed: u64, index: u64) -> u64 {
        mix(seed.wrapping_mul(STREAM).wrapping_add(index.wrapping_mul(STEP)))
    }

    /// 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// From 0 to below `end`, which must not be 0.
    pub fn below(&mut self, end: usize) -> usize {
        assert!(end > 0, "no number is below 0");
        ((u128::from(self.word()) * end as u128) >> 64) as usize
    }

    /// From 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From -1 to below 1.
    pub fn signed(&mut self) -> f32 {
        signed(self.word())
    }

    /// Mean 0, deviation 1, near enough to normal: the sum of four uniform numbers.
    pub fn normal(&mut self) -> f32 {
        let word = self.word();
        let sum: i32 = [0, 16, 32, 48].iter().map(|shift| (word >> shift & 0xffff) as i32).sum();
        (sum - 2 * 0xffff) as f32 / 65536.0 * 3f32.sqrt()
    }

    pub fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }

    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (2..=items.len()).rev() {
            items.swap(end - 1, self.below(end));
        }
    }
}

/// The last step of SplitMix64: a bijection in which each bit of `z` counts for each result bit.
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// From -1 to below 1.
fn signed(word: u64) -> f32 {
    (word >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// A number from -1 to below 1 that depends on both arguments alone.
pub fn noise(seed: usize, index: usize) -> f32 {
    signed(Rng::at(seed as u64, index as u64))
}

/// The hash FNV-1a, which golden files name bytes by.
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of seed 1234567, from the reference implementation in C.
    #[test]
    fn numbers_are_those_of_splitmix64() {
        let mut rng = Rng::new(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(expected.map(|_| rng.word()), expected);
        assert_eq!(fnv1a(*b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn numbers_keep_their_bounds_and_reach_them() {
        let mut rng = Rng::stream(1, 2);
        let mut seen = [0; 5];
        for index in 0..1000 {
            seen[rng.below(5)] += 1;
            assert!((0.0..1.0).contains(&rng.unit()) && (-1.0..1.0).contains(&rng.signed()));
            assert!((-1.0..1.0).contains(&noise(3, index)));
        }
        assert!(seen.iter().all(|&count| count > 150), "{seen:?}");
        let normal: Vec<f32> = (0..10_000).map(|_| rng.normal()).collect();
        let mean = normal.iter().sum::<f32>() / 1e4;
        let variance = normal.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.1, "mean {mean}, variance {variance}");
    }

    #[test]
    fn shuffling_loses_nothing_and_streams_differ() {
        let mut items: Vec<u32> = (0..100).collect();
        Rng::new(3).shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
        let mut words: Vec<u64> = (0..3).flat_map(|seed| (0..3).map(move |n| Rng::stream(seed, n).word())).collect();
        words.extend((0..3).flat_map(|seed| (0..3).map(move |index| Rng::at(seed + 5, index))));
        words.extend(["a", "b"].map(|name| Rng::named(0, name).word()));
        let count = words.len();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), count);
    }
}
