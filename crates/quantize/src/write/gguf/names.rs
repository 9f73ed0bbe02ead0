//! Tensors of a Hugging Face checkpoint in the names, shapes and row order that llama.cpp reads.

use std::collections::BTreeMap;

/// One tensor of the new file and its sources.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    pub name: String,
    /// Names in the source; several for experts that are stacked.
    pub sources: Vec<String>,
    /// Query and key rows of this many heads are put in the order for rotation in adjacent pairs.
    pub interleaved_heads: Option<usize>,
}

/// The properties of a family that decide its names.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub permuted: bool,
    pub heads: usize,
    pub kv_heads: usize,
    /// Whether `post_attention_layernorm` normalizes attention's output instead of the feed-forward
    /// network's input.
    pub norm_after_attention: bool,
}

const IN_LAYER: [(&str, &str); 16] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("mlp.gate_up_proj", "ffn_up"),
];

const IN_EXPERT: [(&str, &str); 6] = [
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
    ("w1", "ffn_gate_exps"),
    ("w3", "ffn_up_exps"),
    ("w2", "ffn_down_exps"),
];

const OUTSIDE: [(&str, &str); 3] =
    [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];

/// Sort key in the file: the embedding, the layers, the last norm, the head.
type Place = (usize, usize, String);

/// The whole file's tensors, in order; or the first name that has no counterpart. `lm_head` is left
/// out if `tied`.
pub fn plan<'a>(
    names: impl IntoIterator<Item = &'a str>,
    rules: Rules,
    tied: bool,
) -> std::result::Result<Vec<Planned>, String> {
    let mut planned: BTreeMap<Place, Planned> = BTreeMap::new();
    // Experts by (place, number): their order in the source has no meaning.
    let mut experts: BTreeMap<Place, BTreeMap<usize, String>> = BTreeMap::new();
    for name in names {
        let unknown = || name.to_owned();
        let (stem, kind) = name.rsplit_once('.').ok_or_else(unknown)?;
        if tied && stem == "lm_head" || stem.ends_with("rotary_emb") {
            continue;
        }
        let Some((layer, part)) = in_layer(stem) else {
            let (at, (_, there)) =
                OUTSIDE.iter().enumerate().find(|(_, (here, _))| *here == stem).ok_or_else(unknown)?;
            let place = if at == 0 { (0, 0, String::new()) } else { (2, at, String::new()) };
            planned.insert(place, single(format!("{there}.{kind}"), name, None));
            continue;
        };
        if let Some((_, expert)) = part.split_once(".experts.") {
            let (number, matrix) = expert.split_once('.').ok_or_else(unknown)?;
            let there = find(&IN_EXPERT, matrix).ok_or_else(unknown)?;
            let place = (1, layer, format!("blk.{layer}.{there}.{kind}"));
            experts.entry(place).or_default().insert(number.parse().map_err(|_| unknown())?, name.to_owned());
            continue;
        }
        let there = match part {
            "post_attention_layernorm" if rules.norm_after_attention => "post_attention_norm",
            "post_attention_layernorm" => "ffn_norm",
            _ => find(&IN_LAYER, part).ok_or_else(unknown)?,
        };
        let heads = match there {
            "attn_q" if rules.permuted => Some(rules.heads),
            "attn_k" if rules.permuted => Some(rules.kv_heads),
            _ => None,
        };
        let name_there = format!("blk.{layer}.{there}.{kind}");
        planned.insert((1, layer, name_there.clone()), single(name_there, name, heads));
    }
    for (place, sources) in experts {
        let name = place.2.clone();
        let sources = sources.into_values().collect();
        planned.insert(place, Planned { name, sources, interleaved_heads: None });
    }
    Ok(planned.into_values().collect())
}

fn single(name: String, source: &str, interleaved_heads: Option<usize>) -> Planned {
    Planned { name, sources: vec![source.to_owned()], interleaved_heads }
}

/// Layer number and the rest of `model.layers.3.mlp.up_proj`.
fn in_layer(stem: &str) -> Option<(usize, &str)> {
    let (number, rest) = stem.strip_prefix("model.layers.")?.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

fn find(table: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    table.iter().find(|(here, _)| *here == name).map(|(_, there)| *there)
}

/// Converts from halves of a head that rotate together to alternating rows: row `i` of the result
/// is this row of the source.
pub fn interleaved_row(row: usize, rows: usize, heads: usize) -> usize {
    let head_dim = rows / heads;
    let (head, within) = (row / head_dim, row % head_dim);
    head * head_dim + within % 2 * (head_dim / 2) + within / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { permuted: true, heads: 8, kv_heads: 2, norm_after_attention: false };

    #[test]
    fn names_order_and_stacks() {
        let source = [
            "model.norm.weight",
            "model.layers.10.mlp.experts.1.gate_proj.weight",
            "model.layers.10.mlp.experts.0.gate_proj.weight",
            "model.layers.10.mlp.gate.weight",
            "model.layers.2.self_attn.q_proj.weight",
            "model.layers.2.self_attn.q_proj.bias",
            "model.layers.2.post_attention_layernorm.weight",
            "model.layers.2.self_attn.k_proj.weight",
            "lm_head.weight",
            "model.embed_tokens.weight",
        ];
        let planned = plan(source, RULES, true).unwrap();
        let names: Vec<&str> = planned.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "token_embd.weight",
                "blk.2.attn_k.weight",
                "blk.2.attn_q.bias",
                "blk.2.attn_q.weight",
                "blk.2.ffn_norm.weight",
                "blk.10.ffn_gate_exps.weight",
                "blk.10.ffn_gate_inp.weight",
                "output_norm.weight",
            ]
        );
        assert_eq!(planned[1].interleaved_heads, Some(2));
        assert_eq!(planned[3].interleaved_heads, Some(8));
        assert!(planned[5].sources[0].contains("experts.0."));
        assert_eq!(plan(source, RULES, false).unwrap().last().unwrap().name, "output.weight");
        let odd = "model.layers.0.mlp.odd.weight";
        assert_eq!(plan([odd], RULES, true).unwrap_err(), odd);
    }

    #[test]
    fn halves_of_a_head_are_interleaved() {
        let order: Vec<usize> = (0..8).map(|row| interleaved_row(row, 8, 2)).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
