use std::collections::HashMap;

use folio_device::reference::Reference;
use folio_formats::{Format, quant};
use folio_testing::Rng;

use super::*;
use crate::overlay::Stored;
use crate::testing::{MIXTURE, config, invent, logits, model};
use crate::{Method, rtn};

/// Scales folded into matrices and norms do not change the network's results, in every family's
/// arrangement.
#[test]
fn folding_changes_nothing() {
    let biases = r#", "attention_bias": true"#;
    let families =
        [("llama", ""), ("llama", biases), ("qwen2", ""), ("gemma2", ""), ("phi3", ""), ("qwen3_moe", MIXTURE)];
    for (family, extra) in families {
        let config = config(family, extra);
        let base = invent(&config);
        let plain = model(&config, &base, HashMap::new());
        let expected = logits(&plain);
        let sites = plain.sites(0).unwrap();
        let options = Options::new(Target::Nf4, Method::Awq);
        let mut weights = Weights::read(&plain, &sites, &options).unwrap();
        let mut rng = Rng::new(9);
        let inputs = inputs(&plain, 0, &sites);
        assert!(inputs.len() >= 4, "{family}: a norm, values, a norm, and what goes down");
        for input in &inputs {
            let width = sites.sites[input.sites[0]].linears[0].cols;
            let mut scales: Vec<f32> = (0..width).map(|_| (0.7 * rng.normal()).exp()).collect();
            if !input.ties.is_empty() {
                let own = scales.clone();
                scales = input.ties.iter().map(|tie| own[*tie as usize]).collect();
            }
            weights.fold(&plain, input, scales).unwrap();
        }
        let mut replaced = weights.changed(&plain).unwrap();
        for matrix in &weights.matrices {
            let bytes = quant::encode(Format::F32, &matrix.values).unwrap();
            let stored = Stored { format: Format::F32, shape: vec![matrix.rows, matrix.cols], bytes };
            replaced.insert(matrix.name.clone(), stored);
        }
        assert!(replaced.len() > weights.matrices.len(), "{family}: norms changed too");
        let found = logits(&model(&config, &base, replaced));
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 2e-4 * (1.0 + expected.abs()), "{family}: {found} for {expected}");
        }
    }
}

/// A norm stored in bf16 rounds the scales folded into it; its readers get exactly the rounded
/// scales.
#[test]
fn a_stored_norm_may_round() {
    let config = config("llama", "");
    let base = invent(&config);
    let name = "model.layers.0.input_layernorm.weight";
    let view = base.tensor(name).unwrap();
    let bytes = quant::encode(Format::BF16, &view.to_f32().unwrap()).unwrap();
    let stored = Stored { format: Format::BF16, shape: view.shape.clone(), bytes };
    let plain = model(&config, &base, HashMap::from([(name.to_owned(), stored)]));
    let sites = plain.sites(0).unwrap();
    let options = Options::new(Target::Nf4, Method::Awq);
    let mut weights = Weights::read(&plain, &sites, &options).unwrap();
    let before = weights.matrices[0].values.clone();
    let input = &inputs(&plain, 0, &sites)[0];
    let wanted: Vec<f32> = (0..64).map(|at| 1.0 + at as f32 / 50.0).collect();
    let scales = weights.fold(&plain, input, wanted.clone()).unwrap();
    assert_ne!(scales, wanted);
    let changed = weights.changed(&plain).unwrap();
    let mut norm = [0.0; 64];
    changed[name].format.decode(&changed[name].bytes, &mut norm);
    let old = plain.weights.tensor(name).unwrap().to_f32().unwrap();
    for column in 0..64 {
        let product = norm[column] * weights.matrices[0].values[column];
        let expected = old[column] * before[column];
        assert!((product - expected).abs() < 1e-6 * (1.0 + expected.abs()), "{product} for {expected}");
    }
}

/// On inputs with a few large columns the search beats rounding to nearest, and clipping does not
/// undo it.
#[test]
fn large_columns_lose_less() {
    let config = config("llama", "");
    let base = invent(&config);
    let plain = model(&config, &base, HashMap::new());
    let sites = plain.sites(0).unwrap();
    let mut rng = Rng::new(4);
    let mut hessians = Vec::new();
    for site in &sites.sites {
        let width = site.linears[0].cols;
        let size = |column: usize| if column.is_multiple_of(13) { 20.0 } else { 1.0 };
        let rows: Vec<f32> = (0..200 * width).map(|at| size(at % width) * rng.normal()).collect();
        hessians.push(Hessian::of_rows(&rows, width));
    }
    let target = Target::Int { bits: 4, group: Some(32), zero_points: false };
    let options = Options::new(target, Method::Awq);
    let mut weights = Weights::read(&plain, &sites, &options).unwrap();
    let input = &inputs(&plain, 0, &sites)[0];
    let loss = |coded: &Quantized, weights: &[f32], hessian: &Hessian| {
        let errors: Vec<f32> = coded.to_f32().iter().zip(weights).map(|(a, b)| a - b).collect();
        hessian.loss(&errors)
    };
    let plain_loss = {
        let values = &weights.matrices[0].values;
        loss(&rtn::quantize(target, values, 64, 1), values, &hessians[0])
    };
    let scales = search::scales(&mut Reference::new(), &weights, &hessians, input, &options).unwrap();
    assert!(scales[13] > 1.5 * scales[12], "{scales:?}");
    let scales = weights.fold(&plain, input, scales).unwrap();
    hessians[0].divide(&scales);
    let values = &weights.matrices[0].values;
    let scaled = loss(&rtn::quantize(target, values, 64, 1), values, &hessians[0]);
    assert!(scaled < 0.7 * plain_loss, "{scaled} against {plain_loss}");
    let clipped = loss(&round(values, &hessians[0], &options), values, &hessians[0]);
    assert!(clipped < scaled, "{clipped} against {scaled}");
}
