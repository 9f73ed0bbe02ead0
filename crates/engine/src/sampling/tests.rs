//! Samplers against distributions: 20,000 draws each, compared by chi-square with a plain
//! implementation that sorts and shares no code with the sampler.

use std::sync::Arc;

use super::*;

const DRAWS: usize = 20_000;
const PROMPT: [u32; 6] = [3, 3, 5, 11, 17, 0];
const OUTPUTS: [u32; 7] = [1, 1, 1, 4, 5, 12, 12];
const EOS: [u32; 1] = [2];

fn logits() -> Vec<f32> {
    (0..24).map(|token| (random::uniform(42, 9, token) * 6.0 - 3.0) as f32).collect()
}

fn state(params: SamplingParams, sample_index: usize) -> SamplingState {
    params.validate(24).unwrap();
    let mut state = SamplingState::new(Arc::new(params), &PROMPT, &EOS, sample_index);
    OUTPUTS.iter().for_each(|&token| state.observe(token));
    state
}

/// The distribution that `params` describe, in f64, by sorting.
fn plain(params: &SamplingParams) -> Vec<f64> {
    let mut logits: Vec<f64> = logits().into_iter().map(f64::from).collect();
    for token in 0..logits.len() as u32 {
        let allowed = params.allowed_tokens.as_ref().is_none_or(|allowed| allowed.contains(&token));
        let ends = params.stop_token_ids.contains(&token) || (!params.ignore_eos && EOS.contains(&token));
        let too_early = ends && OUTPUTS.len() < params.min_tokens;
        let logit = &mut logits[token as usize];
        if !allowed || params.banned_tokens.contains(&token) || too_early {
            *logit = f64::NEG_INFINITY;
            continue;
        }
        *logit += params.logit_bias.iter().filter(|bias| bias.0 == token).map(|bias| f64::from(bias.1)).sum::<f64>();
        let count = OUTPUTS.iter().filter(|&&output| output == token).count() as f64;
        if count > 0.0 || PROMPT.contains(&token) {
            let penalty = f64::from(params.repetition_penalty);
            *logit *= if *logit > 0.0 { 1.0 / penalty } else { penalty };
        }
        *logit -= f64::from(params.frequency_penalty) * count;
        *logit -= f64::from(params.presence_penalty) * count.min(1.0);
    }
    let normal = |weights: Vec<f64>| {
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / sum).collect::<Vec<f64>>()
    };
    let mut chances = normal(logits.iter().map(|logit| (logit / f64::from(params.temperature)).exp()).collect());
    let best = chances.iter().copied().fold(0.0, f64::max);
    chances.iter_mut().filter(|chance| **chance < f64::from(params.min_p) * best).for_each(|chance| *chance = 0.0);

    let mut order: Vec<usize> = (0..chances.len()).collect();
    order.sort_by(|&a, &b| chances[b].total_cmp(&chances[a]));
    order[(params.top_k.unwrap_or(u32::MAX) as usize).min(order.len())..]
        .iter()
        .for_each(|&token| chances[token] = 0.0);
    chances = normal(chances);
    let mut sum = 0.0;
    for token in order {
        if sum >= f64::from(params.top_p) {
            chances[token] = 0.0;
        }
        sum += chances[token];
    }
    normal(chances)
}

fn draws(params: &SamplingParams) -> Vec<usize> {
    let mut state = state(params.clone(), 0);
    let mut counts = vec![0; 24];
    for position in 0..DRAWS {
        counts[state.sample(&mut logits(), position).unwrap().token as usize] += 1;
    }
    counts
}

/// Whether the counts agree with the chances: chi-square below the value that one in 10,000 fair
/// runs exceeds, by Wilson and Hilferty's approximation. Tokens expected fewer than 5 times are
/// counted together.
fn fits(counts: &[usize], chances: &[f64]) -> bool {
    let impossible = counts.iter().zip(chances).any(|(&count, &chance)| count > 0 && chance == 0.0);
    let (mut rare, mut bins, mut square) = ((0.0, 0.0), 0, 0.0);
    for (&count, &chance) in counts.iter().zip(chances).filter(|(_, chance)| **chance > 0.0) {
        let expected = chance * DRAWS as f64;
        if expected < 5.0 {
            rare = (rare.0 + count as f64, rare.1 + expected);
            continue;
        }
        bins += 1;
        square += (count as f64 - expected).powi(2) / expected;
    }
    if rare.1 > 0.0 {
        bins += 1;
        square += (rare.0 - rare.1).powi(2) / rare.1.max(5.0);
    }
    let freedom = f64::from(bins - 1).max(1e-9);
    let spread = 2.0 / (9.0 * freedom);
    let limit = freedom * (1.0 - spread + 3.719 * spread.sqrt()).powi(3);
    !impossible && (bins == 1 || square <= limit)
}

