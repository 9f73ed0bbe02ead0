//! Formats of all tensors: the mixtures that llama.cpp calls Q4_K_M and Q8_0.

use folio_formats::Format;

use crate::{Error, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Q4_K, and Q6_K for the most important matrices: the output matrix, and the value and down
    /// matrices of half the layers.
    Q4KM,
    Q8,
}

impl std::str::FromStr for Mix {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "q4_k_m" => Ok(Mix::Q4KM),
            "q8_0" => Ok(Mix::Q8),
            _ => Err(Error::UnknownTarget { found: text.to_owned(), expected: "q4_k_m, q8_0".to_owned() }),
        }
    }
}

/// The properties of a model that decide its tensors' formats.
#[derive(Clone, Copy, Debug)]
pub struct Whole {
    pub layers: usize,
    pub experts: usize,
    /// Whether there is no `output.weight`: the embedding table is the output matrix too.
    pub tied: bool,
}

impl Mix {
    /// Its number in `general.file_type`.
    pub fn file_type(self) -> u32 {
        match self {
            Mix::Q4KM => 15,
            Mix::Q8 => 7,
        }
    }

    /// The format of a tensor by its GGUF name; `None` if it is not quantized.
    pub fn format(self, name: &str, shape: &[usize], whole: Whole) -> Option<Format> {
        let stem = name.strip_suffix(".weight")?;
        if shape.len() < 2 || stem.ends_with("_norm") || stem.ends_with("ffn_gate_inp") {
            return None;
        }
        let wanted = match self {
            Mix::Q8 => Format::Q8_0,
            Mix::Q4KM => q4_k_m(stem, whole),
        };
        Some(fitting(wanted, *shape.last()?))
    }
}

fn q4_k_m(stem: &str, whole: Whole) -> Format {
    let (layer, part) = match stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => (layer.parse().unwrap_or(0), part),
        None => (0, stem),
    };
    // The few matrices that eight experts share are a small part of the whole.
    let eight = whole.experts == 8;
    match part {
        "output" => Format::Q6_K,
        "token_embd" if whole.tied => Format::Q6_K,
        "attn_v" | "attn_k" if eight => Format::Q8_0,
        "attn_output" if eight => Format::Q5_K,
        "attn_qkv" => Format::Q5_K,
        "attn_v" | "ffn_down" | "ffn_down_exps" | "ffn_down_shexp" if gets_more(layer, whole.layers) => Format::Q6_K,
        _ => Format::Q4_K,
    }
}

/// The first and the last eighth of the layers, and every third between.
fn gets_more(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// The format, if rows are whole blocks of it; otherwise one with smaller blocks, or F16 if those
/// do not fit either.
fn fitting(format: Format, cols: usize) -> Format {
    let smaller = match format {
        _ if cols.is_multiple_of(format.block_len()) => return format,
        Format::Q4_K => Format::Q5_0,
        Format::Q5_K => Format::Q5_1,
        _ => Format::Q8_0,
    };
    if cols.is_multiple_of(smaller.block_len()) { smaller } else { Format::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(mix: Mix, whole: Whole, rows: &[(&str, &[usize], Option<Format>)]) {
        for (name, shape, expect) in rows {
            assert_eq!(mix.format(name, shape, whole), *expect, "{name}");
        }
    }

    /// The table that llama-quantize prints for such models.
    #[test]
    fn the_mixture_is_llama_cpp_s() {
        let whole = Whole { layers: 12, experts: 0, tied: true };
        check(
            Mix::Q4KM,
            whole,
            &[
                ("token_embd.weight", &[16384, 512], Some(Format::Q6_K)),
                ("output_norm.weight", &[512], None),
                ("blk.0.attn_v.weight", &[128, 512], Some(Format::Q6_K)),
                ("blk.1.attn_v.weight", &[128, 512], Some(Format::Q4_K)),
                ("blk.3.attn_v.weight", &[128, 512], Some(Format::Q6_K)),
                ("blk.10.ffn_down.weight", &[512, 1536], Some(Format::Q6_K)),
                ("blk.10.ffn_down.weight", &[512, 1408], Some(Format::Q8_0)),
                ("blk.1.ffn_down.weight", &[512, 1408], Some(Format::Q5_0)),
                ("blk.1.ffn_down.weight", &[512, 100], Some(Format::F16)),
                ("blk.1.attn_q.bias", &[512], None),
                ("blk.1.ffn_gate_inp.weight", &[8, 512], None),
            ],
        );
        let eight = Whole { layers: 8, experts: 8, tied: false };
        check(
            Mix::Q4KM,
            eight,
            &[
                ("token_embd.weight", &[16384, 512], Some(Format::Q4_K)),
                ("output.weight", &[16384, 512], Some(Format::Q6_K)),
                ("blk.4.attn_k.weight", &[128, 512], Some(Format::Q8_0)),
                ("blk.4.attn_output.weight", &[512, 512], Some(Format::Q5_K)),
                ("blk.4.ffn_up_exps.weight", &[8, 512, 512], Some(Format::Q4_K)),
                ("blk.7.ffn_down_exps.weight", &[8, 512, 512], Some(Format::Q6_K)),
            ],
        );
        check(Mix::Q8, whole, &[("blk.1.ffn_down.weight", &[512, 1408], Some(Format::Q8_0))]);
    }
}
