"""Weights made from nothing but a name, a seed and an index, so that no weight needs to be stored.

Value `i` of tensor NAME is an integer hash of (seed, NAME, i) brought to f32 by operations that are exact or rounded
once, in a fixed order. `crates/model/tests/golden/generator.rs` does the same steps and gets the same bits.
"""

import numpy as np

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
# Standard deviation of twice the sum of four uniform 16-bit pieces.
UNIT = 2.0 * (4 * (65536.0**2 - 1) / 12) ** 0.5


def fnv1a(text):
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


def mix(z):
    """The finisher of splitmix64, on an array of u64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream(seed, name, count):
    """`count` u64 values for this tensor."""
    key = np.array([fnv1a(f"{seed}/{name}")], dtype=np.uint64)
    with np.errstate(over="ignore"):
        return mix(key + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN_GAMMA)


def normal(seed, name, shape, scale, mean):
    """About normal: four 16-bit pieces added up, centred, times `scale`, plus `mean`."""
    z = stream(seed, name, int(np.prod(shape)))
    piece = np.uint64(0xFFFF)
    total = sum((z >> np.uint64(shift)) & piece for shift in (0, 16, 32, 48)).astype(np.int64)
    centred = (2 * total - 4 * 65535).astype(np.float32)
    return (centred * np.float32(scale) + np.float32(mean)).reshape(shape)


def octets(seed, name, shape, modulus, offset):
    """Whole numbers `offset .. offset + modulus` as bytes, for packed blocks and their scales."""
    z = stream(seed, name, int(np.prod(shape)))
    return ((z >> np.uint64(32)) % np.uint64(modulus) + np.uint64(offset)).astype(np.uint8).reshape(shape)


def tokens(seed, count, vocab):
    return [int(z % np.uint64(vocab)) for z in stream(seed, "prompt", count)]
