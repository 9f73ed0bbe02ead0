//! EAGLE heads over a prompt, in chunks and whole, and over drafts in trees and in chains.

use folio_device::{Backend, reference::Reference, tree};
use folio_model::Decoder;
use folio_model::heads::{Eagle, EagleLayout, Feature};
use serde::Deserialize;

use super::{Golden, TOLERANCE, TensorGroup, Weights, batch, check_within, cpu, cuda, cuda_in_f32, distance, read};

#[derive(Deserialize)]
pub(super) struct Expected {
    name: String,
    tensors: Vec<TensorGroup>,
    /// Token of each column of logits; empty if they are the same.
    vocabulary: Vec<u32>,
    prompt_rows: Vec<usize>,
    prompt_logits: Vec<Vec<f64>>,
    /// A tree behind the last token, parents before children; nodes of one level are not all
    /// neighbours.
    parents: Vec<Option<usize>>,
    drafts: Vec<u32>,
    draft_logits: Vec<Vec<f64>>,
}

struct Running<'a, B: Backend> {
    golden: &'a Golden,
    expected: &'a Expected,
    decoder: Decoder<B>,
    head: Eagle<B>,
    tolerance: f64,
}

impl<'a, B: Backend> Running<'a, B> {
    fn new(golden: &'a Golden, expected: &'a Expected, backend: B, tolerance: f64) -> Self {
        let mut decoder = golden.decoder(backend);
        let weights = Weights::of(golden.head_seed, &expected.tensors);
        let head = Eagle::load(&mut decoder, &weights).expect("a head");
        Self { golden, expected, decoder, head, tolerance }
    }

    fn logits(&mut self) -> Vec<Vec<f32>> {
        let mut out = Vec::new();
        self.head.logits(&mut self.decoder, &mut out);
        out.chunks_exact(self.head.vocab_size()).map(<[f32]>::to_vec).collect()
    }

    /// The prompt through the model and the head in steps of `chunk`; returns the head's logits of
    /// every row.
    fn prompt(&mut self, chunk: usize) -> Vec<Vec<f32>> {
        let (golden, mut rows) = (self.golden, Vec::new());
        for (number, tokens) in golden.prompt().chunks(chunk).enumerate() {
            let base = number * chunk;
            self.decoder.forward(&batch(tokens, base, &[])).expect("a step");
            let next = &golden.tokens[base + 1..=base + tokens.len()];
            let features: Vec<_> = (0..tokens.len() as u32).map(Feature::Decoder).collect();
            self.head.forward(&mut self.decoder, &batch(next, base, &[]), &features).expect("a step of the head");
            rows.extend(self.logits());
        }
        for (&row, expected) in self.expected.prompt_rows.iter().zip(&self.expected.prompt_logits) {
            let what = format!("{}: row {row} of the prompt", self.expected.name);
            check_within(self.tolerance, &what, &rows[row], expected);
        }
        rows
    }

    /// The tree level by level, behind a prompt with `last` rows in its last chunk; returns logits
    /// of each node.
    fn tree(&mut self, last: usize) -> Vec<Vec<f32>> {
        let Expected { parents, drafts, .. } = self.expected;
        let depth = |node: usize| std::iter::successors(Some(node), |&node| parents[node]).count();
        let (mut rows, mut found): (Vec<usize>, _) = (Vec::new(), Vec::new());
        let mut first = 0;
        for level in 1.. {
            let before = std::mem::replace(&mut first, rows.len());
            rows.extend((0..parents.len()).filter(|&node| depth(node) == level));
            let new = &rows[first..];
            if new.is_empty() {
                break;
            }
            let row_of = |node: usize| rows.iter().position(|&other| other == node).expect("a row");
            let features = new.iter().map(|&node| match parents[node] {
                Some(parent) => Feature::After((row_of(parent) - before) as u32),
                None => Feature::After(last as u32 - 1),
            });
            let features: Vec<_> = features.collect();
            let tokens: Vec<u32> = new.iter().map(|&node| drafts[node]).collect();
            let words = tree::ancestors(&rows.iter().map(|&node| parents[node].map(row_of)).collect::<Vec<_>>());
            let step = batch(&tokens, self.golden.prompt().len() + first, &words[first..]);
            self.head.forward(&mut self.decoder, &step, &features).expect("a level");
            found.extend(self.logits());
        }
        (0..parents.len()).map(|node| found[rows.iter().position(|&row| row == node).expect("a row")].clone()).collect()
    }

