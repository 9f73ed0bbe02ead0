//! `folio inspect`: a model's architecture, the size of its weights, and the context that fits this
//! machine.

use std::collections::BTreeMap;

use anyhow::Result;
use folio_device::KvFormat;
use folio_formats::Format;
use folio_measure::table;
use folio_model::{AttentionSpec, FfnSpec, LayerSpec, ModelSpec, weight_bytes};
use folio_session::{Assets, machine};

use crate::args::InspectArgs;
use crate::environment;

/// Formats to print the size of the weights in.
const FORMATS: &[Format] = &[Format::F32, Format::BF16, Format::Q8_0, Format::Q6_K, Format::Q5_0, Format::Q4_0];

pub fn main(args: &InspectArgs) -> Result<()> {
    let mut assets = Assets::open(args.model.as_deref(), &environment::options())?;
    assets.quantize(args.quantize)?;
    let spec = &assets.model.spec;
    let stored = Stored::of(&assets);
    let commit = assets.commit.as_ref().map(|commit| format!(" at {commit}")).unwrap_or_default();
    outln!("{}{commit}", assets.name)?;
    out!("{}", table::render(&shape(spec, &assets)))?;
    outln!("\nweights on disk: {}", stored.describe())?;
    let mut rows = vec![vec!["format".to_string(), "weights".into()]];
    for &format in FORMATS {
        // A width that is not a multiple of the format's block cannot be stored in it.
        let bytes = weight_bytes(spec, format).map_or("-".into(), table::bytes);
        rows.push(vec![format.to_string(), bytes]);
    }
    out!("{}", table::render(&rows))?;
    let loaded = folio_session::weight_bytes(&assets.model)?;
    outln!("\nweights in memory: {} (`folio plan` prints all memory)", table::bytes(loaded))?;
    out!("\n{}", kv(spec, loaded))
}

/// Weights in the model's files.
struct Stored {
    values: u64,
    bytes: u64,
    by_format: BTreeMap<String, u64>,
}

impl Stored {
    fn of(assets: &Assets) -> Self {
        let weights = &assets.model.weights;
        let mut stored = Self { values: 0, bytes: 0, by_format: BTreeMap::new() };
        for tensor in weights.names().into_iter().filter_map(|name| weights.tensor(name)) {
            let values = tensor.shape.iter().map(|&size| size as u64).product::<u64>();
            stored.values += values;
            stored.bytes += tensor.bytes.len() as u64;
            *stored.by_format.entry(format!("{:?}", tensor.format)).or_default() += values;
        }
        stored
    }

    fn describe(&self) -> String {
        let formats: Vec<String> =
            self.by_format.iter().map(|(format, values)| format!("{} {format}", table::count(*values))).collect();
        format!("{}, {} parameters ({})", table::bytes(self.bytes), table::count(self.values), formats.join(", "))
    }
}

fn shape(spec: &ModelSpec, assets: &Assets) -> Vec<Vec<String>> {
    let row = |name: &str, value: String| vec![format!("  {name}"), value];
    let mut rows = vec![
        row("family", spec.family.to_string()),
        row("layers", spec.layers.len().to_string()),
        row("hidden", spec.hidden.to_string()),
        row("vocabulary", format!("{}{}", spec.vocab_size, if spec.tied_head { ", tied head" } else { "" })),
        row("context", spec.max_context.to_string()),
    ];
    for (kind, count) in kinds(&spec.layers) {
        rows.push(row(&format!("{count} layers"), kind));
    }
    rows.push(row("end tokens", format!("{:?}", assets.eos)));
    rows.push(row("chat template", if assets.template.is_some() { "yes" } else { "no" }.to_string()));
    rows
}

/// Descriptions of layers with the number of equal ones, in order of first appearance.
fn kinds(layers: &[LayerSpec]) -> Vec<(String, usize)> {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for layer in layers {
        let text = format!("{}; {}", attention(&layer.attention), ffn(&layer.ffn));
        match kinds.iter_mut().find(|(known, _)| *known == text) {
            Some((_, count)) => *count += 1,
            None => kinds.push((text, 1)),
        }
    }
    kinds
}

fn attention(a: &AttentionSpec) -> String {
    let mut text = format!("{} heads, {} kv heads of {}", a.heads, a.kv_heads, a.head_dim);
    let features = [
        (a.window.map(|window| format!("window {window}")), true),
        (a.soft_cap.map(|cap| format!("soft cap {cap}")), true),
        (Some("sinks".to_string()), a.sinks),
        (Some("qk norm".to_string()), a.qk_norm.is_some()),
        (Some("biases".to_string()), a.qkv_bias),
        (Some("no rope".to_string()), a.rope.is_none()),
    ];
    for feature in features.into_iter().filter(|(_, on)| *on).filter_map(|(text, _)| text) {
        text.push_str(", ");
        text.push_str(&feature);
    }
    text
}

fn ffn(ffn: &FfnSpec) -> String {
    match ffn {
        FfnSpec::Dense { inter, .. } => format!("ffn {inter}"),
        FfnSpec::Experts(e) => format!("{} experts of {}, {} per token", e.experts, e.inter, e.top_k),
    }
}

/// Bytes of a token in each format of `--kv-cache-dtype`, and the tokens that fit beside the
/// weights.
fn kv(spec: &ModelSpec, weight_bytes: u64) -> String {
    let free = machine::memory_available();
    let mut rows = vec![vec!["KV cache format".to_string(), "bytes per token".into()]];
    if let Some(free) = free {
        rows[0]
            .extend([format!("tokens in {} free", table::bytes(free)), format!("sequences of {}", spec.max_context)]);
    }
    for format in KvFormat::ALL {
        let per_token = spec.kv_bytes_per_token(format);
        let mut row = vec![format.name().to_string(), per_token.to_string()];
        if let Some(free) = free {
            let tokens = free.saturating_sub(weight_bytes) / per_token.max(1);
            row.extend([tokens.to_string(), (tokens / spec.max_context.max(1) as u64).to_string()]);
        }
        rows.push(row);
    }
    let mut text = table::render(&rows);
    text.push_str(&format!("2 x layers x kv_heads x bytes of a head, in bf16 {}\n", formula(spec)));
    text
}

/// The formula with its numbers, summed over layers of different shapes.
fn formula(spec: &ModelSpec) -> String {
    let groups = spec.kv_groups();
    let part = |g: &folio_model::KvGroupSpec| {
        format!("2 x {} x {} x {}", g.layers.len(), g.kv_heads, KvFormat::BF16.head_bytes(g.head_dim))
    };
    groups.iter().map(part).collect::<Vec<_>>().join(" + ")
}
