//! Randomness without state: Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw:
//! "Parallel random numbers: as easy as 1, 2, 3", 2011). A draw is a function of (seed, sample,
//! position), so that a seeded request repeats itself in any batch and after any number of
//! preemptions.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// The number in [0, 1) for a position of one sample of a seeded request.
pub fn uniform(seed: u64, sample: u32, position: usize) -> f64 {
    let position = position as u64;
    let counter = [position as u32, (position >> 32) as u32, sample, 0];
    let bits = philox(counter, [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(bits[0]) << 32 | u64::from(bits[1]);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' library Random123.
    #[test]
    fn philox_gives_the_known_answers() {
        for (counter, key, expected) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn every_argument_moves_the_draw() {
        let base = uniform(7, 1, 100);
        assert_eq!(base, uniform(7, 1, 100));
        for other in [uniform(8, 1, 100), uniform(7, 2, 100), uniform(7, 1, 101), uniform(7 | 1 << 40, 1, 100)] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn draws_fill_the_unit_interval() {
        let mut counts = [0u32; 10];
        for position in 0..10_000 {
            let draw = uniform(3, 0, position);
            assert!((0.0..1.0).contains(&draw));
            counts[(draw * 10.0) as usize] += 1;
        }
        assert!(counts.iter().all(|&count| (880..1120).contains(&count)), "{counts:?}");
    }
}
