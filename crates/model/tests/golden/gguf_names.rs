//! Checkpoint tensors as llama.cpp's converters write them: other names, query and key rows
//! reordered for rotation in adjacent pairs, norm offsets added, experts stacked, four-bit blocks
//! repacked.

use std::collections::BTreeMap;

use folio_formats::Format;

use crate::file::{Golden, Tensor};

/// Suffix in the checkpoint, suffix in GGUF; names that differ by family are in [`norm_name`].
const NAMES: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.sinks", "attn_sinks"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// One matrix of one expert, in a checkpoint with separate experts.
const EXPERT_NAMES: &[(&str, &str)] = &[
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
    ("w1", "ffn_gate_exps"),
    ("w3", "ffn_up_exps"),
    ("w2", "ffn_down_exps"),
];

/// All tensors of a golden file, by GGUF name.
pub fn convert(golden: &Golden) -> BTreeMap<String, Tensor> {
    let family = golden.family();
    let size = |field: &str| golden.config[field].as_u64().expect("a size") as usize;
    let permuted = ["llama", "mixtral", "granite", "smollm3"].contains(&family);
    let mut out = BTreeMap::new();
    // Experts of (GGUF name), by number.
    let mut stacks: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    let weights = golden.weights();
    for (name, tensor) in weights.iter() {
        let mut tensor = tensor.clone();
        if family.starts_with("gemma") && name.ends_with("norm.weight") {
            tensor = map_f32(&tensor, |value| value + 1.0);
        }
        let Some(in_layer) = name.strip_prefix("model.layers.") else {
            out.insert(outer_name(name).to_owned(), tensor);
            continue;
        };
        let (layer, rest) = in_layer.split_once('.').expect("a layer number");
        let name_of = |part: &str, kind: &str| format!("blk.{layer}.{part}.{kind}");
        if let Some(fused) =
            rest.strip_prefix("mlp.experts.").filter(|rest| rest.contains("proj_") || rest.ends_with("_proj"))
        {
            let blocks = || weights.get(&name.replace("_scales", "_blocks")).clone();
            for (part, kind, tensor) in gpt_oss_experts(fused, &tensor, blocks) {
                out.insert(name_of(part, kind), tensor);
            }
        } else if let Some((_, expert)) = rest.split_once(".experts.") {
            let (number, part) = expert.split_once('.').expect("an expert number");
            let part = part.strip_suffix(".weight").expect("a weight");
            let stack = stacks.entry(name_of(find(EXPERT_NAMES, part), "weight")).or_default();
            stack.insert(number.parse().expect("a number"), tensor);
        } else {
            let (part, kind) = rest.rsplit_once('.').filter(|_| !rest.ends_with("sinks")).unwrap_or((rest, "weight"));
            if permuted && part == "self_attn.q_proj" {
                tensor = permute(&tensor, size("num_attention_heads"));
            } else if permuted && part == "self_attn.k_proj" {
                tensor = permute(&tensor, size("num_key_value_heads"));
            }
            out.insert(name_of(norm_name(family, part).unwrap_or_else(|| find(NAMES, part)), kind), tensor);
        }
    }
    out.extend(stacks.into_iter().map(|(name, experts)| (name, stack(experts.into_values().collect()))));
    out
}

