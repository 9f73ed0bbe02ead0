use folio_device::{GroupTables, Span, reference::Reference};

use super::*;
use crate::speculate::{
    Owner,
    rig::{HIDDEN, Memory, Rig, Sequence, VOCAB, argmax, follower, foreseeable, sparse},
};

const PROMPT: [u32; 37] = [
    3, 14, 15, 9, 26, 5, 30, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 27, 9, 5, 0, 2, 8, 8, 4, 19, 7, 16, 9,
    3,
];
const CHAIN: EagleOptions = EagleOptions { candidates: 1, width: 1, depth: 8, least: 0.0, least_expanded: 0.0 };
const BUSH: EagleOptions = EagleOptions { candidates: 3, width: 4, depth: 5, least: 0.0, least_expanded: 0.0 };

/// A random head; for EAGLE-3 with a vocabulary of every second token.
fn random_head(rig: &mut Rig, three: bool) -> Memory {
    let mut weights = Memory::default();
    let layer = if three { "midlayer" } else { "layers.0" };
    let inputs = if three { 2 * HIDDEN } else { HIDDEN };
    weights.invent(&format!("{layer}.self_attn.q_proj.weight"), &[32, inputs]);
    weights.invent(&format!("{layer}.self_attn.k_proj.weight"), &[16, inputs]);
    weights.invent(&format!("{layer}.mlp.gate_proj.weight"), &[24, HIDDEN]);
    if three {
        weights.invent("lm_head.weight", &[VOCAB / 2, HIDDEN]);
        weights.put_integers("d2t", &(0..VOCAB as i64 / 2).collect::<Vec<_>>());
    }
    weights.complete(|weights| Eagle::load(&mut rig.decoder, weights), Memory::invent);
    weights
}

fn load(rig: &mut Rig, weights: &Memory, options: EagleOptions) -> EagleDrafter<Reference> {
    EagleDrafter::load(&mut rig.decoder, weights, options).expect("a drafter")
}

fn start(three: bool, options: EagleOptions) -> (Rig, EagleDrafter<Reference>) {
    let mut rig = Rig::new(Memory::invent);
    let weights = random_head(&mut rig, three);
    let drafter = load(&mut rig, &weights, options);
    (rig, drafter)
}

/// The draft after all of `tokens` but the last, in one pass without other requests.
fn draft_of(three: bool, options: EagleOptions, tokens: &[u32], most: usize) -> Draft {
    let (mut rig, mut drafter) = start(three, options);
    let who = rig.add(&tokens[..tokens.len() - 1], None);
    rig.sequences[who].most = most;
    rig.read(&mut drafter, who, 64);
    assert_eq!(rig.sequences[who].tokens, tokens, "greedy answers are the same");
    rig.sequences.remove(who).draft
}

/// A chain by the head's own interface: the whole sequence, and then a token a pass.
fn plain_chain(three: bool, prompt: &[u32], len: usize) -> Vec<u32> {
    let mut rig = Rig::new(Memory::invent);
    let weights = random_head(&mut rig, three);
    let mut head = Eagle::load(&mut rig.decoder, &weights).expect("a head");
    let batch = |tokens: &[u32], first: usize| {
        let places = first as u32..(first + tokens.len()) as u32;
        Batch {
            tokens: tokens.to_vec(),
            positions: places.clone().collect(),
            spans: vec![Span { first_row: 0, num_rows: tokens.len() as u32, context: places.end }],
            ancestors: Vec::new(),
            groups: vec![GroupTables { slots: places.collect(), blocks: (0..6).collect(), first_block: vec![0] }],
            outputs: vec![tokens.len() as u32 - 1],
        }
    };
    let mut logits = Vec::new();
    rig.decoder.forward(&batch(prompt, 0)).expect("a step");
    rig.decoder.logits(&mut logits);
    let mut tokens = prompt[1..].to_vec();
    tokens.push(argmax(&logits));
    let mut features: Vec<_> = (0..prompt.len() as u32).map(Feature::Decoder).collect();
    let (mut chain, mut first) = (Vec::new(), 0);
    while chain.len() < len {
        head.forward(&mut rig.decoder, &batch(&tokens, first), &features).expect("a pass");
        head.logits(&mut rig.decoder, &mut logits);
        chain.push(head.token(argmax(&logits) as usize));
        features = vec![Feature::After(tokens.len() as u32 - 1)];
        first += tokens.len();
        tokens = vec![chain[chain.len() - 1]];
    }
    chain
}

