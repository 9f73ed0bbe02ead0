//! Matrices in the layout of the compressed-tensors package, and their description in config.json.

use half::bf16;
use serde_json::{Value, json};

use super::Stored;
use crate::{Quantized, Target, float8};

/// The package's name for the layout; `None` for targets that it does not have.
pub fn format(target: Target) -> Option<&'static str> {
    Some(match target {
        // Eight bits with one scale per row are for kernels that multiply integers: activations are
        // rounded too.
        Target::Int { bits: 8, group: None, .. } => "int-quantized",
        Target::Int { .. } => "pack-quantized",
        Target::Fp8 { .. } => "float-quantized",
        Target::Mxfp4 => "mxfp4-pack-quantized",
        Target::Nvfp4 => "nvfp4-pack-quantized",
        Target::Nf4 | Target::LlmInt8 => return None,
    })
}

/// The tensors of a linear's weight; suffixes follow the linear's name.
pub fn tensors(q: &Quantized) -> Vec<Stored> {
    let (rows, cols, groups) = (q.rows, q.cols, q.num_groups());
    let scale_rows = rows.div_ceil(q.target.rows_per_scale());
    let scales = |suffix| Stored::new(suffix, "BF16", &[scale_rows, groups], bf16_bytes(&q.scales));
    match q.target {
        Target::Int { bits: 8, group: None, .. } => {
            let codes = q.codes.iter().map(|code| code ^ 0x80).collect();
            vec![Stored::new(".weight", "I8", &[rows, cols], codes), scales(".weight_scale")]
        }
        Target::Int { bits, .. } => {
            let words = (cols * usize::from(bits)).div_ceil(32);
            let shape = [rows, cols].iter().flat_map(|dim| (*dim as i64).to_le_bytes()).collect();
            let mut stored = vec![
                Stored::new(".weight_packed", "I32", &[rows, words], pack_rows(q, bits, words)),
                scales(".weight_scale"),
                Stored::new(".weight_shape", "I64", &[2], shape),
            ];
            if !q.zeros.is_empty() {
                let words = (rows * usize::from(bits)).div_ceil(32);
                let packed = pack_zeros(q, bits, words, groups);
                stored.push(Stored::new(".weight_zero_point", "I32", &[words, groups], packed));
            }
            stored
        }
        Target::Fp8 { .. } => {
            vec![Stored::new(".weight", "F8_E4M3", &[rows, cols], q.codes.clone()), scales(".weight_scale")]
        }
        Target::Mxfp4 => {
            let exponents = q.scales.iter().map(|scale| (scale.to_bits() >> 23) as u8).collect();
            vec![nibbles(q), Stored::new(".weight_scale", "U8", &[rows, groups], exponents)]
        }
        Target::Nvfp4 => {
            let scales = q.scales.iter().map(|scale| float8::encode(*scale)).collect();
            vec![
                nibbles(q),
                Stored::new(".weight_scale", "F8_E4M3", &[rows, groups], scales),
                Stored::new(".weight_global_scale", "F32", &[1], q.divisor.to_le_bytes().to_vec()),
            ]
        }
        Target::Nf4 | Target::LlmInt8 => unreachable!("{} is not a layout of compressed-tensors", q.target),
    }
}

/// Two codes per byte, the first in the low half.
fn nibbles(q: &Quantized) -> Stored {
    let width = q.cols.div_ceil(2);
    let pair = |pair: &[u8]| pair[0] | pair.get(1).copied().unwrap_or(0) << 4;
    let rows = q.codes.chunks(q.cols.max(1));
    Stored::new(".weight_packed", "U8", &[q.rows, width], rows.flat_map(|row| row.chunks(2).map(pair)).collect())
}

/// Every row as whole words of 32 bits, the first code in the lowest bits.
fn pack_rows(q: &Quantized, bits: u8, words: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(q.rows * words * 4);
    for row in q.codes.chunks(q.cols.max(1)) {
        let end = out.len() + 4 * words;
        match bits {
            8 => out.extend(row),
            _ => out.extend(row.chunks(2).map(|pair| pair[0] | pair.get(1).copied().unwrap_or(0) << 4)),
        }
        out.resize(end, 0);
    }
    out
}

/// Packs zero points down the columns: neighbouring rows share a word.
fn pack_zeros(q: &Quantized, bits: u8, words: usize, groups: usize) -> Vec<u8> {
    let in_word = 32 / usize::from(bits);
    let mut packed = vec![0u32; words * groups];
    for row in 0..q.rows {
        for (group, zero) in q.row_zeros(row).iter().enumerate() {
            packed[row / in_word * groups + group] |= u32::from(*zero) << (usize::from(bits) * (row % in_word));
        }
    }
    packed.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()
}

