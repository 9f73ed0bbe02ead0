//! Four bits that index a fixed, unevenly spaced table: IQ4_NL (32 values, one scale) and IQ4_XS
//! (256 values, eight 6-bit scales under a half-precision one).

use super::half_at;
use super::simple::split_nibbles;
use crate::{Levels, Units};

pub(crate) const IQ4_NL_BYTES: usize = 2 + 16;
pub(crate) const IQ4_XS_BYTES: usize = 2 + 2 + 4 + 128;

const _: () = assert!(IQ4_NL_BYTES == 18 && IQ4_XS_BYTES == 136);

pub(super) const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
pub(crate) const LEVELS: Levels = Levels::Nibbles(TABLE);

pub(crate) fn iq4_nl(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
    scales[0] = half_at(block, 0);
    split_nibbles(&block[2..], codes);
}

pub(crate) fn iq4_xs(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) -> Units {
    let high = u16::from_le_bytes([block[2], block[3]]);
    let (low, nibbles) = block[4..].split_at(4);
    for (i, (nibbles, codes)) in nibbles.chunks_exact(16).zip(codes.chunks_exact_mut(32)).enumerate() {
        let bits = low[i / 2] >> (4 * (i % 2)) & 15 | ((high >> (2 * i) & 3) as u8) << 4;
        scales[i] = f32::from(bits as i8 - 32);
        split_nibbles(nibbles, codes);
    }
    Units { scale: half_at(block, 0), minimum: 0.0 }
}
