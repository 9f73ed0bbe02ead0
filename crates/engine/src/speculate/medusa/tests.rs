use folio_device::reference::Reference;
use folio_model::Decoder;

use super::*;
use crate::speculate::rig::{HIDDEN, Memory, Rig, Sequence, VOCAB, follower, foreseeable, sparse};

const PROMPT: [u32; 21] = [3, 14, 15, 9, 26, 5, 30, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3];

/// Three heads with random blocks, which share the decoder's output matrix.
fn random_heads(decoder: &mut Decoder<Reference>) -> Memory {
    let mut weights = Memory::default();
    for head in 0..3 {
        weights.invent(&format!("medusa_head.{head}.0.linear.weight"), &[HIDDEN, HIDDEN]);
        weights.invent(&format!("medusa_head.{head}.0.linear.bias"), &[HIDDEN]);
    }
    assert_eq!(Medusa::load(decoder, &weights, 1).expect("heads").num_heads(), 3);
    weights
}

fn load(rig: &mut Rig, weights: &Memory, options: MedusaOptions) -> MedusaDrafter<Reference> {
    MedusaDrafter::load(&mut rig.decoder, weights, options).expect("a drafter")
}

/// Every possible node of the best `candidates` of each head, with its probability, likeliest
/// first.
fn all_nodes(probabilities: &[Vec<(u32, f64)>]) -> Vec<(Vec<u32>, f64)> {
    let mut nodes: Vec<(Vec<u32>, f64)> = Vec::new();
    let mut level = vec![(Vec::new(), 1.0)];
    for head in probabilities {
        let next = level.iter().flat_map(|(path, before): &(Vec<u32>, f64)| {
            head.iter().map(move |&(token, chance)| ([&path[..], &[token]].concat(), before * chance))
        });
        level = next.collect();
        nodes.extend(level.iter().cloned());
    }
    nodes.sort_by(|a, b| b.1.total_cmp(&a.1));
    nodes
}

fn paths(draft: &Draft) -> Vec<Vec<u32>> {
    let path = |node: u16| {
        let mut path: Vec<u32> = draft.path(node).map(|node| draft.tokens()[usize::from(node)]).collect();
        path.reverse();
        path
    };
    (0..draft.len() as u16).map(path).collect()
}

#[test]
fn a_tree_is_made_of_the_likeliest_nodes() {
    let mut rig = Rig::new(Memory::invent);
    let weights = random_heads(&mut rig.decoder);
    for most in [1, 2, 5, 16, 63] {
        let candidates = 4;
        let mut drafter = load(&mut rig, &weights, MedusaOptions { candidates, least: 0.0 });
        let who = rig.add(&PROMPT, None);
        rig.sequences[who].most = most;
        rig.read(&mut drafter, who, 8);
        // The last step had one output, and its states still exist.
        let (mut plain, mut logits) = (Medusa::load(&mut rig.decoder, &weights, 1).expect("heads"), Vec::new());
        plain.start(&mut rig.decoder, &[0]).expect("a start");
        plain.logits(&mut rig.decoder, 3, &mut logits).expect("logits");
        let heads: Vec<Vec<(u32, f64)>> = logits
            .chunks_exact(VOCAB)
            .map(|row| {
                let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
                let mut all: Vec<(u32, f64)> =
                    (0..).zip(row).map(|(token, &logit)| (token, f64::from(logit).exp() / sum)).collect();
                all.sort_by(|a, b| b.1.total_cmp(&a.1));
                all.truncate(candidates.min(most));
                all
            })
            .collect();
        let draft = rig.sequences[who].draft.clone();
        assert_eq!(draft.len(), most.min(candidates + candidates.pow(2) + candidates.pow(3)));
        let expected: Vec<Vec<u32>> = all_nodes(&heads[..3.min(most)]).into_iter().map(|node| node.0).collect();
        assert_eq!(paths(&draft), expected[..draft.len()], "{most} nodes");
    }
}

