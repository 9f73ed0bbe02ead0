//! Models for tests: the same on every machine.

use std::collections::HashMap;
use std::sync::Arc;

use folio_device::reference::Reference;
use folio_device::{Batch, GroupTables, KvFormat, Span};
use folio_formats::WeightSource;
use folio_model::{Decoder, DecoderLimits, OpenModel};
use folio_testing::{Rng, Weights};

use crate::overlay::{Overlay, Stored};

fn limits(model: &OpenModel) -> DecoderLimits {
    let groups = model.spec.kv_groups().len();
    DecoderLimits { rows: 8, spans: 1, outputs: 8, table_entries: 2, blocks: vec![2; groups], kv_format: KvFormat::F32 }
}

/// Random weights for a configuration: norms near one, the rest small.
pub(crate) fn invent(config: &str) -> Arc<dyn WeightSource> {
    let mut rng = Rng::new(1);
    let missing = |weights: &Weights| {
        let model = OpenModel::from_config(config, Box::new(weights.clone())).unwrap();
        match Decoder::load(Reference::new(), &model, limits(&model), &mut |_| {}) {
            Ok(_) => None,
            Err(folio_model::Error::MissingTensor { name, expected, .. }) => Some((name, expected)),
            Err(error) => panic!("{error}"),
        }
    };
    let make = |weights: &mut Weights, name: &str, shape: &[usize]| {
        let about = if name.contains("norm") { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| about + 0.2 * rng.normal()).collect();
        weights.put_f32(name, shape, values);
    };
    Arc::new(Weights::default().complete(missing, make))
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
