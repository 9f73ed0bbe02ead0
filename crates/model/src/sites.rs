//! The linears of one layer by the input that they share, in the order in which the decoder runs
//! them, for calibration and quantization.

use crate::{
    Error, ExpertsSpec, FfnSpec, OpenModel, Result, experts,
    load::{Loader, Place},
    names::Part,
};

/// Position of an input in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SiteKind {
    Qkv,
    AttentionOutput,
    GateUp,
    Down,
    Router,
    ExpertGateUp(usize),
    ExpertDown(usize),
    SharedGateUp,
    SharedDown,
    /// The one-row matrix whose sigmoid scales the shared expert.
    SharedSwitch,
}

/// One matrix of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLinear {
    /// Name of the matrix without `.weight` or `.bias`.
    pub stem: String,
    pub rows: usize,
    pub cols: usize,
}

/// The matrices that read one input, from the top down as the decoder stacks them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    pub kind: SiteKind,
    pub linears: Vec<StoredLinear>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSites {
    pub sites: Vec<Site>,
    /// Full names of the norms' tensors.
    pub norm_before_attention: Option<String>,
    pub norm_before_ffn: Option<String>,
}

impl OpenModel {
    /// The linears of one layer.
    pub fn sites(&self, layer: usize) -> Result<LayerSites> {
        let loader = Loader::new(self, true);
        let spec = &self.spec.layers[layer];
        let place = Place::of(layer, spec);
        let hidden = self.spec.hidden;
        let found = Finder { loader: &loader, place };
        let attention = &spec.attention;
        let heads = |part, heads: usize| (part, heads * attention.head_dim);
        let qkv = match loader.has(Part::Qkv, place) {
            true => vec![(Part::Qkv, attention.qkv_width())],
            false => vec![
                heads(Part::Query, attention.heads),
                heads(Part::Key, attention.kv_heads),
                heads(Part::Value, attention.kv_heads),
            ],
        };
        let mut sites = vec![
            found.site(SiteKind::Qkv, &qkv, hidden),
            found.site(SiteKind::AttentionOutput, &[(Part::Output, hidden)], attention.q_width()),
        ];
        match &spec.ffn {
            FfnSpec::Dense { inter, .. } => {
                let gate_up: &[_] = match loader.has(Part::Gate, place) || !loader.has(Part::GateUp, place) {
                    true => &[(Part::Gate, *inter), (Part::Up, *inter)],
                    false => &[(Part::GateUp, 2 * inter)],
                };
                sites.push(found.site(SiteKind::GateUp, gate_up, hidden));
                sites.push(found.site(SiteKind::Down, &[(Part::Down, hidden)], *inter));
            }
            FfnSpec::Experts(spec) => sites.extend(found.experts(spec, hidden)?),
        }
        let norm = |wanted: bool, part| wanted.then(|| loader.name_of(part, place, ".weight"));
        Ok(LayerSites {
            sites,
            norm_before_attention: norm(spec.norms.before_attention, Part::NormBeforeAttention),
            norm_before_ffn: norm(spec.norms.before_ffn, Part::NormBeforeFfn),
        })
    }

    /// The stem of the output matrix, if the model has its own.
    pub fn head(&self) -> Option<StoredLinear> {
        let stem = || Loader::new(self, true).stem_of(Part::Head, Place::OUTSIDE);
        (!self.spec.tied_head).then(|| StoredLinear {
            stem: stem(),
            rows: self.spec.vocab_size,
            cols: self.spec.hidden,
        })
    }

    /// Full names of the embedding table and of the last norm.
    pub fn embedding_and_last_norm(&self) -> [String; 2] {
        let loader = Loader::new(self, true);
        [Part::Embedding, Part::FinalNorm].map(|part| loader.name_of(part, Place::OUTSIDE, ".weight"))
    }
}

struct Finder<'a> {
    loader: &'a Loader<'a>,
    place: Place,
}

