//! Draft trees through a whole model: logits of every row equal those of a chain that holds its
//! path, bit for bit, and so do the logits behind an accepted path.

use folio_device::cpu::{Cpu, CpuConfig};
use folio_device::tree;

use super::*;

/// Two of the branches share a beginning; the tree crosses a block's end.
const PARENTS: [Option<usize>; 9] = [None, Some(0), Some(0), Some(1), Some(2), Some(4), Some(2), Some(1), Some(5)];
const PREFIX: usize = 11;

fn tree_step(groups: usize, words: &[u64]) -> Batch {
    let mut step = batch(&TOKENS[PREFIX..PREFIX + words.len()], PREFIX, groups);
    step.positions = words.iter().map(|word| PREFIX as u32 + word.count_ones() - 1).collect();
    step.ancestors = words.to_vec();
    step
}

fn check<B: Backend>(backend: B, model_type: &str, extra: &str) {
    let config = config(model_type, extra);
    let model = OpenModel::from_config(&config, Box::new(invent(&config))).unwrap();
    let groups = model.spec.kv_groups().len();
    let limits = DecoderLimits { spans: PARENTS.len(), table_entries: 2 * PARENTS.len(), ..limits(groups) };
    let mut decoder = Decoder::load(backend, &model, limits, &mut |_| {}).unwrap();
    let vocab = decoder.spec().vocab_size;
    let words = tree::ancestors(&PARENTS);
    logits(&mut decoder, &batch(&TOKENS[..PREFIX], 0, groups));
    let found = logits(&mut decoder, &tree_step(groups, &words));

    let leaf = words[8];
    let length = leaf.count_ones() as usize;
    let pairs: Vec<(u32, u32)> = tree::moves(PREFIX, leaf).map(|(from, to)| (from as u32, to as u32)).collect();
    (0..groups).for_each(|group| decoder.move_tokens(group, &pairs));
    let next = batch(&[7], PREFIX + length, groups);
    let behind = logits(&mut decoder, &next);

    for &word in &words {
        let tokens: Vec<u32> = tree::path(word).map(|row| TOKENS[PREFIX + row]).collect();
        let chain = logits(&mut decoder, &batch(&tokens, PREFIX, groups));
        for (row, expected) in tree::path(word).zip(chain.chunks_exact(vocab)) {
            assert!(&found[row * vocab..(row + 1) * vocab] == expected, "{model_type}: row {row} of the tree");
        }
        // After accepting a beginning of the path, the rest of it is still in place.
        let is_kept = leaf & word == word;
        let after = logits(&mut decoder, &next);
        assert_eq!(after == behind, is_kept, "{model_type}: behind the path {word:#b}");
    }
}

#[test]
fn rows_of_a_tree_have_the_logits_of_chains() {
    let experts = r#", "num_local_experts": 3, "num_experts_per_tok": 2"#;
    for (model_type, extra) in [("llama", ""), ("gemma2", ""), ("gpt_oss", experts)] {
        check(Reference::new(), model_type, extra);
        check(Cpu::new(CpuConfig { threads: 2, isa: None }).unwrap(), model_type, extra);
    }
}

#[test]
fn words_that_do_not_fit_are_refused() {
    let config = config("llama", "");
    let mut decoder = try_load(Reference::new(), &config, &invent(&config)).unwrap();
    let step = Batch { ancestors: vec![1, 3], ..batch(&TOKENS[..4], 0, 1) };
    assert!(decoder.forward(&step).unwrap_err().to_string().contains("ancestors has 2"));
}
