//! With drafts, sampled tokens have the distribution of the model and the request: each of the next
//! three tokens, given the ones before, over 50,000 draws, for chains and trees and for drafts from
//! useless to perfect.

use std::sync::Arc;

use folio_engine::{
    SamplingParams, SamplingState,
    speculate::{Draft, Place, walk},
};

use crate::{
    chi_square::Fit,
    model::{Random, logits},
};

const VOCAB: usize = 16;
const DRAWS: usize = 50_000;
const PROMPT: [u32; 2] = [3, 5];
const MAX_LEN: usize = PROMPT.len() + 3;
/// The rows of the first, the second and the third token: one for every answer so far.
const CONTEXTS: [std::ops::Range<usize>; 3] = [0..1, 1..17, 17..273];

type Row<T> = [T; VOCAB];

fn context(answer: &[u32]) -> usize {
    let number = answer.iter().fold(0, |number, &token| number * VOCAB + token as usize);
    CONTEXTS[answer.len()].start + number
}

fn answer_of(context: usize) -> Vec<u32> {
    let len = CONTEXTS.iter().position(|contexts| contexts.contains(&context)).expect("a context");
    let number = context - CONTEXTS[len].start;
    (0..len as u32).rev().map(|place| (number / VOCAB.pow(place) % VOCAB) as u32).collect()
}

/// A model and a request, and the probabilities of each token.
struct Target {
    params: Arc<SamplingParams>,
    rows: Vec<Row<f32>>,
    chances: Vec<Row<f64>>,
}

impl Target {
    fn new(params: SamplingParams, seed: u64) -> Self {
        let (mut rows, mut chances) = (Vec::new(), Vec::new());
        for number in 0..CONTEXTS[2].end {
            let answer = answer_of(number);
            assert_eq!(context(&answer), number);
            let row: Row<f32> = logits(seed, &answer, VOCAB, 1.2).try_into().expect("a row");
            chances.push(chances_of(&params, &row, &answer));
            rows.push(row);
        }
        Self { params: Arc::new(params), rows, chances }
    }

    /// The same with two percentage points moved in each row, from the least likely token with at
    /// least four to the next likelier one.
    fn shifted(mut self) -> Self {
        for (row, chances) in self.rows.iter_mut().zip(&self.chances) {
            let mut order: Vec<usize> = (0..VOCAB).filter(|&token| chances[token] >= 0.04).collect();
            order.sort_by(|&a, &b| chances[a].total_cmp(&chances[b]));
            for (token, shift) in [(order[0], -0.02), (order[1], 0.02)] {
                row[token] += self.params.temperature * (1.0 + shift / chances[token]).ln() as f32;
            }
        }
        self
    }

    fn state(&self, draw: usize) -> SamplingState {
        SamplingState::new(Arc::clone(&self.params), &PROMPT, &[], draw)
    }

    /// The p-values of the counts, for each of the three tokens.
    fn p_values(&self, counts: &[Row<u32>]) -> [f64; 3] {
        CONTEXTS.map(|contexts| {
            let mut fit = Fit::default();
            contexts.for_each(|context| fit.add(&counts[context], &self.chances[context]));
            fit.p()
        })
    }

    /// Tokens after an answer, best first.
    fn best_first(&self, answer: &[u32]) -> Vec<u32> {
        let chances = &self.chances[context(answer)];
        let mut order: Vec<u32> = (0..VOCAB as u32).collect();
        order.sort_by(|&a, &b| chances[b as usize].total_cmp(&chances[a as usize]));
        order
    }
}

/// Frequency penalty, temperature and top-k, implemented plainly.
fn chances_of(params: &SamplingParams, row: &Row<f32>, answer: &[u32]) -> Row<f64> {
    let weight = |token: usize| {
        let count = answer.iter().filter(|&&seen| seen as usize == token).count() as f64;
        let logit = f64::from(row[token]) - f64::from(params.frequency_penalty) * count;
        (logit / f64::from(params.temperature)).exp()
    };
    let mut weights: Row<f64> = std::array::from_fn(weight);
    let mut sorted = weights;
    sorted.sort_by(|a, b| b.total_cmp(a));
    let least = sorted[params.top_k.map_or(VOCAB, |k| k as usize) - 1];
    weights.iter_mut().filter(|weight| **weight < least).for_each(|weight| *weight = 0.0);
    let total: f64 = weights.iter().sum();
    weights.map(|weight| weight / total)
}