/// The path that takes the first child at every node.
fn best_path(draft: &Draft) -> Vec<u32> {
    let (mut path, mut at) = (Vec::new(), None);
    while let Some(child) = draft.parents().iter().position(|&parent| parent == at) {
        path.push(draft.tokens()[child]);
        at = Some(child as u16);
    }
    path
}

#[test]
fn a_chain_is_what_the_head_says_pass_by_pass() {
    for three in [true, false] {
        let (mut rig, mut drafter) = start(three, CHAIN);
        let who = rig.add(&PROMPT, None);
        rig.sequences[who].most = 7;
        rig.read(&mut drafter, who, 64);
        let expected = plain_chain(three, &PROMPT, 7);
        assert_eq!(rig.sequences[who].draft, Draft::chain(expected.clone()));
        assert!(!three || expected.iter().all(|token| token % 2 == 0), "{expected:?} of a draft vocabulary");
        // A tree with all levels has the chain as its best path.
        let tree = draft_of(three, BUSH, &rig.sequences[who].tokens, 40);
        assert!(tree.len() > 20 && !tree.is_chain());
        assert_eq!(best_path(&tree)[..5], expected[..5]);
        let short = draft_of(three, CHAIN, &rig.sequences[who].tokens, 3);
        assert_eq!(short, Draft::chain(expected[..3].iter().copied()));
    }
}

#[test]
fn nodes_of_a_tree_are_those_of_chains() {
    // The children of every expanded node are the candidates of a chain with the same tokens.
    let tokens = draft_tokens(true);
    let small = draft_of(true, EagleOptions { width: 2, ..BUSH }, &tokens, 30);
    let large = draft_of(true, EagleOptions { width: 6, ..BUSH }, &tokens, 60);
    let find = |path: &[u32]| path.iter().try_fold(None, |at, &token| large.child(at, token).map(Some));
    for node in 0..small.len() as u16 {
        let mut path: Vec<u32> = small.path(node).map(|node| small.tokens()[usize::from(node)]).collect();
        path.reverse();
        assert!(find(&path).is_some(), "{path:?} is in no larger tree");
    }
}

/// The prompt and its first answer.
fn draft_tokens(three: bool) -> Vec<u32> {
    let (mut rig, mut drafter) = start(three, CHAIN);
    let who = rig.add(&PROMPT, None);
    rig.read(&mut drafter, who, 64);
    rig.sequences.remove(who).tokens
}

#[test]
fn chunks_and_company_change_nothing() {
    for three in [true, false] {
        let tokens = draft_tokens(three);
        let whole = draft_of(three, BUSH, &tokens, 20);
        for chunk in [1, 7, 16, 36] {
            let (mut rig, mut drafter) = start(three, BUSH);
            let who = rig.add(&PROMPT, None);
            rig.sequences[who].most = 20;
            rig.read(&mut drafter, who, chunk);
            assert_eq!(rig.sequences[who].draft, whole, "chunks of {chunk}");
        }
        let (mut rig, mut drafter) = start(three, BUSH);
        for prompt in [&PROMPT[..5], &PROMPT, &PROMPT[7..20]] {
            let who = rig.add(prompt, None);
            rig.sequences[who].most = 20;
        }
        rig.step(&mut drafter, &[(0, 3), (1, 20)]);
        rig.step(&mut drafter, &[(1, 64), (0, 64), (2, 64)]);
        assert_eq!(rig.sequences[1].draft, whole, "beside others");
        assert!(!rig.sequences[2].draft.is_empty());
    }
}