impl Finder<'_> {
    fn site(&self, kind: SiteKind, parts: &[(Part, usize)], cols: usize) -> Site {
        let linear = |(part, rows): &(Part, usize)| StoredLinear {
            stem: self.loader.stem_of(*part, self.place),
            rows: *rows,
            cols,
        };
        Site { kind, linears: parts.iter().map(linear).collect() }
    }

    fn experts(&self, spec: &ExpertsSpec, hidden: usize) -> Result<Vec<Site>> {
        let Some(stems) = experts::stems(self.loader, self.place, spec.experts) else {
            let name = format!("{}mlp.experts", self.loader.names().layer_prefix(self.place.layer));
            let (expected, found) = ("a tensor of its own for each expert", "one tensor for all experts".to_owned());
            return Err(Error::TensorFormat { name, family: self.loader.family(), expected, found });
        };
        let linear = |stem: &str, rows, cols| StoredLinear { stem: stem.to_owned(), rows, cols };
        let mut sites = vec![self.site(SiteKind::Router, &[(Part::Router, spec.experts)], hidden)];
        for (expert, stems) in stems.iter().enumerate() {
            let linears = [&stems.gate, &stems.up].map(|stem| linear(stem, spec.inter, hidden)).to_vec();
            sites.push(Site { kind: SiteKind::ExpertGateUp(expert), linears });
        }
        for (expert, stems) in stems.iter().enumerate() {
            let linears = vec![linear(&stems.down, hidden, spec.inter)];
            sites.push(Site { kind: SiteKind::ExpertDown(expert), linears });
        }
        if let Some(shared) = &spec.shared {
            let gate_up = [(Part::SharedGate, shared.inter), (Part::SharedUp, shared.inter)];
            sites.push(self.site(SiteKind::SharedGateUp, &gate_up, hidden));
            sites.push(self.site(SiteKind::SharedDown, &[(Part::SharedDown, hidden)], shared.inter));
            if shared.gated {
                sites.push(self.site(SiteKind::SharedSwitch, &[(Part::SharedSwitch, 1)], hidden));
            }
        }
        Ok(sites)
    }
}

#[cfg(test)]
mod tests {
    use folio_formats::{TensorView, WeightSource};

    use super::*;

    /// Tensors by name alone, all empty.
    struct Names(Vec<&'static str>);

    impl WeightSource for Names {
        fn names(&self) -> Vec<&str> {
            self.0.clone()
        }

        fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
            let name = self.0.iter().find(|known| **known == name)?;
            Some(TensorView { name, format: folio_formats::Format::F32, shape: vec![0], bytes: &[] })
        }

        fn release(&self, _: &str) {}
    }

    /// Kinds, and the names and shapes of their linears.
    type Found = Vec<(SiteKind, Vec<(String, usize, usize)>)>;

    fn sites(config: &str, names: &[&'static str]) -> Result<Found> {
        let sizes = r#""vocab_size": 10, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "moe_intermediate_size": 6,
            "num_experts": 2, "num_experts_per_tok": 1"#;
        let config = format!("{{{config}, {sizes}}}");
        let model = OpenModel::from_config(&config, Box::new(Names(names.to_vec()))).unwrap();
        let short = |stem: &str| stem.trim_start_matches("model.layers.1.").to_owned();
        let linears = |site: Site| site.linears.iter().map(|l| (short(&l.stem), l.rows, l.cols)).collect();
        Ok(model.sites(1)?.sites.into_iter().map(|site| (site.kind, linears(site))).collect())
    }

    fn row(name: &str, rows: usize, cols: usize) -> (String, usize, usize) {
        (name.to_owned(), rows, cols)
    }

    #[test]
    fn dense_layers_have_four_inputs() {
        let found = sites(r#""model_type": "llama""#, &[]).unwrap();
        let qkv = vec![row("self_attn.q_proj", 16, 8), row("self_attn.k_proj", 8, 8), row("self_attn.v_proj", 8, 8)];
        assert_eq!(found[0], (SiteKind::Qkv, qkv));
        assert_eq!(found[1], (SiteKind::AttentionOutput, vec![row("self_attn.o_proj", 8, 16)]));
        assert_eq!(found[2], (SiteKind::GateUp, vec![row("mlp.gate_proj", 6, 8), row("mlp.up_proj", 6, 8)]));
        assert_eq!(found[3], (SiteKind::Down, vec![row("mlp.down_proj", 8, 6)]));
        let names = ["model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"];
        let found = sites(r#""model_type": "phi3""#, &names).unwrap();
        assert_eq!(found[0].1, [row("self_attn.qkv_proj", 32, 8)]);
        assert_eq!(found[2].1, [row("mlp.gate_up_proj", 12, 8)]);
    }

    #[test]
    fn every_expert_has_inputs_of_its_own() {
        let family = r#""model_type": "qwen3_moe""#;
        let found = sites(family, &["model.layers.1.mlp.experts.0.gate_proj.weight"]).unwrap();
        let kinds: Vec<SiteKind> = found.iter().map(|(kind, _)| *kind).collect();
        use SiteKind::*;
        let expected = [Qkv, AttentionOutput, Router, ExpertGateUp(0), ExpertGateUp(1), ExpertDown(0), ExpertDown(1)];
        assert_eq!(kinds, expected);
        assert_eq!(found[4].1, [row("mlp.experts.1.gate_proj", 6, 8), row("mlp.experts.1.up_proj", 6, 8)]);
        let error = sites(family, &["model.layers.1.mlp.experts.gate_up_proj"]).unwrap_err().to_string();
        assert!(error.contains("one tensor for all experts"), "{error}");
    }
}
