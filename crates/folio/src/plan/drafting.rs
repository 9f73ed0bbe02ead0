//! What guessing ahead takes besides the model: its weights, the activations of its steps, and a part of its own for each
//! block of keys and values. Upper bounds, as far as heads are concerned.

use anyhow::Result;
use folio_device::{BLOCK_TOKENS, KvFormat};
use folio_formats::WeightSource;
use folio_model::{KvGroupSpec, ModelSpec, activation_bytes};

use super::weights::WeightBytes;
use super::{StepSizes, working};
use crate::assets::Assets;
use crate::drafting::Opened;
use crate::target::Target;

/// Widths of the residual stream that a row of heads takes: states of three layers, what the step before had, and what
/// lies between the products.
const HEAD_STREAMS: u64 = 24;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftingBytes {
    pub fixed: u64,
    /// For each block of the model's first group that sees everything.
    pub block: u64,
}

impl DraftingBytes {
    pub fn of(assets: &Assets, target: &Target, sizes: StepSizes, kv_format: KvFormat) -> Result<Self> {
        let Some(drafting) = &assets.drafting else { return Ok(Self::default()) };
        let spec = &assets.model.spec;
        match &drafting.method {
            Opened::Ngram(_) | Opened::Suffix | Opened::Lookahead => Ok(Self::default()),
            Opened::Draft(draft) => Self::of_model(draft, target, sizes, spec.max_context, kv_format),
            Opened::Medusa(heads) => Ok(Self { fixed: heads_bytes(spec, sizes, &*heads.weights), block: 0 }),
            Opened::Eagle(heads) => {
                let layer = spec.kv_groups().into_iter().next().map(|group| KvGroupSpec { layers: vec![0], ..group });
                let block = layer.map_or(0, |layer| layer.shape(1, kv_format).block_bytes());
                Ok(Self { fixed: heads_bytes(spec, sizes, &*heads.weights) + sizes.seqs as u64 * block, block })
            }
        }
    }

    fn of_model(
        draft: &Assets,
        target: &Target,
        sizes: StepSizes,
        max_len: usize,
        kv_format: KvFormat,
    ) -> Result<Self> {
        let (spec, groups) = (&draft.model.spec, draft.model.spec.kv_groups());
        let limits = sizes.limits(max_len + BLOCK_TOKENS, vec![0; groups.len()], kv_format);
        let weights = WeightBytes::of(&draft.model, target)?;
        let block = groups.iter().map(|group| group.shape(1, kv_format).block_bytes()).sum::<u64>();
        let activations = activation_bytes(spec, &limits, |kind| target.value_bytes(kind));
        let working = working::bytes(spec, &limits, &weights, target);
        // Guesses lie in a block of their own until they are more than that.
        let scratch = sizes.seqs as u64 * block;
        Ok(Self { fixed: weights.matrices + activations + working + scratch, block })
    }
}

/// Matrices are held no larger than twice what is stored.
fn heads_bytes(spec: &ModelSpec, sizes: StepSizes, weights: &dyn WeightSource) -> u64 {
    let stored: u64 =
        weights.names().iter().filter_map(|name| weights.tensor(name)).map(|t| t.bytes.len() as u64).sum();
    let rows = (sizes.tokens.max(sizes.seqs) * spec.hidden) as u64 * 4 * HEAD_STREAMS;
    let logits = 4 * (sizes.seqs * spec.vocab_size) as u64;
    2 * stored + rows + logits
}