fn find(table: &[(&str, &'static str)], name: &str) -> &'static str {
    table.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no GGUF name for {name}")).1
}

/// The name with different meanings in different families.
fn norm_name(family: &str, part: &str) -> Option<&'static str> {
    let after_attention = ["gemma2", "gemma3_text", "olmo2", "gpt_oss"].contains(&family);
    (part == "post_attention_layernorm").then_some(if after_attention { "post_attention_norm" } else { "ffn_norm" })
}

fn outer_name(name: &str) -> &'static str {
    match name {
        "model.embed_tokens.weight" => "token_embd.weight",
        "model.norm.weight" => "output_norm.weight",
        "lm_head.weight" => "output.weight",
        other => panic!("no GGUF name for {other}"),
    }
}

fn map_f32(tensor: &Tensor, change: impl Fn(f32) -> f32) -> Tensor {
    let values = tensor.bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")));
    Tensor { bytes: values.flat_map(|value| change(value).to_le_bytes()).collect(), ..tensor.clone() }
}

/// Rows in the given order; `shape` is the result's.
fn rows(tensor: &Tensor, num_rows: usize, shape: Vec<usize>, order: impl Iterator<Item = usize>) -> Tensor {
    let row_bytes = tensor.bytes.len() / num_rows;
    let bytes = order.flat_map(|row| tensor.bytes[row * row_bytes..][..row_bytes].iter().copied()).collect();
    Tensor { format: tensor.format, shape, bytes }
}

/// Alternates the rows of a head's first and second half: rotation pairs become neighbours.
fn permute(tensor: &Tensor, heads: usize) -> Tensor {
    let num_rows = tensor.shape[0];
    let half = num_rows / heads / 2;
    let order = (0..num_rows).map(|row| {
        let (head, within) = (row / (2 * half), row % (2 * half));
        head * 2 * half + within % 2 * half + within / 2
    });
    rows(tensor, num_rows, tensor.shape.clone(), order)
}

fn stack(experts: Vec<Tensor>) -> Tensor {
    let first = &experts[0];
    let shape = [&[experts.len()], first.shape.as_slice()].concat();
    Tensor { format: first.format, shape, bytes: experts.iter().flat_map(|expert| expert.bytes.clone()).collect() }
}

/// gpt-oss has alternating gate and up rows, as blocks beside scales; GGUF separates them, with
/// scales before blocks.
fn gpt_oss_experts(
    name: &str,
    tensor: &Tensor,
    blocks: impl Fn() -> Tensor,
) -> Vec<(&'static str, &'static str, Tensor)> {
    let every_second = |tensor: &Tensor, first: usize, axis: usize| {
        let mut shape = tensor.shape.clone();
        shape[axis] /= 2;
        let num_rows: usize = tensor.shape[..=axis].iter().product();
        rows(tensor, num_rows, shape, (first..num_rows).step_by(2))
    };
    match name {
        "gate_up_proj_bias" => vec![
            ("ffn_gate_exps", "bias", every_second(tensor, 0, 1)),
            ("ffn_up_exps", "bias", every_second(tensor, 1, 1)),
        ],
        "down_proj_bias" => vec![("ffn_down_exps", "bias", tensor.clone())],
        "gate_up_proj_scales" => {
            let whole = repack(&blocks(), tensor);
            vec![
                ("ffn_gate_exps", "weight", every_second(&whole, 0, 1)),
                ("ffn_up_exps", "weight", every_second(&whole, 1, 1)),
            ]
        }
        "down_proj_scales" => vec![("ffn_down_exps", "weight", repack(&blocks(), tensor))],
        "gate_up_proj_blocks" | "down_proj_blocks" => Vec::new(),
        other => panic!("no GGUF name for {other}"),
    }
}

/// Converts nibbles: value 2i in the low half of byte i and 2i + 1 in the high one become value j
/// low and j + 16 high.
fn repack(blocks: &Tensor, scales: &Tensor) -> Tensor {
    let mut bytes = Vec::new();
    for (block, scale) in blocks.bytes.chunks_exact(16).zip(&scales.bytes) {
        let nibble = |index: usize| block[index / 2] >> (4 * (index % 2)) & 0xF;
        bytes.push(*scale);
        bytes.extend((0..16).map(|j| nibble(j) | nibble(j + 16) << 4));
    }
    let [experts, outputs, groups] = scales.shape[..] else { panic!("scales of three dimensions") };
    Tensor { format: Format::MXFP4, shape: vec![experts, outputs, groups * 32], bytes }
}
