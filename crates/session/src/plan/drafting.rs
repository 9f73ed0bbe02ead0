//! Memory of drafting besides the model: its weights, the activations of its steps, its record of
//! past answers, and its own part of each block of keys and values. Upper bounds for heads and
//! suffixes.

use anyhow::Result;
use folio_device::cpu::Cpu;
use folio_device::{BLOCK_TOKENS, KvFormat};
use folio_engine::speculate::{DraftModel, SuffixOptions};
use folio_formats::WeightSource;
use folio_model::{DecoderLimits, KvGroupSpec, ModelSpec, OpenModel, activation_bytes};

use super::weights::WeightBytes;
use super::{StepSizes, working};
use crate::assets::Assets;
use crate::drafting::{Drafting, OpenedMethod};
use crate::target::Target;

/// Widths of the residual stream that a row of heads takes: states of three layers, the previous
/// step's, and the values between the products.
const HEAD_STREAMS: u64 = 24;
/// Blocks in which an EAGLE head stores the drafts of one sequence.
const GUESSED_BLOCKS: u64 = 4;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftingBytes {
    pub fixed: u64,
    /// Bytes for each block of the model's first group without a window.
    pub block: u64,
}

impl DraftingBytes {
    pub fn of(
        assets: &Assets,
        drafting: Option<&Drafting>,
        target: &Target,
        sizes: StepSizes,
        kv_format: KvFormat,
    ) -> Result<Self> {
        let Some(drafting) = drafting else { return Ok(Self::default()) };
        let spec = &assets.model.spec;
        let limits = sizes.limits(spec.max_context, vec![0; spec.kv_groups().len()], kv_format);
        match &drafting.method {
            OpenedMethod::Ngram(_) | OpenedMethod::Lookahead | OpenedMethod::Synthetic(_) => Ok(Self::default()),
            // Texts are in the host's memory.
            OpenedMethod::Suffix if target.device().has_own_memory() => Ok(Self::default()),
            OpenedMethod::Suffix => {
                let block = (BLOCK_TOKENS * SuffixOptions::TOKEN_BYTES) as u64;
                Ok(Self { fixed: SuffixOptions::default().shared_bytes as u64, block })
            }
            OpenedMethod::Draft(draft) => {
                let (model, options) = (&draft.assets.model, drafting.draft_options(draft));
                let limits = DraftModel::<Cpu>::limits(&model.spec, spec, &limits, &options)?;
                Self::of_model(model, &limits, options.stretch, target)
            }
            OpenedMethod::Medusa(heads) => Ok(Self { fixed: heads_bytes(spec, &limits, &*heads.weights), block: 0 }),
            OpenedMethod::Eagle(heads) => {
                let layer = spec.kv_groups().into_iter().next().map(|group| KvGroupSpec { layers: vec![0], ..group });
                let block = layer.map_or(0, |layer| layer.shape(1, kv_format).block_bytes());
                let guessed = GUESSED_BLOCKS * limits.spans as u64 * block;
                Ok(Self { fixed: heads_bytes(spec, &limits, &*heads.weights) + guessed, block })
            }
        }
    }

    /// `limits` are those beside a model without blocks: its own blocks then hold drafts. If tokens
    /// are translated, a block of the model's takes `stretch` blocks of the draft model's.
    fn of_model(draft: &OpenModel, limits: &DecoderLimits, stretch: f32, target: &Target) -> Result<Self> {
        let (spec, groups) = (&draft.spec, draft.spec.kv_groups());
        let weights = WeightBytes::of(draft, target)?;
        let each = groups.iter().map(|group| group.shape(1, limits.kv_format).block_bytes());
        let scratch: u64 = each.clone().zip(&limits.blocks).map(|(bytes, &count)| bytes * count as u64).sum();
        let activations = activation_bytes(spec, limits, |kind| target.device().value_bytes(kind));
        let working = working::bytes(spec, limits, &weights, target.device());
        let block = (each.sum::<u64>() as f64 * f64::from(stretch)).ceil() as u64;
        Ok(Self { fixed: weights.matrices + activations + working + scratch, block })
    }
}

/// Matrices take at most twice their stored size; rows of the model's output matrix at most sixteen
/// bits per value.
fn heads_bytes(spec: &ModelSpec, limits: &DecoderLimits, weights: &dyn WeightSource) -> u64 {
    let tensors = weights.names().into_iter().filter_map(|name| weights.tensor(name));
    let stored: u64 = tensors.map(|tensor| tensor.bytes.len() as u64).sum();
    let rows = (limits.rows.max(limits.spans) * spec.hidden) as u64 * 4 * HEAD_STREAMS;
    let logits = 4 * (limits.spans * spec.vocab_size) as u64;
    let borrowed = match (weights.tensor("lm_head.weight"), weights.tensor("d2t")) {
        (None, Some(tokens)) => 2 * (tokens.shape.iter().product::<usize>() * spec.hidden) as u64,
        _ => 0,
    };
    2 * stored + borrowed + rows + logits
}