#[test]
fn a_tree_ends_where_nothing_is_likely() {
    let guesses = vec![vec![(1, 0.5), (2, 0.25)], vec![(3, 0.5), (4, 0.1)]];
    let mut draft = Draft::default();
    let said = tree(&guesses, |_| 1.0, 9, 0.2, &mut draft);
    assert_eq!((draft.tokens(), draft.parents()), (&[1, 2, 3][..], &[None, None, Some(0)][..]));
    assert_eq!(said, [0.5, 0.25, 0.5]);
    // A head that is seldom right at the second token has it left out.
    let mut draft = Draft::default();
    tree(&guesses, |depth| if depth == 1 { 1.0 } else { 0.3 }, 9, 0.2, &mut draft);
    assert_eq!(draft.tokens(), [1, 2]);
    // Heads that are sure give a chain.
    let mut draft = Draft::default();
    tree(&[vec![(1, 0.9), (2, 0.1)], vec![(3, 0.9), (4, 0.1)]], |_| 1.2, 2, 0.0, &mut draft);
    assert_eq!(draft, Draft::chain([1, 3]));
}

#[test]
fn heads_that_know_the_model_are_right_all_the_time() {
    let mut rig = Rig::new(foreseeable);
    let mut weights = Memory::default();
    for head in 0..4usize {
        let said = |token: usize| (0..head + 2).fold(token as u32, |token, _| follower(token)) as usize;
        weights.put(&format!("medusa_head.{head}.0.linear.weight"), &[HIDDEN, HIDDEN], vec![0.0; HIDDEN * HIDDEN]);
        weights.put(&format!("medusa_head.{head}.0.linear.bias"), &[HIDDEN], vec![0.0; HIDDEN]);
        let output = sparse(VOCAB, HIDDEN, |token| (said(token), token), 20.0);
        weights.put(&format!("medusa_head.{head}.1.weight"), &[VOCAB, HIDDEN], output);
    }
    let mut drafter = load(&mut rig, &weights, MedusaOptions::default());
    for most in [1, 3, 4, 9] {
        let who = rig.add(&PROMPT, None);
        rig.sequences[who].most = most;
        rig.read(&mut drafter, who, 64);
        rig.answer(&mut drafter, who, 6);
        let Sequence { paces, tokens, .. } = &rig.sequences[who];
        assert_eq!(paces[1..], [1 + most.min(4); 6], "{most} nodes");
        assert!(tokens[20..].windows(2).all(|pair| pair[1] == follower(pair[0])));
    }
}

#[test]
fn requests_beside_each_other_get_what_they_get_alone() {
    let alone = |prompt: &[u32]| {
        let mut rig = Rig::new(Memory::invent);
        let weights = random_heads(&mut rig.decoder);
        let mut drafter = load(&mut rig, &weights, MedusaOptions { candidates: 3, least: 0.0 });
        let who = rig.add(prompt, None);
        rig.sequences[who].most = 5;
        rig.read(&mut drafter, who, 64);
        rig.sequences.remove(who).draft
    };
    let mut rig = Rig::new(Memory::invent);
    let weights = random_heads(&mut rig.decoder);
    let mut drafter = load(&mut rig, &weights, MedusaOptions { candidates: 3, least: 0.0 });
    let prompts = [&PROMPT[..7], &PROMPT[3..20], &PROMPT[..2]];
    for prompt in prompts {
        let who = rig.add(prompt, None);
        rig.sequences[who].most = if who == 1 { 0 } else { 5 };
    }
    rig.step(&mut drafter, &[(0, 64), (1, 64), (2, 64)]);
    assert_eq!(rig.sequences[0].draft, alone(prompts[0]));
    assert_eq!(rig.sequences[2].draft, alone(prompts[2]));
    assert!(rig.sequences[1].draft.is_empty() && !rig.sequences[0].draft.is_empty());
}