/// Every sampler alone, and some together.
fn samplers() -> Vec<SamplingParams> {
    let base = || SamplingParams { seed: 2024, ..SamplingParams::default() };
    vec![
        base(),
        SamplingParams { temperature: 0.6, ..base() },
        SamplingParams { temperature: 1.8, ..base() },
        SamplingParams { top_k: Some(1), ..base() },
        SamplingParams { top_k: Some(5), ..base() },
        SamplingParams { top_p: 0.3, ..base() },
        SamplingParams { top_p: 0.9, ..base() },
        SamplingParams { min_p: 0.2, ..base() },
        SamplingParams { repetition_penalty: 1.7, ..base() },
        SamplingParams { frequency_penalty: 0.8, ..base() },
        SamplingParams { frequency_penalty: -0.5, ..base() },
        SamplingParams { presence_penalty: 1.2, ..base() },
        SamplingParams { logit_bias: vec![(6, 2.0), (7, -100.0), (6, 0.5)], ..base() },
        SamplingParams { allowed_tokens: Some(vec![9, 2, 14, 1]), ..base() },
        SamplingParams { banned_tokens: vec![0, 1, 2, 3, 10], ..base() },
        SamplingParams { min_tokens: 8, stop_token_ids: vec![13], ..base() },
        SamplingParams { min_tokens: 8, stop_token_ids: vec![13], ignore_eos: true, ..base() },
        SamplingParams { min_tokens: 7, stop_token_ids: vec![13], ..base() },
        SamplingParams { temperature: 0.8, top_k: Some(12), top_p: 0.8, ..base() },
        SamplingParams { temperature: 1.5, min_p: 0.1, top_k: Some(9), top_p: 0.95, ..base() },
        SamplingParams {
            temperature: 0.9,
            top_p: 0.85,
            repetition_penalty: 1.3,
            frequency_penalty: 0.4,
            presence_penalty: 0.3,
            logit_bias: vec![(8, 1.5)],
            banned_tokens: vec![20],
            ..base()
        },
    ]
}

#[test]
fn every_sampler_fits_its_distribution() {
    for params in samplers() {
        let (counts, chances) = (draws(&params), plain(&params));
        assert!(fits(&counts, &chances), "{params:?}\ndrawn {counts:?}\nchances {chances:.4?}");
    }
}

/// The test can fail: draws do not fit a distribution that differs in one setting.
#[test]
fn a_wrong_distribution_does_not_fit() {
    let base = SamplingParams { seed: 2024, ..SamplingParams::default() };
    let counts = draws(&base);
    for wrong in [
        SamplingParams { temperature: 1.1, ..base.clone() },
        SamplingParams { top_k: Some(22), ..base.clone() },
        SamplingParams { top_p: 0.99, ..base.clone() },
        SamplingParams { repetition_penalty: 1.4, ..base.clone() },
        SamplingParams { frequency_penalty: 0.25, ..base.clone() },
        SamplingParams { presence_penalty: 0.4, ..base.clone() },
        SamplingParams { logit_bias: vec![(4, 0.5), (6, 0.5), (9, 0.5)], ..base.clone() },
    ] {
        assert!(!fits(&counts, &plain(&wrong)), "{wrong:?}");
    }
}

#[test]
fn greedy_takes_the_best_and_the_lowest_of_equals() {
    let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    for (mut logits, expected) in [
        (vec![1.0, 3.0, 3.0, 2.0], 1),
        (vec![-0.0, 0.0], 0),
        (vec![-5.0, -4.0, f32::NEG_INFINITY], 1),
        (vec![f32::NEG_INFINITY, -1e30], 1),
    ] {
        let mut state = SamplingState::new(Arc::new(params.clone()), &[], &[], 0);
        assert_eq!(state.sample(&mut logits, 5).unwrap().token, expected);
    }
}