#[test]
fn a_prefix_from_the_cache_and_a_return_change_nothing() {
    for three in [true, false] {
        let tokens = draft_tokens(three);
        let whole = draft_of(three, CHAIN, &tokens, 8);
        let (mut rig, mut drafter) = start(three, CHAIN);
        let first = rig.add(&[&PROMPT[..33], &[1, 2, 3]].concat(), None);
        rig.read(&mut drafter, first, 64);
        rig.answer(&mut drafter, first, 1);
        let second = rig.add(&PROMPT, Some((first, 32)));
        rig.sequences[second].most = 8;
        rig.read(&mut drafter, second, 64);
        assert_eq!(rig.sequences[second].draft, whole, "behind a prefix");
        assert_eq!(rig.sequences[second].computed, 37);
        // A sequence that continues with another token attends to it too, except for one token.
        let third = rig.add(&[&PROMPT[..32], &[1, 2, 3]].concat(), Some((first, 32)));
        rig.sequences[third].most = 8;
        rig.read(&mut drafter, third, 64);
        let Sequence { table, tokens, draft, .. } = &rig.sequences[third];
        assert_eq!((drafter.held.start(0, table, tokens, 35), draft.len()), (0, 8));

        // Some steps with drafts, and then all tokens again in other blocks.
        rig.answer(&mut drafter, second, 3);
        let (tokens, draft) = (rig.sequences[second].tokens.clone(), rig.sequences[second].draft.clone());
        assert_eq!(draft, draft_of(three, CHAIN, &tokens, 8), "behind steps with drafts");
        rig.sequences[second].tokens.truncate(tokens.len() - 1);
        rig.preempt(second);
        rig.read(&mut drafter, second, 9);
        assert_eq!((&rig.sequences[second].tokens, &rig.sequences[second].draft), (&tokens, &draft), "after a return");
    }
}

/// A head for the predictable model.
fn knowing_head(rig: &mut Rig) -> Memory {
    let mut weights = Memory::default();
    weights.invent("layers.0.self_attn.q_proj.weight", &[32, HIDDEN]);
    weights.invent("layers.0.self_attn.k_proj.weight", &[16, HIDDEN]);
    weights.invent("layers.0.mlp.gate_proj.weight", &[24, HIDDEN]);
    // The state becomes the embedding of the row's token.
    weights.put("fc.weight", &[HIDDEN, 2 * HIDDEN], sparse(HIDDEN, 2 * HIDDEN, |column| (column, column), 1.0));
    weights.complete(|weights| Eagle::load(&mut rig.decoder, weights), foreseeable);
    weights
}

#[test]
fn a_head_that_knows_the_model_is_right_all_the_time() {
    for options in [CHAIN, BUSH, EagleOptions::default()] {
        let mut rig = Rig::new(foreseeable);
        let weights = knowing_head(&mut rig);
        let mut drafter = load(&mut rig, &weights, options);
        for most in [1, 2, 4] {
            let who = rig.add(&PROMPT, None);
            rig.sequences[who].most = most;
            rig.read(&mut drafter, who, 64);
            rig.answer(&mut drafter, who, 6);
            let sequence = &rig.sequences[who];
            assert_eq!(sequence.paces[1..], [1 + most; 6], "{most} nodes, {options:?}");
            assert!(sequence.tokens[36..].windows(2).all(|pair| pair[1] == follower(pair[0])));
        }
    }
}

