//! Numbers and models for tests: the same on every machine.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use folio_device::reference::Reference;
use folio_device::{Batch, GroupTables, KvFormat, Span};
use folio_formats::{Format, TensorView, WeightSource, quant};
use folio_model::{Decoder, DecoderLimits, OpenModel};

use crate::overlay::{Overlay, Stored};

pub(crate) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Between 0 and 1.
    pub fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normal: the sum of twelve uniform numbers.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }
}

/// Random weights for a configuration, made as they are asked for.
struct Invented(BTreeMap<String, Stored>);

impl WeightSource for Invented {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, Stored { format, shape, bytes }) = self.0.get_key_value(name)?;
        Some(TensorView { name, format: *format, shape: shape.clone(), bytes })
    }

    fn release(&self, _: &str) {}
}

fn limits(model: &OpenModel) -> DecoderLimits {
    let groups = model.spec.kv_groups().len();
    DecoderLimits { rows: 8, spans: 1, outputs: 8, table_entries: 2, blocks: vec![2; groups], kv_format: KvFormat::F32 }
}

/// What is missing is made until nothing is: norms near one, the rest small.
pub(crate) fn invent(config: &str) -> Arc<dyn WeightSource> {
    let mut random = Random::new(1);
    let mut weights = BTreeMap::new();
    loop {
        let model = OpenModel::from_config(config, Box::new(Invented(weights.clone()))).unwrap();
        match Decoder::load(Reference::new(), &model, limits(&model), &mut |_| {}) {
            Ok(_) => return Arc::new(Invented(weights)),
            Err(folio_model::Error::MissingTensor { name, expected, .. }) => {
                let about = if name.contains("norm") { 1.0 } else { 0.0 };
                let count = expected.iter().product();
                let values: Vec<f32> = (0..count).map(|_| about + 0.2 * random.normal()).collect();
                let bytes = quant::encode(Format::F32, &values).unwrap();
                weights.insert(name, Stored { format: Format::F32, shape: expected, bytes });
            }
            Err(error) => panic!("{error}"),
        }
    }
}

pub(crate) fn model(config: &str, base: &Arc<dyn WeightSource>, replaced: HashMap<String, Stored>) -> OpenModel {
    let weights = Overlay { base: base.clone(), replaced: Arc::new(replaced) };
    OpenModel::from_config(config, Box::new(weights)).unwrap()
}

pub(crate) fn logits(model: &OpenModel) -> Vec<f32> {
    let mut decoder = Decoder::load(Reference::new(), model, limits(model), &mut |_| {}).unwrap();
    let tokens = vec![3, 1, 4, 1, 5];
    let group = GroupTables { slots: (0..5).collect(), blocks: vec![0], first_block: vec![0] };
    let step = Batch {
        positions: (0..5).collect(),
        spans: vec![Span { first_row: 0, num_rows: 5, context: 5 }],
        ancestors: Vec::new(),
        groups: vec![group; model.spec.kv_groups().len()],
        outputs: (0..5).collect(),
        tokens,
    };
    decoder.forward(&step).unwrap();
    let mut out = Vec::new();
    decoder.logits(&mut out);
    out
}

pub(crate) fn config(family: &str, extra: &str) -> String {
    format!(
        r#"{{"model_type": "{family}", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 64, "tie_word_embeddings": true {extra}}}"#
    )
}

pub(crate) const MIXTURE: &str = r#", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []"#;
