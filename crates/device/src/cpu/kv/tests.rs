//! Stored heads against the reference's codes, exactly, on every instruction set; and copies of
//! whole blocks.

use super::*;
use crate::cpu::simd::testing::filled;
use crate::cpu::simd::{Kernel, Simd, dispatch};
use crate::cpu::{Isa, Pool};
use crate::reference::codes;

/// Writes one head to a slot and reads it back: keys, then values.
struct RoundTrip<'a, T> {
    kv: &'a mut Kv,
    slot: u32,
    key: &'a [f32],
    value: &'a [f32],
    storage: PhantomData<T>,
}

impl<T: Storage> RoundTrip<'_, T> {
    /// `scale * level + min`, which is exact in f64.
    #[inline(always)]
    unsafe fn lane<S: Simd>(s: S, head: *const u8, dim: usize, token: usize, i: usize, level: f32) -> f64 {
        let lane = |vector: S::F| {
            let mut lanes = [0.0; LANES];
            s.write(&mut lanes, vector);
            f64::from(lanes[token])
        };
        let group = i / T::GROUP;
        // SAFETY: the caller's head has a value `i`.
        let (scale, min) = unsafe { (lane(T::scales(s, head, dim, group)), lane(T::minima(s, head, dim, group))) };
        scale * f64::from(level) + min
    }
}

impl<T: Storage> Kernel for RoundTrip<'_, T> {
    type Output = [Vec<f64>; 2];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let dim = self.key.len();
        // SAFETY: one thread.
        unsafe { self.kv.layer_mut::<T>(1, 2, dim).write(self.slot, 1, self.key, self.value) };
        let (keys, values) = self.kv.layer::<T>(1, 2, dim).block(self.slot / 16, 1);
        let token = self.slot as usize % 16;
        let mut found = [Vec::new(), Vec::new()];
        for i in 0..dim {
            let mut lanes = [0.0; LANES];
            // SAFETY: keys and values are those of a head of `dim` values.
            unsafe {
                let vector = if i + 1 == dim && dim % 2 == 1 {
                    T::last_key(s, keys, i / 2)
                } else {
                    T::key_pair(s, keys, i / 2)[i % 2]
                };
                s.write(&mut lanes, vector);
                found[0].push(Self::lane(s, keys, dim, token, i, lanes[token]));
                let rows = values.add(token / 2 * 2 * T::row_bytes(dim));
                let [one] = T::value_pair::<S, 1>(s, rows, dim, i / LANES * LANES)[token % 2];
                let two = T::value_pair::<S, 2>(s, rows, dim, i / 32 * 32)[token % 2];
                let mut pair = [0.0; 2 * LANES];
                s.write(&mut pair[..LANES], two[0]);
                s.write(&mut pair[LANES..], two[1]);
                s.write(&mut lanes, one);
                assert_eq!(lanes[i % LANES].to_bits(), pair[i % 32].to_bits(), "one vector or two");
                found[1].push(Self::lane(s, values, dim, token, i, lanes[i % LANES]));
            }
        }
        found
    }
}

fn stored(format: KvFormat, head: &[f32]) -> Vec<f64> {
    let mut bytes = vec![0; format.head_bytes(head.len())];
    codes::encode(format, head, &mut bytes);
    codes::decode(format, head.len(), &bytes)
}

/// Heads of all kinds, with zeros, tiny, huge, infinite and NaN values among them.
fn heads(dim: usize) -> Vec<Vec<f32>> {
    let scaled = |factor: f32, seed| filled(dim, seed).iter().map(|value| value * factor).collect::<Vec<f32>>();
    let mut heads = vec![vec![0.0; dim], vec![-0.0; dim], vec![0.7; dim], vec![-3.0; dim]];
    let factors = [1.0, 3.7, 1e-3, 1e-6, 1e-20, 1e-33, 1e-36, 1e-40, 5e4, 1e6, 1e30, 3.4e38];
    heads.extend(factors.iter().zip(1..).map(|(&factor, seed)| scaled(factor, seed)));
    // Half-way between codes, above and below zero.
    heads.push((0..dim).map(|i| if i == 0 { 127.0 } else { i as f32 - 20.5 }).collect());
    heads.push(
        (0..dim).map(|i| if i == 0 { 448.0 } else { (i as f32 + 0.5) / 512.0 * (1 << (i % 9)) as f32 }).collect(),
    );
    heads.push((0..dim).map(|i| [0.0, 15.0, 0.5, 1.5, 2.5, 14.5][i % 6]).collect());
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut head = scaled(1.0, 99);
        head[dim / 2] = bad;
        heads.push(head);
    }
    heads
}

#[test]
fn every_format_stores_the_reference_codes() {
    let same = |found: &[f64], expected: &[f64], what: &str| {
        assert_eq!(found.len(), expected.len());
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!(found == expected || found.is_nan() && expected.is_nan(), "{what}, {i}: {found}, not {expected}");
        }
    };
    for format in KvFormat::ALL {
        for dim in [1, 7, 16, 17, 32, 33, 40, 49, 64, 80, 128] {
            let mut kv = Kv::new(KvShape { layers: 2, blocks: 3, kv_heads: 2, head_dim: dim, format }).unwrap();
            let heads = heads(dim);
            for isa in Isa::available() {
                (0..3).for_each(|block| kv.poison(block));
                for (at, key) in heads.iter().enumerate() {
                    let value = &heads[(at + 3) % heads.len()];
                    let (kv, slot) = (&mut kv, (at * 5 % 48) as u32);
                    let found = with_storage!(format, T => {
                        dispatch(isa, RoundTrip::<T> { kv, slot, key, value, storage: PhantomData })
                    });
                    for (found, head) in found.iter().zip([key, value]) {
                        same(found, &stored(format, head), &format!("{format:?} {isa:?} {dim} {head:?}"));
                    }
                }
            }
        }
    }
}

