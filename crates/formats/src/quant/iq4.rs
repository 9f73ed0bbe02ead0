//! Four bits that index a fixed, unevenly spaced table: IQ4_NL (32 values, one scale) and IQ4_XS (256 values, eight
//! 6-bit scales under a half-precision one).

use super::half_at;

pub(crate) const IQ4_NL_BYTES: usize = 2 + 16;
pub(crate) const IQ4_XS_BYTES: usize = 2 + 2 + 4 + 128;

const _: () = assert!(IQ4_NL_BYTES == 18 && IQ4_XS_BYTES == 136);

const LEVELS: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

pub(crate) fn iq4_nl(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(IQ4_NL_BYTES).zip(out.chunks_exact_mut(32)) {
        group(half_at(block, 0), &block[2..], out);
    }
}

pub(crate) fn iq4_xs(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(IQ4_XS_BYTES).zip(out.chunks_exact_mut(256)) {
        let scale = half_at(block, 0);
        let high = u16::from_le_bytes([block[2], block[3]]);
        let (low, nibbles) = block[4..].split_at(4);
        for (i, (nibbles, out)) in nibbles.chunks_exact(16).zip(out.chunks_exact_mut(32)).enumerate() {
            let bits = low[i / 2] >> (4 * (i % 2)) & 15 | ((high >> (2 * i) & 3) as u8) << 4;
            group(scale * f32::from(bits as i8 - 32), nibbles, out);
        }
    }
}

fn group(scale: f32, nibbles: &[u8], out: &mut [f32]) {
    for (i, byte) in nibbles.iter().enumerate() {
        out[i] = scale * LEVELS[usize::from(byte & 15)];
        out[i + 16] = scale * LEVELS[usize::from(byte >> 4)];
    }
}
