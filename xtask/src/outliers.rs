//! `cargo xtask outliers MODEL OUT`: a copy of a model that computes the same and is harder to
//! quantize.
//!
//! Large models have channels with activations tens of times larger than the others'; small ones do
//! not. Here some channels of every norm before attention and feed-forward are multiplied by a
//! factor, and the columns that read them divided by it: only the activations between them change.
//! Formats that round activations with one scale per row then lose, and formats with separate
//! outlier columns do not.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use folio_formats::safetensors::{SHARD_BYTES, Writer};
use folio_formats::{Format, Safetensors, TensorView, WeightSource};

const USAGE: &str = "usage: cargo xtask outliers MODEL OUT [--channels N] [--factor X]";

/// Norms, by the end of their names, and their readers in the same layer. A router is a `mlp.gate`.
const READERS: [(&str, &[&str]); 2] = [
    ("input_layernorm", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ("post_attention_layernorm", &["gate_proj", "up_proj", "mlp.gate"]),
];

pub fn run(args: &[String]) -> Result<()> {
    let plan = Plan::parse(args)?;
    let weights = Safetensors::open(&plan.model)?;
    std::fs::create_dir_all(&plan.out).with_context(|| plan.out.display().to_string())?;
    let mut writer = Writer::create(&plan.out, SHARD_BYTES)?;
    let mut changed = 0;
    for name in weights.names() {
        let view = weights.require(name)?;
        let bytes = plan.change(&view)?;
        changed += usize::from(bytes.is_some());
        writer.tensor(name, dtype(&view)?, &view.shape, bytes.as_deref().unwrap_or(view.bytes))?;
    }
    ensure!(changed > 0, "{}: no tensor has a name that ends as those of Llama's layers", plan.model.display());
    let written = writer.finish()?;
    for file in std::fs::read_dir(&plan.model)? {
        let path = file?.path();
        let Some(name) = path.file_name().filter(|_| path.extension().is_some_and(|ending| ending == "json")) else {
            continue;
        };
        if !name.to_string_lossy().ends_with(".index.json") {
            std::fs::write(plan.out.join(name), std::fs::read(&path)?)?;
        }
    }
    println!("{}: {changed} of {} tensors changed", plan.out.display(), written.num_tensors);
    Ok(())
}

struct Plan {
    model: PathBuf,
    out: PathBuf,
    channels: usize,
    factor: f32,
}

impl Plan {
    fn parse(args: &[String]) -> Result<Self> {
        let [model, out, rest @ ..] = args else { bail!(USAGE) };
        let mut plan = Self { model: model.into(), out: out.into(), channels: 6, factor: 50.0 };
        let mut rest = rest.iter();
        while let Some(flag) = rest.next() {
            let value = rest.next().context(USAGE)?;
            match flag.as_str() {
                "--channels" => plan.channels = value.parse().context(USAGE)?,
                "--factor" => plan.factor = value.parse().context(USAGE)?,
                _ => bail!("{flag}: {USAGE}"),
            }
        }
        ensure!(plan.factor.is_finite() && plan.factor > 0.0, "--factor must be above 0");
        ensure!(plan.model != plan.out && !has_weights(&plan.out), "{} holds a model already", plan.out.display());
        Ok(plan)
    }

    /// The tensor's new bytes, if it changes.
    fn change(&self, view: &TensorView<'_>) -> Result<Option<Vec<u8>>> {
        let Some(stem) = view.name.strip_suffix(".weight") else { return Ok(None) };
        let is = |end: &&str| stem.ends_with(&format!(".{end}"));
        let is_norm = READERS.iter().any(|(norm, _)| is(norm));
        let is_reader = READERS.iter().any(|(_, readers)| readers.iter().any(is));
        let factor = match (is_norm, is_reader) {
            (true, _) => self.factor,
            (_, true) => self.factor.recip(),
            _ => return Ok(None),
        };
        let cols = *view.shape.last().with_context(|| format!("{} is a single number", view.name))?;
        ensure!(self.channels <= cols, "--channels {} is more than the {cols} of {}", self.channels, view.name);
        let mut values = view.to_f32()?;
        for row in values.chunks_exact_mut(cols) {
            (0..self.channels).for_each(|number| row[number * cols / self.channels] *= factor);
        }
        Ok(Some(folio_formats::quant::encode(view.format, &values)?))
    }
}

fn dtype(view: &TensorView<'_>) -> Result<&'static str> {
    Ok(match view.format {
        Format::F32 => "F32",
        Format::F16 => "F16",
        Format::BF16 => "BF16",
        other => bail!("{} is stored as {other:?}; expected f32, f16 or bf16", view.name),
    })
}

fn has_weights(folder: &Path) -> bool {
    Safetensors::open(folder).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan { model: "in".into(), out: "out".into(), channels: 2, factor: 64.0 }
    }

    fn changed(name: &str, shape: &[usize]) -> Option<Vec<f32>> {
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| i as f32 + 1.0).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let view = TensorView { name, format: Format::F32, shape: shape.to_vec(), bytes: &bytes };
        let bytes = plan().change(&view).expect("a plain tensor")?;
        Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    #[test]
    fn what_norms_gain_their_readers_lose() {
        let norm = changed("model.layers.3.input_layernorm.weight", &[4]);
        assert_eq!(norm.as_deref(), Some(&[64.0, 2.0, 192.0, 4.0][..]));
        for reader in ["self_attn.k_proj", "mlp.up_proj", "mlp.experts.7.gate_proj", "mlp.gate"] {
            let matrix = changed(&format!("model.layers.3.{reader}.weight"), &[2, 4]).expect("it reads a norm");
            assert_eq!(matrix, [1.0 / 64.0, 2.0, 3.0 / 64.0, 4.0, 5.0 / 64.0, 6.0, 7.0 / 64.0, 8.0], "{reader}");
        }
    }

    #[test]
    fn the_rest_stays() {
        for name in
            ["model.norm", "model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"]
        {
            assert_eq!(changed(&format!("{name}.weight"), &[2, 4]), None, "{name}");
        }
        assert_eq!(changed("model.layers.0.self_attn.q_proj.bias", &[4]), None);
    }

    #[test]
    fn flags() {
        let parse = |args: &[&str]| Plan::parse(&args.iter().map(ToString::to_string).collect::<Vec<_>>());
        let plan = parse(&["a", "b", "--channels", "3", "--factor", "20"]).expect("good flags");
        assert_eq!((plan.channels, plan.factor), (3, 20.0));
        for bad in [&["a"][..], &["a", "b", "--factor", "0"], &["a", "b", "--depth", "1"], &["a", "a"]] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