#[test]
fn a_draw_depends_on_seed_sample_and_position_alone() {
    let params = SamplingParams { seed: 7, ..SamplingParams::default() };
    let run = |params: &SamplingParams, sample_index| -> Vec<u32> {
        let mut state = state(params.clone(), sample_index);
        (100..140).map(|position| state.sample(&mut logits(), position).unwrap().token).collect()
    };
    let first = run(&params, 0);
    assert_eq!(first, run(&params, 0));
    assert_ne!(first, run(&params, 1), "another answer to the same prompt");
    assert_ne!(first, run(&SamplingParams { seed: 8, ..params.clone() }, 0), "another seed");
    // A state after 40 draws agrees with a fresh one.
    let mut fresh = state(params, 0);
    assert_eq!(fresh.sample(&mut logits(), 139).unwrap().token, first[39]);
}

#[test]
fn logprobs_are_of_the_raw_logits() {
    let params = SamplingParams {
        temperature: 0.0,
        logprobs: Some(2),
        prompt_logprobs: Some(1),
        banned_tokens: vec![1],
        logit_bias: vec![(0, 50.0)],
        ..SamplingParams::default()
    };
    let mut state = SamplingState::new(Arc::new(params), &[], &[], 0);
    let raw = [1.0f32, 3.0, 2.0];
    let total: f32 = raw.iter().map(|logit| logit.exp()).sum();
    let sampled = state.sample(&mut raw.clone(), 1).unwrap();
    let found = sampled.logprobs.unwrap();
    assert_eq!((sampled.token, found.token, found.rank), (0, 0, 3));
    assert!((found.logprob - (raw[0].exp() / total).ln()).abs() < 1e-6);
    assert_eq!(found.top.iter().map(|top| top.0).collect::<Vec<_>>(), [1, 2]);
    let prompt = state.prompt_logprobs(&raw, 2).unwrap();
    assert_eq!((prompt.token, prompt.rank, prompt.top.len()), (2, 2, 1));
}

#[test]
fn a_row_that_went_wrong_is_an_error() {
    let mut state = SamplingState::new(Arc::new(SamplingParams::default()), &[], &[], 0);
    let nan = state.sample(&mut [0.0, f32::NAN], 1).unwrap_err();
    assert_eq!(nan.to_string(), "the logit of token 1 is NaN, but must be a finite number");
    assert!(state.sample(&mut [f32::INFINITY, 0.0], 1).is_err());
    assert_eq!(state.sample(&mut [f32::NEG_INFINITY; 3], 1), Err(NotFinite::NothingLeft));
    assert_eq!(state.sample(&mut [], 1), Err(NotFinite::NothingLeft));
    assert!(state.prompt_logprobs(&[f32::NAN, 0.0], 1).is_err());
    let tiny = SamplingParams { repetition_penalty: 1e-38, ..SamplingParams::default() };
    let mut state = SamplingState::new(Arc::new(tiny), &[1], &[], 0);
    assert!(state.sample(&mut [1.0, 5.0], 1).is_err());
    let banned = SamplingParams { banned_tokens: vec![0, 1], ..SamplingParams::default() };
    let mut state = SamplingState::new(Arc::new(banned), &[], &[], 0);
    assert_eq!(state.sample(&mut [1.0, 2.0], 1), Err(NotFinite::NothingLeft));
}

/// A wide row, on which every filter takes its partial path.
#[test]
fn a_wide_vocabulary_stays_inside_its_filters() {
    let wide: Vec<f32> = (0..50_000).map(|token| (random::uniform(1, 2, token) * 20.0 - 10.0) as f32).collect();
    let mut order: Vec<u32> = (0..50_000).collect();
    order.sort_by(|&a, &b| wide[b as usize].total_cmp(&wide[a as usize]));
    let params = SamplingParams { top_k: Some(40), top_p: 0.9, ..SamplingParams::default() };
    let mut state = SamplingState::new(Arc::new(params), &[], &[], 0);
    for position in 0..50 {
        let token = state.sample(&mut wide.clone(), position).unwrap().token;
        assert!(order[..40].contains(&token));
    }
}

/// Banned tokens, end tokens before `min_tokens`, and end tokens outside the vocabulary.
#[test]
fn what_is_banned_by_hand() {
    let params = SamplingParams { banned_tokens: vec![5], min_tokens: 1, ..SamplingParams::default() };
    let mut state = SamplingState::new(Arc::new(params), &[], &[4, 99], 0);
    assert_eq!(state.banned(24).collect::<Vec<_>>(), [5, 4]);
    state.observe(0);
    assert_eq!(state.banned(24).collect::<Vec<_>>(), [5]);
}