/// The `quantization_config`; `ignored` names the linears that were not quantized.
pub fn config(target: Target, ignored: &[String]) -> Value {
    let weights = |bits: u8, kind: &str, strategy: &str| {
        json!({
            "num_bits": bits, "type": kind, "strategy": strategy, "symmetric": !target.zero_points(),
            "dynamic": false, "group_size": null, "block_structure": null, "actorder": null, "observer": "minmax",
        })
    };
    let inputs = |bits: u8, kind: &str, strategy: &str| {
        json!({
            "num_bits": bits, "type": kind, "strategy": strategy, "symmetric": true, "dynamic": true,
            "group_size": null, "block_structure": null, "actorder": null, "observer": null,
        })
    };
    let grouped = |mut args: Value, size: usize| {
        args["group_size"] = json!(size);
        args
    };
    let (weights, inputs) = match target {
        Target::Int { bits, group: None, .. } => (weights(bits, "int", "channel"), inputs(8, "int", "token")),
        Target::Int { bits, group: Some(group), .. } => (grouped(weights(bits, "int", "group"), group), Value::Null),
        Target::Fp8 { block: false } => (weights(8, "float", "channel"), inputs(8, "float", "token")),
        Target::Fp8 { block: true } => {
            let side = crate::FP8_BLOCK;
            let mut weights = weights(8, "float", "block");
            weights["block_structure"] = json!([side, side]);
            (weights, grouped(inputs(8, "float", "group"), side))
        }
        Target::Mxfp4 => {
            let mut weights = grouped(weights(4, "float", "group"), 32);
            weights["scale_dtype"] = json!("torch.uint8");
            (weights, Value::Null)
        }
        Target::Nvfp4 => {
            let mut weights = grouped(weights(4, "float", "tensor_group"), 16);
            weights["scale_dtype"] = json!("torch.float8_e4m3fn");
            (weights, Value::Null)
        }
        Target::Nf4 | Target::LlmInt8 => unreachable!("{target} is not a layout of compressed-tensors"),
    };
    let format = format(target);
    json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "kv_cache_scheme": null,
        "ignore": ignored,
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": null,
            "format": format,
        }},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(target: Target, rows: usize, cols: usize) -> Quantized {
        let groups = cols.div_ceil(target.group(cols));
        let top = if target.bits() == 4 { 16 } else { 256 };
        Quantized {
            target,
            rows,
            cols,
            codes: (0..rows * cols).map(|i| (i * 7 % top) as u8).collect(),
            scales: vec![0.5; rows.div_ceil(target.rows_per_scale()) * groups],
            zeros: if target.zero_points() { (0..rows * groups).map(|i| (i % 16) as u8).collect() } else { vec![] },
            divisor: 1.0,
            outliers: None,
        }
    }

    #[test]
    fn words_hold_codes_from_the_lowest_bits() {
        let q = quantized(Target::Int { bits: 4, group: Some(32), zero_points: true }, 10, 32);
        let stored = tensors(&q);
        let names: Vec<&str> = stored.iter().map(|tensor| tensor.suffix).collect();
        assert_eq!(names, [".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point"]);
        assert_eq!(stored[0].shape, [10, 4]);
        // Codes 0, 7, 14, 5, 12, 3, 10, 1.
        assert_eq!(u32::from_le_bytes(stored[0].bytes[..4].try_into().unwrap()), 0x1a3c_5e70);
        // Ten rows of one group: zeros 0 to 7 in one word, 8 and 9 in the next.
        assert_eq!(stored[3].shape, [2, 1]);
        assert_eq!(u32::from_le_bytes(stored[3].bytes[..4].try_into().unwrap()), 0x7654_3210);
        assert_eq!(u32::from_le_bytes(stored[3].bytes[4..].try_into().unwrap()), 0x98);
    }

    #[test]
    fn every_layout_has_its_tensors() {
        let int8 = tensors(&quantized(Target::Int { bits: 8, group: None, zero_points: false }, 2, 3));
        assert_eq!((int8[0].dtype, int8[0].bytes[0], int8[1].shape.as_slice()), ("I8", 0x80, [2, 1].as_slice()));
        let block = tensors(&quantized(Target::Fp8 { block: true }, 130, 300));
        assert_eq!((block[0].dtype, block[1].shape.as_slice()), ("F8_E4M3", [2, 3].as_slice()));
        let mx = tensors(&quantized(Target::Mxfp4, 2, 64));
        assert_eq!((mx[0].bytes[0], mx[1].bytes.as_slice()), (0x70, [126; 4].as_slice()));
        let nv = tensors(&quantized(Target::Nvfp4, 2, 64));
        assert_eq!((nv[1].bytes[0], nv[2].shape.as_slice()), (0x30, [1].as_slice()));
        for target in ["int8", "int8-channel", "int4-g128", "fp8", "fp8-block", "mxfp4", "nvfp4"] {
            let config = config(target.parse().unwrap(), &["lm_head".to_owned()]);
            assert!(config["format"].is_string() && config["ignore"][0] == "lm_head", "{target}");
        }
    }
}
