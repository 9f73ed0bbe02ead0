//! Weights computed from a seed, a name and an index: the twin of `tests/golden/models/weights.py`,
//! step for step, so that both sides have the same bits and no weight needs to be stored.

fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3))
}

/// The finisher of splitmix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The endless sequence of numbers for a name.
pub fn stream(seed: u64, name: &str) -> impl Iterator<Item = u64> + use<> {
    let key = fnv1a(&format!("{seed}/{name}"));
    (1u64..).map(move |index| mix(key.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15))))
}

/// About normal: four 16-bit pieces added up, centred, times `scale`, plus `mean`; f32 bytes.
pub fn normal(seed: u64, name: &str, count: usize, scale: f32, mean: f32) -> Vec<u8> {
    let value = |z: u64| {
        let total: i64 = [0, 16, 32, 48].iter().map(|shift| (z >> shift & 0xFFFF) as i64).sum();
        (2 * total - 4 * 65535) as f32 * scale + mean
    };
    stream(seed, name).take(count).flat_map(|z| value(z).to_le_bytes()).collect()
}

/// Integers `offset .. offset + modulus`, as bytes.
pub fn octets(seed: u64, name: &str, count: usize, modulus: u64, offset: u64) -> Vec<u8> {
    stream(seed, name).take(count).map(|z| ((z >> 32) % modulus + offset) as u8).collect()
}

/// `0 .. count` in an order that depends on the seed.
pub fn shuffled(seed: u64, name: &str, count: u32) -> Vec<u32> {
    let mut keyed: Vec<(u64, u32)> = stream(seed, name).zip(0..count).collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, value)| value).collect()
}
