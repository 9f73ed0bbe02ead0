//! Decoders and encoders against the `gguf` package: hashes and samples from
//! `tests/golden/make.py`.

use folio_testing::{Rng, fnv1a};
use serde_json::Value;

use super::encode;
use crate::Format;

/// Sums of small integers: bell-shaped, and the same bits on every machine.
pub(crate) fn gaussian(count: usize) -> Vec<f32> {
    let value = |i: u64| {
        let bits = Rng::at(7, i);
        (0..4).map(|part| (bits >> (16 * part) & 0xffff) as i32 - 0x8000).sum::<i32>() as f32 / 65536.0
    };
    (0..count as u64).map(value).collect()
}

fn fnv(bytes: impl IntoIterator<Item = u8>) -> String {
    format!("{:016x}", fnv1a(bytes))
}

fn golden() -> Value {
    serde_json::from_str(include_str!("../../tests/golden/quant.json")).unwrap()
}

/// Random blocks with finite half-precision fields: their top exponent bit is cleared.
fn random_blocks(format: Format, row: &Value) -> Vec<u8> {
    let (seed, blocks) = (row["seed"].as_u64().unwrap(), row["blocks"].as_u64().unwrap() as usize);
    let size = format.block_bytes();
    let mut bytes: Vec<u8> = (0..(blocks * size) as u64).map(|i| Rng::at(seed, i) as u8).collect();
    for block in bytes.chunks_exact_mut(size) {
        for at in row["halves"].as_array().unwrap() {
            block[at.as_u64().unwrap() as usize + 1] &= 0xbf;
        }
    }
    bytes
}

#[test]
fn decoders_give_the_bits_of_the_gguf_package() {
    let golden = golden();
    let mut seen = 0;
    for row in golden["decode"].as_array().unwrap() {
        let format = Format::from_name(row["format"].as_str().unwrap()).unwrap();
        let bytes = random_blocks(format, row);
        let mut out = vec![0.0f32; bytes.len() / format.block_bytes() * format.block_len()];
        format.decode(&bytes, &mut out);
        for sample in row["samples"].as_array().unwrap() {
            let (at, bits) = (sample[0].as_u64().unwrap() as usize, sample[1].as_u64().unwrap() as u32);
            assert_eq!(out[at].to_bits(), bits, "{format}: value {at} is {}", out[at]);
        }
        assert_eq!(fnv(out.iter().flat_map(|v| v.to_le_bytes())), row["hash"].as_str().unwrap(), "{format}");
        // The check can fail: one flipped bit shows.
        let mut broken = bytes.clone();
        broken[3] ^= 1;
        format.decode(&broken, &mut out);
        assert_ne!(fnv(out.iter().flat_map(|v| v.to_le_bytes())), row["hash"].as_str().unwrap(), "{format}");
        seen += 1;
    }
    assert_eq!(seen, 16, "every float and block format has its row");
}

#[test]
fn nearest_encoders_give_the_bytes_of_the_gguf_package() {
    let golden = golden();
    let values = gaussian(golden["encode_values"].as_u64().unwrap() as usize);
    let rows = golden["encode"].as_array().unwrap();
    assert_eq!(rows.len(), 8);
    for row in rows {
        let format = Format::from_name(row["format"].as_str().unwrap()).unwrap();
        let bytes = encode(format, &values).unwrap();
        assert_eq!(fnv(bytes), row["hash"].as_str().unwrap(), "{format}");
    }
}

#[test]
fn integers_decode_as_numbers() {
    let check = |format: Format, bytes: &[u8], expect: &[f32]| {
        let mut out = vec![0.0; expect.len()];
        format.decode(bytes, &mut out);
        assert_eq!(out, expect, "{format}");
    };
    check(Format::I8, &[1, 0xff], &[1.0, -1.0]);
    check(Format::U8, &[1, 0xff], &[1.0, 255.0]);
    check(Format::I16, &(-300i16).to_le_bytes(), &[-300.0]);
    check(Format::I32, &70_000i32.to_le_bytes(), &[70_000.0]);
    check(Format::I64, &(-5i64).to_le_bytes(), &[-5.0]);
    check(Format::F64, &0.5f64.to_le_bytes(), &[0.5]);
}
