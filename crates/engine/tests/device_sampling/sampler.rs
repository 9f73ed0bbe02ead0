//! A plain implementation of a device's sampling, following the documentation of `Draw`: everything
//! is sorted.

use folio_device::{Draw, DrawFailure, Drawn, DrawnLogprobs, Draws};

pub fn draw(raw: &[f32], draw: &Draw, lists: &Draws) -> Drawn {
    let failed = |failure| Drawn { token: raw.len() as u32 - 1, failure: Some(failure), logprobs: None };
    let is_wrong = |logit: &f32| logit.is_nan() || *logit == f32::INFINITY;
    if let Some(token) = raw.iter().position(is_wrong) {
        return failed(DrawFailure::NotFinite { token: token as u32, value: raw[token] });
    }
    let token = match draw.target {
        Some(target) => Ok(target),
        None => choose(raw, draw, lists),
    };
    match token {
        Ok(token) => Drawn { token, failure: None, logprobs: draw.logprobs.map(|top| logprobs(raw, token, top)) },
        Err(failure) => failed(failure),
    }
}

/// Tokens, the larger value first, then the lower id.
fn best_first(values: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    order.sort_by(|&a, &b| values[b as usize].total_cmp(&values[a as usize]).then(a.cmp(&b)));
    order
}

fn list<T>(all: &[T], range: &std::ops::Range<u32>) -> Vec<T>
where
    T: Copy,
{
    all[range.start as usize..range.end as usize].to_vec()
}

fn choose(raw: &[f32], draw: &Draw, lists: &Draws) -> Result<u32, DrawFailure> {
    let mut logits = raw.to_vec();
    if let Some(allowed) = &draw.allowed {
        let allowed = list(&lists.tokens, allowed);
        let masked = (0..raw.len()).filter(|token| !allowed.contains(&(*token as u32)));
        masked.for_each(|token| logits[token] = f32::NEG_INFINITY);
    }
    for token in list(&lists.tokens, &draw.banned) {
        logits[token as usize] = f32::NEG_INFINITY;
    }
    for (token, bias) in list(&lists.biases, &draw.biases) {
        logits[token as usize] += bias;
    }
    for seen in list(&lists.seen, &draw.seen) {
        let logit = &mut logits[seen.token as usize];
        *logit = if *logit > 0.0 { *logit / draw.repetition_penalty } else { *logit * draw.repetition_penalty };
        if seen.outputs > 0 {
            *logit -= draw.frequency_penalty * seen.outputs as f32 + draw.presence_penalty;
        }
    }
    let order = best_first(&logits);
    let best = logits[order[0] as usize];
    if best == f32::NEG_INFINITY {
        return Err(DrawFailure::NothingLeft);
    }
    if draw.temperature == 0.0 {
        return Ok(order[0]);
    }
    let weights: Vec<f32> = logits.iter().map(|logit| ((logit - best) / draw.temperature).exp()).collect();
    Ok(draw_one(filter(weights, draw), draw.uniform))
}

fn filter(mut weights: Vec<f32>, draw: &Draw) -> Vec<f32> {
    weights.iter_mut().filter(|weight| **weight < draw.min_p).for_each(|weight| *weight = 0.0);
    let order = best_first(&weights);
    if draw.top_k > 0 {
        order.iter().skip(draw.top_k as usize).for_each(|&token| weights[token as usize] = 0.0);
    }
    if draw.top_p < 1.0 {
        let target = f64::from(draw.top_p) * weights.iter().map(|&weight| f64::from(weight)).sum::<f64>();
        let mut sum = 0.0;
        for &token in &order {
            let weight = &mut weights[token as usize];
            if sum >= target {
                *weight = 0.0;
            }
            sum += f64::from(*weight);
        }
    }
    weights
}

fn draw_one(weights: Vec<f32>, uniform: f64) -> u32 {
    let target = uniform * weights.iter().map(|&weight| f64::from(weight)).sum::<f64>();
    let mut sum = 0.0;
    let possible = weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
    let mut chosen = 0;
    for (token, &weight) in possible {
        sum += f64::from(weight);
        chosen = token as u32;
        if sum > target {
            break;
        }
    }
    chosen
}

fn logprobs(raw: &[f32], token: u32, top: u32) -> DrawnLogprobs {
    let best = raw.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let whole = f64::from(best) + raw.iter().map(|logit| f64::from((logit - best).exp())).sum::<f64>().ln();
    let logprob = |token: u32| (f64::from(raw[token as usize]) - whole) as f32;
    let order = best_first(raw);
    let rank = order.iter().position(|&other| other == token).expect("a token") as u32 + 1;
    let top = order.iter().take(top as usize).map(|&token| (token, logprob(token))).collect();
    DrawnLogprobs { logprob: logprob(token), rank, top }
}