    /// The nodes of one path as a chain, one per step.
    fn chain(&mut self, path: &[usize], last: usize) -> Vec<Vec<f32>> {
        let base = self.golden.prompt().len();
        let mut found = Vec::new();
        for (depth, &node) in path.iter().enumerate() {
            let after = if depth == 0 { last as u32 - 1 } else { 0 };
            let step = batch(&[self.expected.drafts[node]], base + depth, &[]);
            self.head.forward(&mut self.decoder, &step, &[Feature::After(after)]).expect("a draft");
            found.extend(self.logits());
        }
        found
    }
}

fn agrees<B: Backend>(backend: impl Fn() -> B, tolerance: f64) {
    let golden = read();
    assert_eq!(golden.eagle.len(), 2);
    for expected in &golden.eagle {
        let mut running = Running::new(&golden, expected, backend(), tolerance);
        let rows = golden.prompt().len();
        let whole = running.prompt(rows);
        let nodes = running.tree(rows);
        for (node, (found, right)) in nodes.iter().zip(&expected.draft_logits).enumerate() {
            check_within(tolerance, &format!("{}: draft {node}", expected.name), found, right);
        }
        assert!(distance(&nodes[2], &expected.draft_logits[4]) > 0.05, "{}: siblings are alike", expected.name);

        // In chunks, and as a chain that overwrites the tree's slots: the same bits.
        assert!(running.prompt(7) == whole, "{}: in chunks", expected.name);
        let chain = running.chain(&[1, 3, 5, 6], rows % 7);
        for (found, node) in chain.iter().zip([1, 3, 5, 6]) {
            assert!(*found == nodes[node], "{}: draft {node} in a chain", expected.name);
        }
    }
}

#[test]
fn reference_agrees() {
    agrees(Reference::new, TOLERANCE);
}

#[test]
fn cpu_agrees() {
    agrees(cpu, TOLERANCE);
}

/// Sums are in another order there, and a chain of drafts continues from their results.
#[test]
fn cuda_agrees() {
    if let Some(_turn) = cuda::turn() {
        agrees(cuda_in_f32, 4.0 * TOLERANCE);
    }
}

#[test]
fn layouts_and_vocabularies_are_told_by_the_tensors() {
    let golden = read();
    let [three, one] = &golden.eagle[..] else { panic!("two heads") };
    let running = Running::new(&golden, three, Reference::new(), TOLERANCE);
    assert_eq!((running.head.layout(), running.head.vocab_size()), (EagleLayout::Three, 41));
    let tokens: Vec<u32> = (0..41).map(|column| running.head.token(column)).collect();
    assert_eq!(tokens, three.vocabulary);
    assert!(running.head.memory().kv > 0 && running.head.group() == 0);
    let running = Running::new(&golden, one, Reference::new(), TOLERANCE);
    assert_eq!((running.head.layout(), running.head.vocab_size()), (EagleLayout::One, 97));
    assert_eq!(running.head.token(96), 96);
}

#[test]
fn what_does_not_fit_is_refused() {
    let golden = read();
    let expected = &golden.eagle[0];
    let mut running = Running::new(&golden, expected, Reference::new(), TOLERANCE);
    running.prompt(25);
    let refused = |running: &mut Running<'_, Reference>, features: &[Feature]| {
        let step = batch(&[1], 25, &[]);
        running.head.forward(&mut running.decoder, &step, features).expect_err("a refusal").to_string()
    };
    let message = refused(&mut running, &[Feature::After(25)]);
    assert_eq!(message, "the end of the head's own rows is 26, but at most 25 fit");
    let message = refused(&mut running, &[Feature::Decoder(25)]);
    assert_eq!(message, "the end of the decoder's rows is 26, but at most 25 fit");
    assert_eq!(refused(&mut running, &[]), "states has 0 entries, but 1 were expected");

    let mut decoder = golden.decoder(Reference::new());
    let mut weights = Weights::of(golden.head_seed, &expected.tensors);
    weights.change("d2t", |bytes| bytes[1] = 1);
    let error = Eagle::load(&mut decoder, &weights).err().expect("a refusal").to_string();
    assert!(error.contains("d2t") && error.contains("outside the vocabulary"), "{error}");
    let error = Eagle::load(&mut decoder, &Weights::default()).err().expect("a refusal").to_string();
    assert!(error.contains("tensor fc.weight is missing"), "{error}");
}