/// The planned bytes equal the stored bytes: a head of the last block ends where the storage does.
#[test]
fn sizes_are_exact() {
    for format in KvFormat::ALL {
        for dim in [1, 7, 24, 33, 40, 64, 80, 96, 128, 256] {
            let shape = KvShape { layers: 2, blocks: 3, kv_heads: 3, head_dim: dim, format };
            let kv = Kv::new(shape).unwrap();
            assert_eq!(kv.keys.len() as u64 * 2, shape.block_bytes() * 3, "{format:?} {dim}");
            assert_eq!(kv.values.len(), kv.keys.len() + 64, "{format:?} {dim}");
            with_storage!(format, T => {
                let groups = if T::SCALED { dim.div_ceil(T::GROUP) } else { 0 };
                let scales = groups * if T::AFFINE { 4 } else { 4 * BLOCK_TOKENS / 16 } * BLOCK_TOKENS;
                assert_eq!(T::scales_at(dim) + scales, kv.head_bytes, "{format:?} {dim}");
            });
        }
    }
}

#[test]
fn a_copied_block_is_equal_in_every_layer_and_the_rest_untouched() {
    for format in KvFormat::ALL {
        let shape = KvShape { layers: 3, blocks: 5, kv_heads: 2, head_dim: 24, format };
        let mut kv = Kv::new(shape).unwrap();
        let (key, value) = (filled(24, 1), filled(24, 2));
        for layer in 0..3 {
            with_storage!(format, T => {
                // SAFETY: one thread.
                unsafe { kv.layer_mut::<T>(layer, 2, 24).write(16 + 7, 1, &key, &value) };
            });
        }
        let saved = |kv: &Kv, block| {
            let mut bytes = vec![0xa5; shape.block_bytes() as usize];
            save_block(kv, block, &mut bytes);
            bytes
        };
        let expected = saved(&kv, 1);
        assert!(expected.iter().any(|&byte| byte != 0));
        let pool = Pool::new(1).unwrap();
        copy_blocks(Ctx { pool: &pool, isa: Isa::Scalar }, &mut kv, &[(1, 4), (4, 0)]);
        for block in [0, 1, 4] {
            assert!(saved(&kv, block) == expected, "{format:?}: block {block}");
        }
        for block in [2, 3] {
            assert!(saved(&kv, block).iter().all(|&byte| byte == 0), "{format:?}: block {block}");
        }
    }
}

/// A chain of moves within and across blocks has the same result as writing to the targets, and
/// touches nothing else.
#[test]
fn a_moved_token_is_as_if_written_there() {
    for format in KvFormat::ALL {
        for dim in [1, 7, 24, 33, 51, 64, 80] {
            let shape = KvShape { layers: 3, blocks: 4, kv_heads: 2, head_dim: dim, format };
            let storage = |slots: [u32; 3]| {
                let mut kv = Kv::new(shape).unwrap();
                (0..4).for_each(|block| kv.poison(block));
                for (layer, head) in (0..3).flat_map(|layer| [(layer, 0), (layer, 1)]) {
                    for (number, slot) in slots.into_iter().enumerate() {
                        let seed = (layer * 10 + head * 5 + number) as u64;
                        let (key, value) = (filled(dim, seed), filled(dim, 100 + seed));
                        with_storage!(format, T => {
                            // SAFETY: one thread.
                            unsafe { kv.layer_mut::<T>(layer, 2, dim).write(slot, head, &key, &value) };
                        });
                    }
                }
                kv
            };
            let (mut moved, expected) = (storage([20, 22, 40]), storage([3, 21, 40]));
            let pool = Pool::new(1).unwrap();
            let ctx = Ctx { pool: &pool, isa: Isa::Scalar };
            // The second token moves through the first one's slot; never-used slots overwrite the
            // old ones.
            move_tokens(ctx, &mut moved, &[(20, 3), (22, 20), (20, 21), (9, 20), (9, 22), (40, 40)]);
            assert!(moved.keys[..] == expected.keys[..], "{format:?} {dim}: keys");
            assert!(moved.values[..] == expected.values[..], "{format:?} {dim}: values");
        }
    }
}

#[test]
fn an_impossible_size_is_an_error() {
    for format in KvFormat::ALL {
        let shape = KvShape { layers: 1 << 20, blocks: 1 << 31, kv_heads: 8, head_dim: 128, format };
        assert!(Kv::new(shape).is_err());
        let shape = KvShape { layers: 1, blocks: 1, kv_heads: 1, head_dim: MAX_HEAD_DIM + 1, format };
        let error = Kv::new(shape).err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("a head of 8193 values (at most 8192) is not supported on cpu"));
    }
}
