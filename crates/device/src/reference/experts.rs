//! Mixture of experts: the choice of a row's experts, their weights, and the sum of their outputs.

use super::{Experts, Reference, Tensor, Vector, Weight, math};
use crate::{Error, ExpertsSource, Result, RouterScore, Routing};

impl Experts {
    pub fn new(source: ExpertsSource<'_>) -> Result<Self> {
        Error::check("number of down projections", source.gate_up.len(), source.down.len())?;
        let gate_up = source.gate_up.iter().map(Weight::new).collect::<Result<Vec<_>>>()?;
        let down = source.down.iter().map(Weight::new).collect::<Result<Vec<_>>>()?;
        for (gate_up, down) in gate_up.iter().zip(&down) {
            Error::check("rows of an expert's gate and up", 2 * down.cols, gate_up.rows)?;
            Error::check("rows of an expert's down", gate_up.cols, down.rows)?;
        }
        let gate_up_bias = biases(source.gate_up_bias, &gate_up)?;
        let down_bias = biases(source.down_bias, &down)?;
        Ok(Self { gate_up, down, gate_up_bias, down_bias })
    }

    pub fn bytes(&self) -> u64 {
        let weights = self.gate_up.iter().chain(&self.down).map(|weight| weight.values.len());
        let biases = self.gate_up_bias.iter().chain(&self.down_bias).flatten().map(|bias| bias.0.len());
        4 * weights.chain(biases).sum::<usize>() as u64
    }
}

fn biases(biases: Option<Vec<Vec<f32>>>, weights: &[Weight]) -> Result<Option<Vec<Vector>>> {
    let Some(biases) = biases else { return Ok(None) };
    Error::check("number of expert biases", weights.len(), biases.len())?;
    for (bias, weight) in biases.iter().zip(weights) {
        Error::check("width of an expert's bias", weight.rows, bias.len())?;
    }
    Ok(Some(biases.into_iter().map(Vector).collect()))
}

/// The experts of a row with their weights, in expert order.
pub fn route(logits: &[f32], op: &Routing<'_, Reference>) -> Vec<(usize, f64)> {
    let logits: Vec<f64> = logits.iter().copied().map(f64::from).collect();
    let scores = match op.score {
        RouterScore::Softmax => {
            let mut scores = logits;
            math::softmax(&mut scores);
            scores
        }
        RouterScore::SoftmaxOfBest => logits,
        RouterScore::Sigmoid => logits.into_iter().map(math::sigmoid).collect(),
    };
    let mut choice = scores.clone();
    if let Some(bias) = op.choice_bias {
        assert_eq!(bias.0.len(), choice.len(), "one choice bias an expert");
        choice.iter_mut().zip(&bias.0).for_each(|(score, &bias)| *score += f64::from(bias));
    }
    drop_groups(&mut choice, op.groups, op.groups_kept);

    let mut chosen = best(&choice, op.top_k);
    chosen.sort_unstable();
    let mut weights: Vec<f64> = chosen.iter().map(|&expert| scores[expert]).collect();
    if op.score == RouterScore::SoftmaxOfBest {
        math::softmax(&mut weights);
    }
    if op.normalize {
        // The small term is DeepSeek's guard against a sum of zero.
        let sum = weights.iter().sum::<f64>() + 1e-20;
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
    chosen.into_iter().zip(weights.into_iter().map(|weight| weight * f64::from(op.scale))).collect()
}

/// Excludes the experts of all but the best groups.
fn drop_groups(choice: &mut [f64], groups: usize, groups_kept: usize) {
    if groups <= 1 {
        return;
    }
    assert_eq!(choice.len() % groups, 0, "experts divide into groups");
    let size = choice.len() / groups;
    let sums: Vec<f64> = choice
        .chunks_exact(size)
        .map(|group| best(group, size.min(2)).into_iter().map(|expert| group[expert]).sum())
        .collect();
    let kept = best(&sums, groups_kept);
    for (index, group) in choice.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&index) {
            group.fill(f64::NEG_INFINITY);
        }
    }
}

/// Indices of the `count` largest values, best first; the lower index wins a tie.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    assert!(count <= values.len(), "the best {count} of {}", values.len());
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order.truncate(count);
    order
}

