//! Matrices in bitsandbytes' layouts: nf4, and eight bits per row.
//!
//! Eight bits have one addition of Folio's own: `outlier_columns` and `outlier_values` beside a
//! linear's weight hold the columns that meet large activations, in bf16. Folio reads them instead
//! of the codes. The codes are valid for every column, so a reader without the addition
//! (transformers, which warns that it skips the tensors) has the whole matrix.

use serde_json::{Value, json};

use super::Stored;
use crate::{NF4, Quantized, Target};

/// The tensors of a linear's weight; `dtype` is its original type, in PyTorch's spelling.
pub fn tensors(q: &Quantized, dtype: &str) -> Vec<Stored> {
    match q.target {
        Target::Nf4 => nf4(q, dtype),
        Target::LlmInt8 => eight(q),
        _ => unreachable!("{} is not a layout of bitsandbytes", q.target),
    }
}

fn nf4(q: &Quantized, dtype: &str) -> Vec<Stored> {
    let pairs: Vec<u8> = q.codes.chunks(2).map(|pair| pair[0] << 4 | pair.get(1).copied().unwrap_or(0)).collect();
    let f32s = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let state = json!({"quant_type": "nf4", "blocksize": q.group(), "dtype": dtype, "shape": [q.rows, q.cols]});
    let state = state.to_string().into_bytes();
    vec![
        Stored::new(".weight", "U8", &[pairs.len(), 1], pairs),
        Stored::new(".weight.absmax", "F32", &[q.scales.len()], f32s(&q.scales)),
        Stored::new(".weight.quant_map", "F32", &[16], f32s(&NF4)),
        Stored::new(".weight.quant_state.bitsandbytes__nf4", "U8", &[state.len()], state),
    ]
}

fn eight(q: &Quantized) -> Vec<Stored> {
    let mut codes: Vec<u8> = q.codes.iter().map(|code| code ^ 0x80).collect();
    let reaches = q.scales.iter().flat_map(|scale| (scale * 127.0).to_le_bytes()).collect();
    let mut stored = vec![
        Stored::new(".SCB", "F32", &[q.rows], reaches),
        // 0 stands for row-major storage.
        Stored::new(".weight_format", "U8", &[], vec![0]),
    ];
    if let Some(outliers) = q.outliers.as_ref().filter(|outliers| !outliers.columns.is_empty()) {
        let width = outliers.columns.len();
        for (row, values) in outliers.values.chunks(width).enumerate() {
            for (column, value) in outliers.columns.iter().zip(values) {
                let level = value.to_f32() / q.scales[row];
                let level = if level.is_finite() { level.round_ties_even().clamp(-127.0, 127.0) } else { 0.0 };
                codes[row * q.cols + *column as usize] = level as i8 as u8;
            }
        }
        let columns = outliers.columns.iter().flat_map(|column| (*column as i32).to_le_bytes()).collect();
        let values = outliers.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        stored.push(Stored::new(".outlier_columns", "I32", &[width], columns));
        stored.push(Stored::new(".outlier_values", "BF16", &[q.rows, width], values));
    }
    stored.insert(0, Stored::new(".weight", "I8", &[q.rows, q.cols], codes));
    stored
}

/// The `quantization_config`; `ignored` names the linears that were not quantized.
pub fn config(target: Target, ignored: &[String], dtype: &str, threshold: f32) -> Value {
    let four = target == Target::Nf4;
    json!({
        "quant_method": "bitsandbytes",
        "load_in_4bit": four,
        "load_in_8bit": !four,
        "_load_in_4bit": four,
        "_load_in_8bit": !four,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": false,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": ignored,
        "llm_int8_threshold": threshold,
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::Outliers;

    #[test]
    fn nf4_has_the_first_of_a_pair_in_the_high_half() {
        let q = Quantized {
            target: Target::Nf4,
            rows: 1,
            cols: 64,
            codes: (0..64).map(|i| i % 16).collect(),
            scales: vec![2.0],
            zeros: vec![],
            divisor: 1.0,
            outliers: None,
        };
        let stored = tensors(&q, "bfloat16");
        assert_eq!((stored[0].shape.as_slice(), &stored[0].bytes[..2]), ([32, 1].as_slice(), [0x01, 0x23].as_slice()));
        let state: Value = serde_json::from_slice(&stored[3].bytes).unwrap();
        assert_eq!(state["shape"], json!([1, 64]));
    }

    #[test]
    fn outliers_are_there_twice() {
        let q = Quantized {
            target: Target::LlmInt8,
            rows: 2,
            cols: 3,
            codes: vec![128, 129, 0, 128, 127, 1],
            scales: vec![0.5, 0.25],
            zeros: vec![],
            divisor: 1.0,
            outliers: Some(Outliers { columns: vec![0], values: vec![bf16::from_f32(-3.0), bf16::from_f32(100.0)] }),
        };
        let stored = tensors(&q, "bfloat16");
        let levels: Vec<i8> = stored[0].bytes.iter().map(|code| *code as i8).collect();
        assert_eq!(levels, [-6, 1, -128, 127, -1, -127]);
        let names: Vec<&str> = stored.iter().map(|tensor| tensor.suffix).collect();
        assert_eq!(names, [".weight", ".SCB", ".weight_format", ".outlier_columns", ".outlier_values"]);
        assert_eq!(f32::from_le_bytes(stored[1].bytes[..4].try_into().unwrap()), 63.5);
    }
}