/// The kind of a draft. `width` candidates for each token: 1 is a chain.
#[derive(Clone, Copy, Debug)]
enum Guess {
    /// The correct token is among the candidates this often, because the draw is known beforehand:
    /// the best and the worst drafts.
    Told { agreement: f64, width: usize },
    /// The likeliest candidates.
    Best { width: usize },
    /// The least likely candidates.
    Worst { width: usize },
}

/// A draft, and the context of each of its rows, the last token's first.
struct Drafted {
    draft: Draft,
    contexts: Vec<usize>,
}

impl Drafted {
    fn new(answer: &[u32]) -> Self {
        Self { draft: Draft::default(), contexts: vec![context(answer)] }
    }

    /// Adds the last token of `answer`.
    fn push(&mut self, answer: &[u32], parent: Option<u16>) -> u16 {
        self.contexts.push(context(answer));
        self.draft.push(answer[answer.len() - 1], parent)
    }

    /// Adds `width` candidates at each depth, after the correct one if there is one.
    fn tell(&mut self, answer: &mut Vec<u32>, rest: &[u32], agreement: f64, width: usize, random: &mut Random) {
        let mut parent = None;
        for &right in rest {
            let at = random.chance(agreement).then(|| random.below(width));
            let offset = 1 + random.below(VOCAB - width);
            let candidate = |index: usize| match at == Some(index) {
                true => right,
                false => (right + (offset + index) as u32) % VOCAB as u32,
            };
            let kept = at.unwrap_or(0);
            let mut next = parent;
            for index in 0..width {
                answer.push(candidate(index));
                let node = self.push(answer, parent);
                next = if index == kept { Some(node) } else { next };
                answer.pop();
            }
            answer.push(candidate(kept));
            parent = next;
        }
    }

    /// Adds candidates after an answer, and candidates after each of them.
    fn grow(&mut self, target: &Target, guess: Guess, answer: &mut Vec<u32>, parent: Option<u16>, depth: usize) {
        if depth == 0 {
            return;
        }
        for token in guess.candidates(target, answer) {
            answer.push(token);
            let node = self.push(answer, parent);
            self.grow(target, guess, answer, Some(node), depth - 1);
            answer.pop();
        }
    }
}

impl Guess {
    /// A draft after `answer`, which `rest` will follow.
    fn draft(self, target: &Target, answer: &[u32], rest: &[u32], random: &mut Random) -> Drafted {
        // An answer's last token needs no node: the row before it gives it.
        let depth = 2 - answer.len();
        let (mut drafted, mut answer) = (Drafted::new(answer), answer.to_vec());
        match self {
            Self::Told { agreement, width } => drafted.tell(&mut answer, &rest[..depth], agreement, width, random),
            Self::Best { .. } | Self::Worst { .. } => drafted.grow(target, self, &mut answer, None, depth),
        }
        drafted
    }

    fn candidates(self, target: &Target, answer: &[u32]) -> Vec<u32> {
        let order = target.best_first(answer);
        match self {
            Self::Told { .. } => Vec::new(),
            Self::Best { width } => order[..width].to_vec(),
            Self::Worst { width } => order[VOCAB - width..].to_vec(),
        }
    }
}

/// Counts of many draws.
struct Tally {
    counts: Vec<Row<u32>>,
    /// Draws with the first token in the draft.
    guessed_first: usize,
}

