//! Routing that no present family uses (sigmoid scores, groups, a bias on the choice, shared
//! experts), against plain loops. Attention adds nothing here: its output matrix is zero.

use folio_device::RouterScore;

use super::*;
use crate::{ExpertsSpec, FfnSpec, SharedExpertSpec};

type Change = fn(&mut ExpertsSpec);

const HIDDEN: usize = 64;
const EXPERTS: usize = 8;

/// A two-layer model with these experts instead of its family's.
fn model(change: Change, weights: Memory) -> OpenModel {
    let config = config("qwen3_moe", r#", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24"#);
    let mut model = OpenModel::from_config(&config, Box::new(weights)).unwrap();
    model.spec.layers.truncate(2);
    for layer in &mut model.spec.layers {
        let FfnSpec::Experts(experts) = &mut layer.ffn else { panic!("qwen3_moe routes in every layer") };
        change(experts);
    }
    model
}

#[test]
fn every_kind_of_routing_is_what_plain_loops_compute() {
    let rows: [(&str, Change); 6] = [
        ("softmax", |_| {}),
        ("softmax of the best, shared", |experts| {
            experts.score = RouterScore::SoftmaxOfBest;
            experts.shared = Some(SharedExpertSpec { inter: 40, gated: false });
        }),
        ("sigmoid", |experts| experts.score = RouterScore::Sigmoid),
        ("sigmoid, biased choice", |experts| {
            experts.score = RouterScore::Sigmoid;
            experts.choice_bias = true;
            experts.normalize = true;
        }),
        ("softmax, normalized, shared behind a gate", |experts| {
            experts.normalize = true;
            experts.shared = Some(SharedExpertSpec { inter: 24, gated: true });
        }),
        ("sigmoid, groups, biased choice, scale, shared", |experts| {
            experts.score = RouterScore::Sigmoid;
            experts.choice_bias = true;
            experts.normalize = true;
            experts.scale = 2.5;
            (experts.groups, experts.groups_kept) = (4, 2);
            experts.shared = Some(SharedExpertSpec { inter: 40, gated: false });
        }),
    ];
    let mut seen: Vec<Vec<f32>> = Vec::new();
    for (name, change) in rows {
        let mut weights = invent_for(|weights| model(change, weights));
        for layer in 0..2 {
            weights.put(&format!("model.layers.{layer}.self_attn.o_proj.weight"), &[HIDDEN, 64], &[0.0; HIDDEN * 64]);
        }
        let model = model(change, weights.clone());
        let found = logits(&mut load_model(Reference::new(), &model).unwrap(), &batch(&TOKENS, 0, 1));
        let expected: Vec<f32> = TOKENS.iter().flat_map(|token| plain_logits(&model, &weights, *token)).collect();
        let largest = expected.iter().fold(1f32, |most, value| most.max(value.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5 * largest, "{name}: {found} for {expected}");
        }
        assert!(!seen.contains(&found), "{name} computes what another row does");
        seen.push(found);
    }
}

fn plain_logits(model: &OpenModel, weights: &Memory, token: u32) -> Vec<f32> {
    let eps = model.spec.norm_eps;
    let normed = |x: &[f32], name: &str| -> Vec<f32> {
        let rms = (x.iter().map(|v| v * v).sum::<f32>() / HIDDEN as f32 + eps).sqrt();
        x.iter().zip(weights.values(name)).map(|(x, weight)| x / rms * weight).collect()
    };
    let mut x = weights.values("model.embed_tokens.weight")[token as usize * HIDDEN..][..HIDDEN].to_vec();
    for (number, layer) in model.spec.layers.iter().enumerate() {
        let FfnSpec::Experts(experts) = &layer.ffn else { unreachable!() };
        let prefix = format!("model.layers.{number}");
        let input = normed(&x, &format!("{prefix}.post_attention_layernorm.weight"));
        let branch = plain_experts(experts, weights, &format!("{prefix}.mlp"), &input);
        x.iter_mut().zip(branch).for_each(|(x, value)| *x += value);
    }
    times(weights, "lm_head", &normed(&x, "model.norm.weight"))
}

fn plain_experts(spec: &ExpertsSpec, weights: &Memory, prefix: &str, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; HIDDEN];
    for (expert, weight) in chosen(spec, weights, prefix, x) {
        let result = plain_dense(weights, &format!("{prefix}.experts.{expert}"), x);
        out.iter_mut().zip(result).for_each(|(out, value)| *out += weight * value);
    }
    if let Some(shared) = &spec.shared {
        let gate =
            if shared.gated { sigmoid(times(weights, &format!("{prefix}.shared_expert_gate"), x)[0]) } else { 1.0 };
        let result = plain_dense(weights, &format!("{prefix}.shared_expert"), x);
        out.iter_mut().zip(result).for_each(|(out, value)| *out += gate * value);
    }
    out
}

/// The experts of a row, each with its weight.
fn chosen(spec: &ExpertsSpec, weights: &Memory, prefix: &str, x: &[f32]) -> Vec<(usize, f32)> {
    let logits = times(weights, &format!("{prefix}.gate"), x);
    let total: f32 = logits.iter().map(|logit| logit.exp()).sum();
    let score: Vec<f32> = match spec.score {
        RouterScore::Softmax => logits.iter().map(|logit| logit.exp() / total).collect(),
        RouterScore::SoftmaxOfBest => logits.iter().map(|logit| logit.exp()).collect(),
        RouterScore::Sigmoid => logits.iter().map(|logit| sigmoid(*logit)).collect(),
    };
    let bias = match spec.choice_bias {
        true => weights.values(&format!("{prefix}.gate.e_score_correction_bias")),
        false => vec![0.0; EXPERTS],
    };
    let merit: Vec<f32> = score.iter().zip(bias).map(|(score, bias)| score + bias).collect();
    let size = EXPERTS / spec.groups;
    let two_best = |group: usize| -> f32 {
        let members = best((group * size..(group + 1) * size).collect(), 2, |expert| merit[expert]);
        members.into_iter().map(|expert| merit[expert]).sum()
    };
    let kept = best((0..spec.groups).collect(), spec.groups_kept, two_best);
    let rivals = (0..EXPERTS).filter(|expert| kept.contains(&(expert / size))).collect();
    let experts = best(rivals, spec.top_k, |expert| merit[expert]);
    let sum: f32 = experts.iter().map(|expert| score[*expert]).sum();
    let divide = if spec.normalize || spec.score == RouterScore::SoftmaxOfBest { sum } else { 1.0 };
    experts.into_iter().map(|expert| (expert, score[expert] / divide * spec.scale)).collect()
}

fn best(mut items: Vec<usize>, count: usize, merit: impl Fn(usize) -> f32) -> Vec<usize> {
    items.sort_by(|a, b| merit(*b).total_cmp(&merit(*a)));
    items.truncate(count);
    items
}

fn plain_dense(weights: &Memory, prefix: &str, x: &[f32]) -> Vec<f32> {
    let (gate, up) =
        (times(weights, &format!("{prefix}.gate_proj"), x), times(weights, &format!("{prefix}.up_proj"), x));
    let inner: Vec<f32> = gate.iter().zip(up).map(|(gate, up)| gate * sigmoid(*gate) * up).collect();
    times(weights, &format!("{prefix}.down_proj"), &inner)
}

/// A stored matrix times a row.
fn times(weights: &Memory, name: &str, x: &[f32]) -> Vec<f32> {
    let matrix = weights.values(&format!("{name}.weight"));
    matrix.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(weight, x)| weight * x).sum()).collect()
}

fn sigmoid(value: f32) -> f32 {
    1.0 / (1.0 + (-value).exp())
}