/// A chain ends with its last scratch row, even if the options allow more.
#[test]
fn a_chain_ends_with_its_scratch() {
    let mut rig = Rig::new(foreseeable);
    let weights = knowing_head(&mut rig);
    let mut drafter = load(&mut rig, &weights, EagleOptions { depth: 60, ..CHAIN });
    // After 32 rows a chain begins in a scratch block, after 36 in the request's last block.
    for len in [32, 36] {
        let who = rig.add(&PROMPT[..len], None);
        rig.sequences[who].most = 63;
        rig.read(&mut drafter, who, 64);
        rig.answer(&mut drafter, who, 2);
        let sequence = &rig.sequences[who];
        assert_eq!(sequence.paces[1..], [MOST_ROWS + 2; 2], "a prompt of {len}");
        assert!(sequence.tokens[len - 1..].windows(2).all(|pair| pair[1] == follower(pair[0])));
    }
}

#[test]
fn a_head_that_rested_begins_anew() {
    let (mut rig, mut drafter) = start(true, CHAIN);
    let who = rig.add(&PROMPT[..6], None);
    rig.read(&mut drafter, who, 64);
    rig.answer(&mut drafter, who, MOST_QUIET_STEPS as usize + 20);
    let table = rig.sequences[who].table.clone();
    let held = |drafter: &EagleDrafter<Reference>, rig: &Rig| {
        let sequence = &rig.sequences[who];
        drafter.held.start(0, &table[..sequence.computed.div_ceil(16)], &sequence.tokens, sequence.computed)
    };
    let blocks = rig.sequences[who].computed.div_ceil(16);
    assert_eq!(held(&drafter, &rig), blocks, "nothing of late is there");
    rig.sequences[who].most = 4;
    let mut waited = 0;
    while rig.sequences[who].draft.is_empty() {
        rig.step(&mut drafter, &[(who, 64)]);
        waited += 1;
        assert!(waited <= 17, "drafts come with the next block");
    }
    rig.answer(&mut drafter, who, 3);
    assert_eq!(rig.sequences[who].draft.len(), 4);

    // The next request is followed from its first row on.
    let next = rig.add(&PROMPT, None);
    rig.sequences[next].most = 8;
    rig.read(&mut drafter, next, 64);
    assert_eq!(rig.sequences[next].draft, draft_of(true, CHAIN, &rig.sequences[next].tokens, 8));
}

#[test]
fn drafts_end_where_the_head_is_unsure_and_at_the_end_of_the_context() {
    let tokens = draft_tokens(true);
    let sure = draft_of(true, EagleOptions { least: 0.3, least_expanded: 0.3, ..BUSH }, &tokens, 20);
    assert!(sure.len() < draft_of(true, BUSH, &tokens, 20).len());
    let (mut rig, mut drafter) = start(false, BUSH);
    let prompt: Vec<u32> = PROMPT.iter().cycle().copied().take(118).collect();
    let who = rig.add(&prompt, None);
    rig.sequences[who].most = 9;
    rig.read(&mut drafter, who, 64);
    assert!(!rig.sequences[who].draft.is_empty());
}

/// Requests of one salt without drafts, for as many steps as the head follows them, and the effect
/// on other salts.
#[test]
fn nobody_notices_that_others_rest() {
    let drafts = |owner: Owner| {
        let (mut rig, mut drafter) = start(true, CHAIN);
        let rested = rig.add(&PROMPT[..6], None);
        rig.sequences[rested].owner = Owner { tenant: 1, salt: 1 };
        rig.read(&mut drafter, rested, 64);
        rig.answer(&mut drafter, rested, MOST_QUIET_STEPS as usize + 20);
        let who = rig.add(&PROMPT, None);
        (rig.sequences[who].owner, rig.sequences[who].most) = (owner, 4);
        // The head reads a prompt's chunks only while it follows requests, and attends to no other
        // rows.
        rig.step(&mut drafter, &[(who, 17)]);
        rig.read(&mut drafter, who, 64);
        let Sequence { table, tokens, computed, .. } = &rig.sequences[who];
        drafter.held.start(owner.salt, table, tokens, *computed)
    };
    assert_eq!(drafts(Owner { tenant: 2, salt: 2 }), 0, "all of it is seen");
    assert!(drafts(Owner { tenant: 1, salt: 1 }) > 0, "the head rested, and missed some of it");
}