/// Samples answers of three tokens, in passes over rows that may differ from the target's.
fn draw(target: &Target, rows: &[Row<f32>], guess: Guess) -> Tally {
    let mut tally = Tally { counts: vec![[0; VOCAB]; rows.len()], guessed_first: 0 };
    let mut random = Random(1);
    // A drafter without knowledge of the draw makes the same draft after the same answer.
    let answers = (0..CONTEXTS[2].end).map(answer_of);
    let blind: Vec<Drafted> = match guess {
        Guess::Told { .. } => Vec::new(),
        _ => answers.map(|answer| guess.draft(target, &answer, &[], &mut random)).collect(),
    };
    for number in 0..DRAWS {
        let rest = if blind.is_empty() { plain(target, rows, number) } else { Vec::new() };
        let (mut state, mut answer) = (target.state(number), Vec::with_capacity(3));
        while answer.len() < 3 {
            let told = blind.is_empty().then(|| guess.draft(target, &answer, &rest[answer.len()..], &mut random));
            let drafted = told.as_ref().unwrap_or_else(|| &blind[context(&answer)]);
            let place = Place { position: PROMPT.len() + answer.len(), max_len: MAX_LEN };
            let walk = walk(&drafted.draft, &mut state, place, |state, row, position| {
                let context = drafted.contexts[row];
                let sampled = state.sample(&mut rows[context].clone(), position)?;
                tally.counts[context][sampled.token as usize] += 1;
                Ok(sampled)
            });
            tally.guessed_first += usize::from(answer.is_empty() && !walk.accepted.is_empty());
            answer.extend(walk.sampled.iter().map(|sampled| sampled.token));
        }
        assert!(rest.is_empty() || rest == answer, "draw {number}");
    }
    tally
}

/// The same one token at a time.
fn plain(target: &Target, rows: &[Row<f32>], number: usize) -> Vec<u32> {
    let (mut state, mut answer) = (target.state(number), Vec::new());
    for position in PROMPT.len()..MAX_LEN {
        let sampled = state.sample(&mut rows[context(&answer)].clone(), position).expect("finite logits");
        state.observe(sampled.token);
        answer.push(sampled.token);
    }
    answer
}

fn params(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 0.8, frequency_penalty: 0.5, seed, ..SamplingParams::default() }
}

/// Expected part of draws with the first token in the draft.
fn expected_agreement(target: &Target, guess: Guess) -> f64 {
    match guess {
        Guess::Told { agreement, .. } => agreement,
        _ => guess.candidates(target, &[]).into_iter().map(|token| target.chances[0][token as usize]).sum(),
    }
}

fn check(guesses: &[Guess], first_seed: u64) {
    for (seed, &guess) in (first_seed..).zip(guesses) {
        let target = Target::new(SamplingParams { top_k: Some(13), ..params(seed) }, seed);
        let tally = draw(&target, &target.rows, guess);
        let p = target.p_values(&tally.counts);
        assert!(p.iter().all(|&p| p > 0.01), "{guess:?}: p {p:.4?}");
        let expected = expected_agreement(&target, guess);
        let found = tally.guessed_first as f64 / DRAWS as f64;
        let spread = (expected * (1.0 - expected) / DRAWS as f64).sqrt();
        assert!(
            (found - expected).abs() <= 4.0 * spread + 1e-12,
            "{guess:?}: {found:.4} guessed, {expected:.4} expected"
        );
    }
}

#[test]
fn chains_leave_the_distribution_as_it_is() {
    let told = [0.0, 0.25, 0.5, 0.75, 1.0].map(|agreement| Guess::Told { agreement, width: 1 });
    check(&told, 100);
    check(&[Guess::Best { width: 1 }, Guess::Worst { width: 1 }], 110);
}

#[test]
fn trees_leave_the_distribution_as_it_is() {
    let told = [0.0, 0.25, 0.5, 0.75, 1.0].map(|agreement| Guess::Told { agreement, width: 4 });
    check(&told, 200);
    check(&[Guess::Best { width: 7 }, Guess::Worst { width: 7 }, Guess::Best { width: 3 }], 210);
}

/// Two misplaced percentage points are found, in every one of the three tokens.
fn find_shifts(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let target = Target::new(params(seed), seed);
        let shifted = Target::new(params(seed), seed).shifted();
        for (number, row) in shifted.rows.iter().enumerate() {
            let moved = chances_of(&target.params, row, &answer_of(number));
            let differences = moved.iter().zip(&target.chances[number]).map(|(moved, chance)| (moved - chance).abs());
            assert!((differences.sum::<f64>() - 0.04).abs() < 1e-5, "two percentage points, and no more");
        }
        let guess = if seed % 2 == 0 { Guess::Best { width: 1 } } else { Guess::Best { width: 7 } };
        let tally = draw(&target, &shifted.rows, guess);
        let p = target.p_values(&tally.counts);
        assert!(p.iter().all(|&p| p < 0.01), "seed {seed}: p {p:.4?}");
    }
}

#[test]
fn ten_planted_shifts_are_found() {
    find_shifts(0..10);
}

#[test]
fn ten_more_planted_shifts_are_found() {
    find_shifts(10..20);
}
