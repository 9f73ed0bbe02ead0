//! Answers with drafts equal those without: every drafting method with trained models, on 200
//! prompts of Rust code, questions and random bytes; greedy and sampled, with penalties, logprobs
//! and stop strings, alone and sixteen at once with preemption. Tokens are equal, and logprobs bit
//! by bit.

mod frame;
mod heads;
mod prompts;

use std::sync::{Arc, LazyLock};

use folio_engine::speculate::{
    DraftModel, DraftModelOptions, EagleDrafter, EagleOptions, Lookahead, LookaheadOptions, MedusaDrafter,
    MedusaOptions, Ngram, NgramOptions, OnHost, Suffix, SuffixOptions,
};
use folio_formats::{Gguf, WeightSource};
use folio_model::OpenModel;
use frame::{Frame, Make, Method};
use prompts::{Tokens, prompts, root};

use crate::drafters::{Knowing, Manner};

fn open(name: &str) -> OpenModel {
    folio_model::open(&root().join("models").join(name)).expect("a model that ships")
}

fn frame(model: &str, num_prompts: usize) -> Frame {
    let tokens = Tokens::read();
    Frame::new(open(model), prompts(&tokens, num_prompts), &tokens)
}

fn draft_model(model: OpenModel, options: DraftModelOptions) -> Make {
    Box::new(move |decoder| {
        let beside = decoder.backend().beside();
        Box::new(DraftModel::load(beside, &model, decoder, options).expect("a draft model"))
    })
}

fn medusa(heads: impl WeightSource + 'static, options: MedusaOptions) -> Make {
    Box::new(move |decoder| Box::new(MedusaDrafter::load(decoder, &heads, options).expect("heads")))
}

fn eagle(head: impl WeightSource + 'static, options: EagleOptions) -> Make {
    Box::new(move |decoder| Box::new(EagleDrafter::load(decoder, &head, options).expect("a head")))
}

/// As long as a chain can be, however unlikely.
const EAGLE_CHAIN: EagleOptions = EagleOptions { candidates: 1, width: 1, depth: 3, least: 0.0, least_expanded: 0.0 };
const EAGLE_TREE: EagleOptions = EagleOptions { candidates: 3, width: 2, depth: 3, least: 0.0, least_expanded: 0.0 };

/// All prompts, with the small model.
static SMALL: LazyLock<Frame> = LazyLock::new(|| frame("folio-rust-7m.gguf", 200));

#[test]
fn methods_that_need_no_weights() {
    let knowing = Knowing {
        manner: Manner::Trees,
        reads_step: true,
        vocab: SMALL.model.spec.vocab_size as u32,
        sequences: SMALL.sequences(),
        met: Arc::default(),
        random: 5,
    };
    let method = |name, most, drafter| Method::new(name, most, Box::new(move |_| drafter));
    SMALL.check(method("n-grams", 4, Box::new(OnHost(Ngram::new(NgramOptions::default())))));
    SMALL.check(method("suffixes", 8, Box::new(OnHost(Suffix::new(SuffixOptions::default())))));
    SMALL.check(method("lookahead", 14, Box::new(Lookahead::new(LookaheadOptions::default()))));
    SMALL.check(method("trees in which the answer is", 10, Box::new(knowing)));
}

#[test]
fn methods_with_weights() {
    // The model itself without its last layer: it agrees with the whole one now and then.
    let mut shorter = open("folio-rust-7m.gguf");
    shorter.spec.layers.pop();
    SMALL.check(Method::new("a draft model", 5, draft_model(shorter, DraftModelOptions::default())));
    let spec = &SMALL.model.spec;
    let heads = heads::medusa(spec.hidden, 2);
    SMALL.check(Method::new("Medusa", 6, medusa(heads, MedusaOptions::default())));
    for (name, most, options) in [("a chain of EAGLE", 3, EAGLE_CHAIN), ("a tree of EAGLE", 8, EAGLE_TREE)] {
        SMALL.check(Method::new(name, most, eagle(heads::eagle(spec), options)));
    }
}

#[test]
fn what_ships_for_the_large_model() {
    let large = frame("folio-rust-42m.gguf", 24);
    let small = open("folio-rust-7m.gguf");
    large.check(Method::new("the small model", 5, draft_model(small, DraftModelOptions::default())));
    let heads = |kind: &str| {
        let path = root().join(format!("models/folio-rust-42m.{kind}.gguf"));
        Gguf::open(&path).expect("heads that ship")
    };
    large.check(Method::new("its Medusa heads", 8, medusa(heads("medusa"), MedusaOptions::default())));
    large.check(Method::new("its EAGLE head", 8, eagle(heads("eagle"), EagleOptions::default())));
    large.check(Method::new("its EAGLE head, a chain", 3, eagle(heads("eagle"), EAGLE_CHAIN)));
}