pub fn forward(
    out: &mut Tensor,
    x: &Tensor,
    router_logits: &Tensor,
    experts: &Experts,
    op: &Routing<'_, Reference>,
    rows: usize,
) {
    let Some(first) = experts.gate_up.first() else { panic!("a layer without experts") };
    let hidden = first.cols;
    x.check("experts input", rows, hidden);
    out.check("experts output", rows, hidden);
    router_logits.check("router logits", rows, experts.gate_up.len());
    for row in 0..rows {
        let mut sums = vec![0.0f64; hidden];
        for (expert, weight) in route(router_logits.row(row), op) {
            for (sum, value) in sums.iter_mut().zip(expert_output(experts, expert, x.row(row), op)) {
                *sum += weight * f64::from(value);
            }
        }
        for (out, sum) in out.row_mut(row).iter_mut().zip(sums) {
            *out = sum as f32;
        }
    }
}

/// `down(act(gate(x)) * up(x))` of one expert.
fn expert_output(experts: &Experts, expert: usize, x: &[f32], op: &Routing<'_, Reference>) -> Vec<f32> {
    let bias = |biases: &'_ Option<Vec<Vector>>| biases.as_ref().map(|biases| biases[expert].clone());
    let gate_up = experts.gate_up[expert].apply(x, bias(&experts.gate_up_bias).as_ref());
    let (gate, up) = gate_up.split_at(gate_up.len() / 2);
    let inner: Vec<f32> = gate.iter().zip(up).map(|(&gate, &up)| math::gated(op.activation, gate, up)).collect();
    experts.down[expert].apply(&inner, bias(&experts.down_bias).as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Activation;

    fn routing(score: RouterScore, top_k: usize) -> Routing<'static, Reference> {
        Routing {
            score,
            top_k,
            normalize: false,
            scale: 1.0,
            choice_bias: None,
            groups: 1,
            groups_kept: 1,
            activation: Activation::Silu,
        }
    }

    fn check(found: Vec<(usize, f64)>, expected: &[(usize, f64)]) {
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.0, expected.0, "{found:?} {expected:?}");
            assert!((found.1 - expected.1).abs() < 1e-6, "{found:?} {expected:?}");
        }
    }

    const LOGITS: [f32; 4] = [1.0, 3.0, -1.0, 2.0];

    #[test]
    fn softmax_before_the_choice_keeps_the_share_of_all() {
        let all: f64 = LOGITS.iter().map(|&x| f64::from(x).exp()).sum();
        let expected = [(1, 3f64.exp() / all), (3, 2f64.exp() / all)];
        check(route(&LOGITS, &routing(RouterScore::Softmax, 2)), &expected);
    }

    #[test]
    fn softmax_after_the_choice_sums_to_one() {
        let share = 1.0 / (1.0 + (-1f64).exp());
        check(route(&LOGITS, &routing(RouterScore::SoftmaxOfBest, 2)), &[(1, share), (3, 1.0 - share)]);
        // Normalizing the best of a softmax over all experts is equivalent.
        let op = Routing { normalize: true, ..routing(RouterScore::Softmax, 2) };
        check(route(&LOGITS, &op), &[(1, share), (3, 1.0 - share)]);
    }

    #[test]
    fn a_choice_bias_moves_the_choice_and_not_the_weight() {
        let bias = Vector(vec![0.0, 0.0, 9.0, 0.0]);
        let op = Routing { choice_bias: Some(&bias), scale: 2.5, ..routing(RouterScore::Sigmoid, 2) };
        let expected = [(1, 2.5 * math::sigmoid(3.0)), (2, 2.5 * math::sigmoid(-1.0))];
        check(route(&LOGITS, &op), &expected);
    }

    /// The best expert is in a group that loses by the sum of its two best.
    #[test]
    fn groups_compete_by_their_two_best() {
        let logits = [4.0, -9.0, 2.0, 2.5, 0.0, 0.0];
        let op = Routing { groups: 3, groups_kept: 1, ..routing(RouterScore::SoftmaxOfBest, 1) };
        check(route(&logits, &op), &[(3, 1.0)]);
    }

    #[test]
    fn the_lower_index_wins_a_tie() {
        check(route(&[0.0; 5], &routing(RouterScore::SoftmaxOfBest, 2)), &[(0, 0.5), (1, 0.5)]);
    }
}
